"""Every fault of planted.py, one each, in a good bundle of each kind: verify finds it, and nothing in the good one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import planted
import pytest
from breaks import rehash
from twins import bake_published

from bundler.findings import errors
from bundler.verify import verify

SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in planted.KINDS[1:]]


@pytest.fixture(scope="module")
def good(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind → a good bundle of it, baked once: the twin of what Google publishes."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = bake_published(kind, tiny(kind), tmp_path_factory.mktemp("good"))
        return made[kind]

    return make


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [planted.KINDS[0], *SLOW])
def test_no_planted_fault_passes(kind: str, good: Callable[[str], Path], tmp_path: Path) -> None:
    """The good bundle has no error; with one fault planted, and its manifest written anew, it has that fault's."""
    assert verify(good(kind)) == []
    passed = []
    for number, fault in enumerate(planted.faults_of(kind)):
        broken = tmp_path / f"{number}"
        shutil.copytree(good(kind), broken, copy_function=shutil.copy2 if fault in planted.BODY else _link_body)
        fault.plant(broken)
        rehash(broken)  # nobody shall find it by its hash, so none is computed again
        found = {finding.code for finding in errors(verify(broken, is_known=lambda entry, path: True))}
        if fault.finding not in found:
            passed.append((fault.name, fault.finding, sorted(found)))
        shutil.rmtree(broken)
    assert passed == []


def _link_body(source: str, destination: str) -> None:
    """A copy, but of the body's shards, which this fault leaves alone."""
    path = Path(source)
    if path.match("model-*.safetensors"):
        os.link(source, destination)
    else:
        shutil.copy2(source, destination)


def test_there_are_enough_faults_for_every_kind() -> None:
    """At least 40 different faults can be planted in each kind, and each is named once."""
    assert all(len(planted.faults_of(kind)) >= 40 for kind in planted.KINDS)
    assert len(planted.FAULTS) == sum(map(len, planted.TABLES.values()))


def test_the_table_is_what_was_measured() -> None:
    """PLANTED.md is the data, word for word, and the data speaks of no fault that is not planted."""
    assert Path(planted.__file__).with_name("PLANTED.md").read_text(encoding="utf-8") == planted.render()
    _, measured = planted.load_measured()
    assert measured.keys() <= planted.FAULTS.keys()
    for name, kinds in measured.items():
        assert set(kinds) <= set(planted.FAULTS[name].kinds), name

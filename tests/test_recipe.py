"""The recipe reader: every problem at once, each with its key path."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import RecipeError
from bundler.findings import Finding
from bundler.recipe import KEYS, Recipe, load, local_path, parse

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
BROKEN = sorted((ROOT / "tests" / "broken_recipes").glob("*.toml"))
SMALLEST = """
edition = 1
name = "gemma"
[body]
model = "google/gemma-4-31B-it-qat-q4_0-unquantized"
[calibration]
dataset = "HuggingFaceH4/ultrachat_200k"
[drafter]
model = "google/gemma-4-31B-it-assistant"
"""


def refusal(text: str, folder: Path = Path()) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        parse(text, folder)
    return caught.value


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_this_repository_load(path: Path) -> None:
    """Every recipe in recipes/ loads, has a drafter of its own and keeps its text."""
    recipe = load(path)
    assert recipe.text == path.read_text(encoding="utf-8")
    assert recipe.folder == path.parent
    assert recipe.body.model != recipe.drafter.model
    assert recipe.calibration.num_samples > 0


def test_the_recipes_are_the_promised_ones() -> None:
    """recipes/ holds the tiny recipe, one for each QAT body, and the seed's: ultrachat 256 x 2048, four cards."""
    assert [path.stem for path in RECIPES] == [
        "12b-qat", "26b-a4b-qat", "31b-abliterated", "31b-qat", "e4b-qat", "tiny-31b",
    ]  # fmt: skip
    seed = load(ROOT / "recipes" / "31b-abliterated.toml")
    assert seed.body.model == "huihui-ai/Huihui-gemma-4-31B-it-qat-q4_0-unquantized-abliterated"
    assert seed.drafter.model == "google/gemma-4-31B-it-assistant"
    assert (seed.calibration.dataset, seed.calibration.split) == ("HuggingFaceH4/ultrachat_200k", "train_sft")
    assert (seed.calibration.num_samples, seed.calibration.max_seq_length) == (256, 2048)
    assert (seed.serve.tensor_parallel_size, seed.serve.interconnect) == (4, "pcie")


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_recipe_is_refused_for_its_one_fault(path: Path) -> None:
    """A recipe with one fault gives exactly the finding that its first line names, and exit code 3."""
    expected = re.match(r"# (\S+) at (.+)", path.read_text(encoding="utf-8"))
    assert expected is not None
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert [(finding.code, finding.where) for finding in caught.value.findings] == [expected.groups()]
    assert caught.value.exit_code == 3


def test_all_problems_come_in_one_run() -> None:
    """Faults of syntax, type, range and missing keys are reported together, not one after the other."""
    text = """
    edition = 1
    naem = "gemma"
    [body]
    model = "google/gemma-4-31B-it"
    [calibration]
    dataset = "HuggingFaceH4/ultrachat_200k"
    num_samples = 0
    max_seq_length = "long"
    [serve]
    interconect = "pcie"
    """
    found = {(finding.where, finding.code) for finding in refusal(text).findings}
    assert found == {
        ("naem", "unknown-key"),
        ("name", "missing-key"),
        ("drafter.model", "missing-key"),
        ("calibration.num_samples", "out-of-range"),
        ("calibration.max_seq_length", "wrong-type"),
        ("serve.interconect", "unknown-key"),
    }
    assert "6 problems" in str(refusal(text))


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("[calibration]\nnum_calibration_samples = 8", "calibration.num_samples"),
        ("[serve]\ntp = 2\ntensor_parallel = 2", "serve.tensor_parallel_size"),
        ("[quantization]\nignored = []", "quantization.ignore"),
        ("[serve]\nnum_speculative_tokens = 4", "drafter.num_speculative_tokens"),
        ("[publsh]\ntag = 'v1'", "publish"),
    ],
)
def test_the_nearest_key_is_named(line: str, nearest: str) -> None:
    """An unknown key is answered with the valid key that was probably meant, in whichever table that is."""
    text = SMALLEST.replace("[calibration]", line + "\n" if "[calibration]" in line else line + "\n[calibration]")
    hints = [finding.hint or "" for finding in refusal(text).findings if finding.code == "unknown-key"]
    assert any(f"`{nearest}`" in hint for hint in hints)


def test_a_newer_edition_asks_for_an_upgrade() -> None:
    """An edition from the future is reported alone, with the advice to upgrade: its other keys may be new too."""
    error = refusal(SMALLEST.replace("edition = 1", "edition = 7\nsparkle = true"))
    assert [finding.hint for finding in error.findings] == ["upgrade bundler"]


def test_values_that_are_given_arrive_and_others_default() -> None:
    """A recipe's values are the file's own; keys that are left out have the documented defaults."""
    recipe = parse(SMALLEST + "num_speculative_tokens = 7\n[card]\nsections = ['a.md']\n", Path("here"))
    assert recipe.drafter.num_speculative_tokens == 7
    assert recipe.card.sections == (Path("a.md"),)
    assert (recipe.quantization.scheme, recipe.calibration.num_samples, recipe.serve.engine) == ("NVFP4", 256, "vllm")
    assert recipe.publish.private


def test_parse_looks_at_no_file() -> None:
    """A recipe's text can be read without the files it names, as from a finished bundle."""
    assert parse(SMALLEST + "[card]\nsections = ['absent.md']\n", Path("nowhere")).card.sections


def test_local_paths_start_at_the_recipe(tmp_path: Path) -> None:
    """./x and x.jsonl are paths from the recipe's folder, /x is absolute, and ORG/NAME is a Hub id."""
    assert local_path("./body", tmp_path) == tmp_path / "body"
    assert local_path("rows.jsonl", tmp_path) == tmp_path / "rows.jsonl"
    assert local_path("/models/body", tmp_path) == Path("/models/body")
    assert local_path("google/gemma-4-31B-it", tmp_path) is None


def test_an_absent_recipe_names_its_neighbour(tmp_path: Path) -> None:
    """A mistyped file name is answered with the recipe that lies there."""
    (tmp_path / "tiny-31b.toml").write_text(SMALLEST)
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "tiny-31.toml")
    assert "tiny-31b.toml" in str(caught.value.hint)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are a refusal, not a traceback."""
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="UTF-8"):
        load(tmp_path / "x.toml")


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "edition = 1\nedition = 2"])
def test_absurd_toml_is_refused(text: str) -> None:
    """Nesting, numbers and repetitions that the TOML parser cannot take are a refusal, not a traceback."""
    assert [finding.code for finding in refusal(text).findings] == ["not-toml"]


@pytest.mark.parametrize("version", [">=0.21", ">=0.21,!=0.22.*", "==0.23.*", "~=0.27.0", ">0.21,<0.22", "<=0.24"])
def test_version_ranges_that_some_release_satisfies_pass(version: str) -> None:
    """A version range that can be satisfied is taken as it is."""
    assert parse(SMALLEST + f'[serve]\nversion = "{version}"', Path()).serve.version == version


def test_every_key_is_documented_and_no_other() -> None:
    """recipes/README.md explains every key of every table and nothing that is no key."""
    documented, prefix = [], ""
    for line in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (?:\[(\w+)\])?", line):
            prefix = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \|", line):
            documented.append(prefix + row[1])
    assert sorted(documented) == sorted(["edition", *KEYS])


def test_documented_defaults_are_the_real_ones() -> None:
    """Where recipes/README.md states a default literally, it is the one that applies."""
    recipe = parse(SMALLEST, Path())
    section = ""
    checked = 0
    for line in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8").splitlines():
        section = match[1] if (match := re.match(r"## \[(\w+)\]", line)) else section
        row = re.match(r"\| `(\w+)` \| [\w ]+ \| `([^`]+)` \|", line)
        if row and section and row[2] != "main":
            value = getattr(getattr(recipe, section), row[1])
            assert json.loads(row[2]) == (list(value) if isinstance(value, tuple) else value)
            checked += 1
    assert checked > 10


# Property tests.

names = st.from_regex(r"[a-z0-9]{1,8}(-[a-z0-9]{1,8})?", fullmatch=True)
hub_ids = st.builds("{}/{}".format, names, names)
lines = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1)
any_toml = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(codec="utf-8")) | st.dates(),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(["model", "x"]) | lines, children, max_size=3)
    ),
    max_leaves=6,
)


def toml(value: Any) -> str:
    """A value in TOML's inline form."""
    match value:
        case bool() | int() | float():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
        case Path():
            return toml(str(value))
    return str(value)


def findings_of(text: str) -> list[Finding] | None:
    """None for a good recipe."""
    try:
        parse(text, Path())
    except RecipeError as refused:
        return list(refused.findings)
    return None


def document(table: dict[str, Any]) -> str:
    return "".join(f"{toml(key)} = {toml(value)}\n" for key, value in table.items())


@given(
    st.dictionaries(st.sampled_from(["name", "body", "serve", "card", "calibration"]) | lines, any_toml, max_size=5)
)
def test_no_document_crashes_the_reader(table: dict[str, Any]) -> None:
    """Whatever a TOML document holds, reading it gives a recipe or a RecipeError with findings."""
    assert findings_of(document({"edition": 1, **table})) != []


@given(st.sampled_from(KEYS), any_toml)
def test_no_value_crashes_the_reader(key: str, value: Any) -> None:
    """Whatever stands behind a key, reading it gives that value or a finding about that key or its table."""
    table, _, name = key.rpartition(".")
    whole: dict[str, Any] = {
        "edition": 1,
        "name": "gemma",
        "body": {"model": "a/b"},
        "calibration": {"dataset": "a/c"},
        "drafter": {"model": "a/d"},
    }
    whole = {**whole, table: {**whole.get(table, {}), name: value}} if table else {**whole, name: value}
    findings = findings_of(document(whole))
    assert findings is None or all(finding.where.startswith((key, table or key)) for finding in findings)


@given(st.data())
def test_a_valid_recipe_round_trips(data: st.DataObject) -> None:
    """A recipe that is written out key by key and read again is the same recipe."""
    draw = data.draw
    tables = {
        "body": {"model": draw(hub_ids), "revision": draw(st.none() | names)},
        "quantization": {
            "ignore": draw(st.lists(names.map(r"re:.*{}$".format), unique=True, max_size=3).map(tuple)),
            "compute": "exact",
            "weight_observer": draw(st.sampled_from(["memoryless_minmax", "memoryless_mse"])),
        },
        "calibration": {"dataset": draw(hub_ids.map("d-{}".format)), "num_samples": draw(st.integers(1, 9999))},
        "drafter": {"model": draw(hub_ids.map("a-{}".format)), "num_speculative_tokens": draw(st.integers(1, 16))},
        "serve": {"version": draw(st.sampled_from([">=0.21", "==0.30.*"])), "max_model_len": draw(st.integers(1))},
        "card": {"summary": draw(st.none() | lines), "warnings": draw(st.lists(lines, unique=True).map(tuple))},
        "publish": {"repo_id": draw(st.none() | hub_ids), "private": draw(st.booleans())},
    }
    given = {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}
    recipe = parse(document({"edition": 1, "name": "gemma", **given}), Path())

    def everything(value: Recipe) -> dict[str, Any]:
        fields = dataclasses.asdict(value)
        return {k: v for k, v in fields.items() if k not in ("text", "folder")}

    read = everything(recipe)
    assert all(read[name][key] == value for name, table in given.items() for key, value in table.items())
    again = {
        name: {k: v for k, v in t.items() if v is not None} if isinstance(t, dict) else t for name, t in read.items()
    }
    assert everything(parse(document({"edition": 1, **again}), Path())) == read


# Changes that are tried on a recipe.


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ("calibration.num_samples=32", "calibration.num_samples", 32),
        (" serve.tensor_parallel_size = 2 ", "serve.tensor_parallel_size", 2),
        ("serve.version=>=0.23,!=0.25.*", "serve.version", ">=0.23,!=0.25.*"),
        ("serve.max_model_len=", "serve.max_model_len", None),
        ('card.languages=["de", "en"]', "card.languages", ("de", "en")),
        ("card.title='Another = title'", "card.title", "Another = title"),
        ("name=007", "name", "007"),
        ("publish.private=false", "publish.private", False),
    ],
)
def test_a_change_is_tried(change: str, path: str, value: object) -> None:
    """`key=value` sets any key, by its own type; an empty value leaves it out; the text stays the file's own."""
    file = ROOT / "recipes" / "tiny-31b.toml"
    recipe = load(file, [change])
    found: object = recipe
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert recipe.text == file.read_text(encoding="utf-8")


def test_changes_are_refused_like_a_recipe() -> None:
    """Unknown keys with the nearest one, wrong types and impossible values: all at once, each with its key path."""
    changes = [
        "body.calibration.num_samples=32",
        "calibration.seed",
        "nonsense=1",
        "calibration.num_samples=many",
        "publish.private=yes",
        "serve.kv_cache_dtype=fp4",
    ]
    with pytest.raises(RecipeError) as caught:
        load(ROOT / "recipes" / "tiny-31b.toml", changes)
    found = {(finding.code, finding.where) for finding in caught.value.findings}
    assert found == {
        ("unknown-key", "--set body.calibration.num_samples=32"),
        ("unknown-key", "--set calibration.seed"),
        ("unknown-key", "--set nonsense=1"),
        ("wrong-type", "calibration.num_samples"),
        ("wrong-type", "publish.private"),
        ("unknown-value", "serve.kv_cache_dtype"),
    }
    hints = {finding.where: str(finding.hint) for finding in caught.value.findings}
    assert "`calibration.num_samples=…`" in hints["--set body.calibration.num_samples=32"]

"""Engine facts are rows with a source; the right ones reach a bundle; the lines they end in work in a shell."""

from __future__ import annotations

import datetime
import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from bundler.engines import (
    Setting,
    check_serve,
    load_facts,
    make_release_ranges,
    make_serve_command,
    parse_facts,
    render_bash,
    render_powershell,
    select_facts,
)
from bundler.engines.facts import Verdict
from bundler.findings import Severity
from bundler.gemma4 import Kind
from bundler.recipe import Drafter, Serve

FACTS = load_facts()
DRAFTER = Drafter(model="google/gemma-4-31B-it-assistant", num_speculative_tokens=4)
ROW = """
[[fact]]
id = "a-row"
section = "trap"
verdict = "broken"
title = "Title"
text = "Text."
source = ["vllm-project/vllm#1"]
basis = "reported"
checked = 2026-11-30
"""


def setting(kind: Kind | None = Kind.DENSE, **serve: object) -> Setting:
    return Setting(serve=Serve(**serve), kind=kind)  # type: ignore[arg-type]


def ids(of: Setting) -> set[str]:
    return {match.fact.id for match in select_facts(FACTS, of)}


def codes(of: Setting, severity: Severity) -> set[str]:
    return {finding.code for finding in check_serve(FACTS, of) if finding.severity is severity}


def test_every_row_that_ships_has_a_source_and_a_date() -> None:
    """A fact without a source or with a date to come is no fact."""
    assert len(FACTS.rows) > 30
    for row in FACTS.rows:
        assert row.source, row.id
        assert row.checked <= datetime.date(2026, 12, 31), row.id
        assert row.do or row.verdict is not Verdict.BROKEN or row.section == "hardware", row.id


def test_a_good_row_has_no_problem() -> None:
    """The row that the next test breaks is itself whole."""
    facts, problems = parse_facts(ROW, "x.toml")
    assert problems == []
    assert facts.rows[0].id == "a-row"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('basis = "reported"', "", "basis is missing"),
        ('basis = "reported"', 'basis = "guessed"', "basis must be"),
        ('source = ["vllm-project/vllm#1"]', "source = []", "source is missing"),
        ('verdict = "broken"', 'verdict = "maybe"', "verdict must be"),
        ("checked = 2026-11-30", 'checked = "yesterday"', "checked must be a date"),
        ('section = "trap"', 'section = "misc"', "section must be"),
        ('text = "Text."', 'text = "Text."\nversions = ">>0.2"', "versions is no version specifier"),
        ('text = "Text."', 'text = "Text."\nwhen = { kinds = ["huge"] }', "no such kind: huge"),
        ('text = "Text."', 'text = "Text."\nwhen = { tp = 2 }', "unknown key when.tp"),
        ('text = "Text."', 'text = "Text."\nflag = "--x"', "unknown key flag"),
        ('id = "a-row"', "id = ", "x.toml"),
    ],
)
def test_a_bad_row_is_named_with_its_fault(old: str, new: str, problem: str) -> None:
    """A row that is not well formed is a problem, never a silent gap in a card."""
    _, problems = parse_facts(ROW.replace(old, new), "x.toml")
    assert any(problem in text for text in problems), problems


@pytest.mark.parametrize(
    ("kind", "version", "severity", "code"),
    [
        (Kind.DENSE, ">=0.20", Severity.ERROR, "engine-broken"),  # no drafter before 0.21
        (Kind.PER_LAYER, "==0.22.*", Severity.ERROR, "engine-broken"),  # heads of a group differ
        (Kind.PER_LAYER, ">=0.21", Severity.WARNING, "engine-broken-release"),
        (Kind.UNIFIED, ">=0.21", Severity.ERROR, "engine-broken"),  # the 12B came with 0.23
        (Kind.DENSE, "==0.26.0", Severity.NOTE, "engine-remedy"),
        (Kind.DENSE, "==0.27.1", Severity.NOTE, "engine-remedy"),
        (Kind.DENSE, ">=9", Severity.WARNING, "engine-untried"),
    ],
)
def test_a_version_range_is_judged(kind: Kind, version: str, severity: Severity, code: str) -> None:
    """A range that begins with a release that cannot run the bundle is refused; a hole in it is a warning."""
    assert code in codes(setting(kind, version=version), severity)


@pytest.mark.parametrize(
    ("kind", "version"),
    [(Kind.DENSE, ">=0.21"), (Kind.MOE, ">=0.21"), (Kind.UNIFIED, ">=0.23"), (Kind.PER_LAYER, ">=0.21,!=0.22.*")],
)
def test_a_sound_range_has_no_error(kind: Kind, version: str) -> None:
    """The ranges of the recipes that ship are not refused, each kind from its first working release on."""
    assert codes(setting(kind, version=version), Severity.ERROR) == set()


def test_a_moe_over_two_gpus_is_refused() -> None:
    """Half an expert of the 26B is 352 columns wide, which no kernel takes."""
    assert "engine-broken" in codes(setting(Kind.MOE, tensor_parallel_size=2), Severity.ERROR)
    assert codes(setting(Kind.MOE, tensor_parallel_size=1), Severity.ERROR) == set()


def test_an_fp8_cache_with_a_drafter_is_unproven() -> None:
    """Whether the drafter gets the scales of an FP8 cache differs by release: say so."""
    assert "engine-unproven" in codes(setting(kv_cache_dtype="fp8"), Severity.WARNING)
    assert {"fp8-kv-and-drafter", "fp8-kv-sm86"} <= ids(setting(kv_cache_dtype="fp8"))
    assert "more-kv" in ids(setting())


def test_a_draft_length_that_nobody_found_to_pay_is_noted() -> None:
    """The recipe may ask for any draft length; an unusual one is on record."""
    unusual = Setting(serve=Serve(), kind=Kind.MOE, num_speculative_tokens=9)
    assert "draft-length-unusual" in {finding.code for finding in check_serve(FACTS, unusual)}
    assert "draft-length-unusual" not in {finding.code for finding in check_serve(FACTS, setting())}


def test_facts_of_other_kinds_stay_away() -> None:
    """A card of the 31B does not speak of experts, shared KV layers or the 12B."""
    assert not {"moe-two-gpus", "spark-moe", "shared-kv-tensors", "unified-from-0.23"} & ids(setting())
    assert {"older-cards", "sglang-older-cards", "flashinfer-b200", "one-device"} <= ids(setting())
    assert not {"blackwell-native", "spark-moe"} & ids(setting(None))


def test_a_single_gpu_needs_no_interconnect_flag_and_a_linked_box_only_reads_of_it() -> None:
    """The trap of boxes without peer-to-peer access is shown to all who use several GPUs, applied to those boxes."""
    assert "no-peer-to-peer" not in ids(setting())
    for interconnect, applied in (("nvlink", False), ("pcie", True)):
        of = {"tensor_parallel_size": 4, "interconnect": interconnect}
        assert "no-peer-to-peer" in ids(setting(**of))
        assert ("--disable-custom-all-reduce" in command(**of).args) is applied
        assert ("NCCL_P2P_DISABLE" in command(**of).env) is applied


def test_releases_are_put_together_by_answer() -> None:
    """A reader sees at once which releases run the bundle, and what the others need."""
    answers = {entry.versions: entry.answer for entry in make_release_ranges(FACTS, setting(Kind.PER_LAYER))}
    assert answers["0.22.0 to 0.22.1"].startswith("no: ")
    assert answers["0.25.0 to 0.26.0"] == "only with `VLLM_USE_V2_MODEL_RUNNER=1`"
    assert answers["0.27.0 to 0.27.1"] == "only with `transformers<=5.14.1`"
    assert answers["0.28.0 to 0.32.0"] == "yes"


# ---- serve lines -------------------------------------------------------------------------------------------------

BOX = {"tensor_parallel_size": 4, "interconnect": "pcie", "kv_cache_dtype": "fp8", "max_model_len": 16384}


def command(drafter: Drafter | None = DRAFTER, **serve: object):  # type: ignore[no-untyped-def]
    of = setting(**serve)
    return make_serve_command(of.serve, drafter, select_facts(FACTS, of), name="org/a-name")


def test_a_pinned_release_brings_its_remedy_into_the_line() -> None:
    """A recipe that pins 0.26 prints the runner that works there; one that allows more does not."""
    assert command(version="==0.26.0").env == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert command(version=">=0.21").env == {}


def test_the_drafter_is_a_local_path_and_never_quantized() -> None:
    """The drafter is named by its folder, with the method, and without a `quantization` key."""
    made = command()
    assert made.speculative == {"method": "mtp", "model": "{folder}/assistant", "num_speculative_tokens": 4}


def run_bash(text: str, tmp_path: Path, folder: str) -> tuple[dict[str, str], list[str]]:
    """Run a card's block with stubs for `hf` and `vllm`; what vllm was given."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    report = tmp_path / "report.json"
    (stubs / "hf").write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(folder)}\n")
    (stubs / "vllm").write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        f"json.dump([dict(os.environ), sys.argv[1:]], open({str(report)!r}, 'w'))\n"
    )
    for stub in stubs.iterdir():
        stub.chmod(0o755)
    path = f"{stubs}:/usr/local/bin:/usr/bin:/bin"
    subprocess.run(["bash", "-euc", text], check=True, env={"PATH": path}, cwd=tmp_path)
    env, argv = json.loads(report.read_text())
    return env, argv


@pytest.mark.parametrize("folder", ["/models/a-name", "/my models/it's $HOME `x`"])
def test_the_bash_line_reaches_vllm_whole(tmp_path: Path, folder: str) -> None:
    """bash hands vLLM one JSON argument with the real path in it, whatever the folder is called."""
    text = "D=$(hf download org/a-name --quiet)\n" + render_bash(command(**BOX))
    env, argv = run_bash(text, tmp_path, folder)
    assert env["NCCL_P2P_DISABLE"] == "1"
    assert argv[:2] == ["serve", folder]
    options = dict(itertools.pairwise(argv))
    assert options["--tensor-parallel-size"] == "4"
    assert options["--kv-cache-dtype"] == "fp8"
    assert options["--max-model-len"] == "16384"
    assert int(options["--max-num-batched-tokens"]) >= 2496
    assert "--disable-custom-all-reduce" in argv
    assert json.loads(options["--speculative-config"]) == {
        "method": "mtp",
        "model": f"{folder}/assistant",
        "num_speculative_tokens": 4,
    }


def test_the_body_serves_alone(tmp_path: Path) -> None:
    """Without the drafter the line has no speculative configuration, and the rest stays."""
    _, argv = run_bash("D=/m\n" + render_bash(command(None, **BOX)), tmp_path, "/m")
    assert "--speculative-config" not in argv
    assert "--disable-custom-all-reduce" in argv


def parse_powershell(text: str, variables: dict[str, str]) -> list[list[str]]:
    """The words of each command, by PowerShell's rules for quotes and backticks (about_Quoting_Rules)."""
    commands: list[list[str]] = [[]]
    pattern = r"`\n\s*|\n|[ \t]+|'((?:[^']|'')*)'|\"((?:[^\"`]|`.)*)\"|([^\s'\"`]+)"
    position = 0
    while position < len(text):
        match = re.compile(pattern).match(text, position)
        assert match, text[position:]
        position = match.end()
        single, double, bare = match.groups()
        if single is not None:
            commands[-1].append(single.replace("''", "'"))
        elif double is not None:
            expanded = re.sub(r"(?<!`)\$(\w+)", lambda name: variables[name[1]], double)
            commands[-1].append(re.sub(r"`(.)", r"\1", expanded))
        elif bare is not None:
            # An unquoted word that starts with a dash is split at its first dot (PowerShell#6291).
            assert not (bare.startswith("-") and "." in bare), f"{bare} is split by PowerShell"
            assert not re.search(r"[{}();,@%&|<>#$]", bare) or bare.startswith("$env:"), f"{bare} is not literal"
            commands[-1].append(bare)
        elif match[0] == "\n":
            commands.append([])
    return commands


def split_like_windows(line: str) -> list[str]:
    """A command line as the C runtime splits it (CommandLineToArgvW)."""
    words, current, quoted, started = [], "", False, False
    for match in re.finditer(r'(\\*)(")|(\\+)|(.)', line):
        slashes, quote, lone, char = match.groups()
        if quote:
            current += "\\" * (len(slashes) // 2)
            if len(slashes) % 2:
                current += '"'
            else:
                quoted, started = not quoted, True
        elif lone:
            current, started = current + lone, True
        elif char in " \t" and not quoted:
            if started:
                words.append(current)
            current, started = "", False
        else:
            current, started = current + char, True
    return [*words, current] if started else words


def as_vllm_reads(argv: list[str]) -> dict[str, object]:
    """vLLM's own rule for dotted arguments: `--a.b value` is the key b of the JSON argument --a; values are JSON."""
    config: dict[str, object] = {}
    for word, value in itertools.pairwise(argv):
        if word.startswith("--speculative-config."):
            try:
                config[word.partition(".")[2]] = json.loads(value)
            except ValueError:
                config[word.partition(".")[2]] = value
    return config


@pytest.mark.parametrize("folder", ["/models/a-name", r"C:\Users\A B\hub\a-name"])
def test_the_powershell_line_says_the_same(folder: str) -> None:
    """PowerShell 5.1 and 7 give vLLM the arguments that bash gives it: no argument holds a double quote.

    5.1 and 7.0-7.2 put an argument with spaces between double quotes and escape nothing; 7.3 escapes. A line without
    double quotes inside its arguments is the same in both, which is checked here through the C runtime's splitting.
    """
    text = render_powershell(command(**BOX))
    *assignments, words = parse_powershell(text, {"D": folder})
    assert assignments == [["$env:NCCL_P2P_DISABLE", "=", "1"]]
    assert not any('"' in word for word in words)
    assert split_like_windows(" ".join(f'"{word}"' if " " in word else word for word in words)) == words
    assert words[:3] == ["vllm", "serve", folder]
    assert as_vllm_reads(words) == {"method": "mtp", "model": f"{folder}/assistant", "num_speculative_tokens": 4}
    assert words[words.index("--max-num-batched-tokens") + 1] == "4096"

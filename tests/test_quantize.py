"""The body: the bytes that llm-compressor's own oneshot writes, a layer at a time, and nothing lost when stopped."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundler import checkpoint, gemma4, hub, quantize
from bundler.errors import QuantizationError, SourceError
from bundler.layout import Layout, make_layout
from bundler.quantize.journal import open_journal
from bundler.recipe import Recipe, SourceRef, parse
from bundler.source import Source

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("dense", "moe", "per-layer", "unified")
RECIPE = """
edition = 1
name = "test"
[quantization]
compute = "exact"
[body]
model = "./body"
[calibration]
dataset = "./calibration.jsonl"
num_samples = 6
max_seq_length = 96
[fidelity]
num_samples = 2
[drafter]
model = "./drafter"
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of Gemma 4 in turn."""
    return str(request.param)


def make_recipe(folder: Path, quantization: str = "") -> Recipe:
    """A recipe whose paths start in `folder`, with the example's calibration conversations beside it."""
    shutil.copytree(
        ROOT / "examples" / "tiny-31b", folder, ignore=shutil.ignore_patterns("body", "drafter", "RESULTS.md")
    )
    return parse(RECIPE.replace("[quantization]\n", quantization or "[quantization]\n"), folder)


def load_body(folder: Path, recipe: Recipe) -> tuple[Source, Layout]:
    """A body's source and the layout that the recipe gives it."""
    body = hub.resolve(SourceRef(model=str(folder)), recipe.folder)
    ignore = gemma4.make_ignore(gemma4.find_kind(body.config), recipe.quantization.ignore)
    return body, make_layout({name: tensor.shape for name, tensor in body.tensors.items()}, body.config, ignore)


def bake(recipe: Recipe, folder: Path, out: Path, **options: Any) -> None:
    """Quantize the body in `folder` into `out`, journalled beside it."""
    body, layout = load_body(folder, recipe)
    out.mkdir(exist_ok=True)
    journal = open_journal(out.parent / f"{out.name}.jsonl", "the same build")
    quantize.run(recipe, body, layout, out, journal=journal, dataset_commit=None, **options)


def tensor_bytes(folder: Path) -> Iterator[tuple[str, checkpoint.Shape, bytes]]:
    """Every tensor of a checkpoint with its shape and bytes."""
    for name, tensor in checkpoint.load_tensors(folder).items():
        yield name, tensor.shape, (folder / tensor.file).read_bytes()[tensor.start : tensor.end]


def oneshot(recipe: Recipe, folder: Path, out: Path) -> None:
    """The oracle: llm-compressor's own path over the whole model, for the same calibration samples."""
    import torch
    from llmcompressor import oneshot as run
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForImageTextToText

    from bundler.quantize.samples import load_samples
    from bundler.quantize.stream import load_processor

    processor = load_processor(folder)
    samples = load_samples(recipe, None, processor)
    quantization = recipe.quantization
    run(
        model=AutoModelForImageTextToText.from_pretrained(folder, dtype="auto"),
        dataset=torch.utils.data.DataLoader(samples.inputs, batch_size=None),
        recipe=QuantizationModifier(
            targets="Linear",
            scheme=quantization.scheme,
            ignore=list(load_body(folder, recipe)[1].ignore),
            weight_observer=quantization.weight_observer,
            input_observer=quantization.input_observer,
        ),
        processor=processor,
        pipeline="basic",  # the sequential one cannot trace E2B/E4B, nor mix text with images
        output_dir=str(out),
    )


@pytest.mark.filterwarnings("ignore")  # llm-compressor's and transformers' own
def test_every_tensor_is_what_oneshot_writes(tiny: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    """Every tensor of the body is byte-identical to llm-compressor's oneshot, for every kind, images included."""
    recipe = make_recipe(tmp_path / "recipe")
    body = tiny(kind) / "body"
    bake(recipe, body, tmp_path / "ours")
    oneshot(recipe, body, tmp_path / "theirs")
    assert set(tensor_bytes(tmp_path / "ours")) == set(tensor_bytes(tmp_path / "theirs"))
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    ours = quantize.make_quantization_config(recipe.quantization, tuple(config["ignore"]))
    assert ours == config


def test_fast_mode_differs_by_rounding_alone(
    tiny: Callable[[str], Path], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched, through SDPA and with experts of our own, the weights are the same bytes, and where both modes compute
    in float32 throughout, the input scales are the same too.

    In bf16 a random body amplifies rounding from layer to layer, by 35 % where a router decides otherwise; on the
    trained example fast mode is within 1 % of exact mode as it is: test_fidelity.
    """
    import torch

    from bundler.quantize.memory import Room

    make = Room.make
    monkeypatch.setattr(quantize, "_choose_dtype", lambda *_: (torch.float32, 0.0))
    monkeypatch.setattr(Room, "make", lambda self, name, rows, width, _: make(self, name, rows, width, torch.float32))
    exact = make_recipe(tmp_path / "recipe")
    fast = replace(exact, quantization=replace(exact.quantization, compute="fast"))
    tensors: list[dict[str, bytes]] = []
    for name, recipe in (("exact", exact), ("fast", fast)):
        bake(recipe, tiny(kind) / "body", tmp_path / name)
        tensors.append({name: data for name, _, data in tensor_bytes(tmp_path / name)})
    scales = [name for name in tensors[0] if name.endswith(".input_global_scale")]
    values = [torch.tensor([struct.unpack("<f", found[name])[0] for name in scales]) for found in tensors]
    assert len(scales) >= 20
    torch.testing.assert_close(values[1], values[0], rtol=1e-3, atol=0)
    assert {n: d for n, d in tensors[0].items() if n not in scales} == {
        n: d for n, d in tensors[1].items() if n not in scales
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "observer"),
    [
        ("moe", "memoryless_mse"),
        ("dense", "imatrix_mse"),
        pytest.param("dense", "nvfp4_expanded_mse", marks=pytest.mark.slow),
        pytest.param("moe", "nvfp4_expanded_imatrix", marks=pytest.mark.slow),
    ],
)
def test_ignore_and_observers_are_llm_compressors(
    tiny: Callable[[str], Path], kind: str, observer: str, tmp_path: Path
) -> None:
    """The recipe's own ignore patterns (whole experts too) and observers give oneshot's bytes."""
    extra = f"""[quantization]
ignore = ["re:.*self_attn.*", "re:.*layers[.]1[.]experts[.]3[.].*"]
weight_observer = "{observer}"
input_observer = "minmax"
"""
    recipe = make_recipe(tmp_path / "recipe", extra)
    body = tiny(kind) / "body"
    bake(recipe, body, tmp_path / "ours")
    oneshot(recipe, body, tmp_path / "theirs")
    assert set(tensor_bytes(tmp_path / "ours")) == set(tensor_bytes(tmp_path / "theirs"))


def test_a_memory_limit_is_kept_or_refused(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too low a limit names the smallest that works, which does; what memory does not hold is mapped from a file."""
    from bundler.quantize import memory

    recipe, body = make_recipe(tmp_path / "recipe"), tiny("dense") / "body"
    bake(recipe, body, tmp_path / "free")
    with pytest.raises(QuantizationError, match="is too low") as refused:
        bake(recipe, body, tmp_path / "low", memory_limit_bytes=memory.parse_bytes("512MiB"))
    smallest = str(refused.value.hint).split()[-1]
    bake(recipe, body, tmp_path / "smallest", memory_limit_bytes=memory.parse_bytes(smallest))
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    bake(recipe, body, tmp_path / "none-left")
    assert {path.name for path in tmp_path.glob("*.bin")} >= {"calibration-hidden.bin", "heldout-source-hidden.bin"}
    wanted = list(tensor_bytes(tmp_path / "free"))
    assert list(tensor_bytes(tmp_path / "smallest")) == wanted
    assert list(tensor_bytes(tmp_path / "none-left")) == wanted


def test_what_is_not_quantized_is_the_sources(tiny: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    """Vision, audio, embeddings, router, norms and per-layer projections are copied byte for byte."""
    recipe = make_recipe(tmp_path / "recipe")
    folder = tiny(kind) / "body"
    bake(recipe, folder, tmp_path / "out")
    source = {name: data for name, _, data in tensor_bytes(folder)}
    kept = {name: data for name, _, data in tensor_bytes(tmp_path / "out") if name in source}
    assert {name: source[name] for name in kept} == kept
    quantized = {name.rpartition(".")[0] for name, _, _ in tensor_bytes(tmp_path / "out") if name.endswith("_packed")}
    words = ("vision", "audio", "embed", "router", "per_layer", "lm_head", "norm")
    assert quantized
    assert not [name for name in quantized if any(word in name for word in words)]


def test_a_stopped_bake_carries_on(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A bake that is stopped after any layer carries on, does no finished layer again, and ends in the same bytes."""
    recipe = make_recipe(tmp_path / "recipe")
    body = tiny("dense") / "body"
    bake(recipe, body, tmp_path / "whole")

    class Stopped(Exception):
        """The power went."""

    def stop(progress: quantize.Progress) -> None:
        if progress.layers == 2:
            raise Stopped

    out = tmp_path / "stopped"
    with pytest.raises(Stopped):
        bake(recipe, body, out, tell=stop)
    finished = (tmp_path / "stopped.jsonl").read_text().splitlines()
    assert [json.loads(line)["unit"] for line in finished[1:]] == ["outside the layers", "layer 0", "layer 1"]
    torn = (tmp_path / "stopped.jsonl").read_text() + '{"unit": "layer 2", "sha'
    (tmp_path / "stopped.jsonl").write_text(torn)
    bake(recipe, body, out)
    assert set(tensor_bytes(out)) == set(tensor_bytes(tmp_path / "whole"))
    assert (tmp_path / "stopped.jsonl").read_text().splitlines()[:4] == finished
    assert sorted(path.name for path in out.iterdir()) == [checkpoint_file(out), checkpoint.INDEX]


def checkpoint_file(folder: Path) -> str:
    """The only shard of a tiny body."""
    (file,) = {tensor.file for tensor in checkpoint.load_tensors(folder).values()}
    return file


def test_a_damaged_finished_layer_is_done_again(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Bytes that are no longer those that the journal recorded are not trusted."""
    recipe = make_recipe(tmp_path / "recipe")
    body = tiny("dense") / "body"
    bake(recipe, body, tmp_path / "out")
    before = set(tensor_bytes(tmp_path / "out"))
    shard = tmp_path / "out" / checkpoint_file(tmp_path / "out")
    data = bytearray(shard.read_bytes())
    data[-1000] ^= 0xFF
    shard.write_bytes(data)
    assert set(tensor_bytes(tmp_path / "out")) != before
    bake(recipe, body, tmp_path / "out")
    assert set(tensor_bytes(tmp_path / "out")) == before


def test_a_journal_of_another_build_is_refused(tmp_path: Path) -> None:
    """A stage that belongs to another recipe, commit or tool version is refused, not mixed."""
    open_journal(tmp_path / "journal.jsonl", "one build")
    with pytest.raises(QuantizationError, match="another recipe") as caught:
        open_journal(tmp_path / "journal.jsonl", "another build")
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")]
)
def test_unusable_weights_are_named(tiny: Callable[[str], Path], tmp_path: Path, value: float, words: str) -> None:
    """A weight that is not finite, or is all zero, is refused with its module's name; the layer is not written."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "body"
    shutil.copytree(tiny("dense") / "body", folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.2.mlp.down_proj"
    weights[f"{name}.weight"] = torch.full_like(weights[f"{name}.weight"], value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=f"{name}: its weight is {words}"):
        bake(make_recipe(tmp_path / "recipe"), folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "holds 0 usable ones"),
        ('{"text": "no conversation"}\n', "has no `messages` .it has: text"),
        ("7\n", "has no `messages` .it has: int"),
        ("not json\n", "cannot read .*calibration.jsonl"),
        ('{"messages": ["hello"]}\n', "a message is not {role, content}"),
        ('{"messages": [{"role": "user", "content": [{"type": "video"}]}]}\n', "content of type 'video'"),
        ('{"messages": [{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}]}\n', "gone.png"),
    ],
)
def test_unusable_calibration_data_is_named(
    tiny: Callable[[str], Path], tmp_path: Path, lines: str, words: str
) -> None:
    """Calibration data that is empty, of another shape or unreadable ends the build with what and where."""
    recipe = make_recipe(tmp_path / "recipe")
    (recipe.folder / "calibration.jsonl").write_text(lines)
    with pytest.raises(SourceError, match=words):
        bake(recipe, tiny("dense") / "body", tmp_path / "out")


def test_long_samples_are_cut(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Text is cut at max_seq_length; a conversation whose image would be cut is passed over."""
    from bundler.quantize.samples import load_samples
    from bundler.quantize.stream import load_processor

    recipe = make_recipe(tmp_path / "recipe")
    image = [{"type": "image", "image": "images/box.png"}]
    rows = [{"role": "user", "content": content} for n in range(9) for content in (f"{n} " + "word " * 500, image)]
    lines = (json.dumps({"messages": [row]}) + "\n" for row in rows)
    (recipe.folder / "calibration.jsonl").write_text("".join(lines))
    text = RECIPE.replace("= 96", "= 20")
    samples = load_samples(parse(text, recipe.folder), None, load_processor(tiny("dense") / "body"))
    assert [sample["input_ids"].shape for sample in samples.inputs] == [(1, 20)] * 6
    assert samples.num_tokens == 120
    assert all(sample["attention_mask"].shape == (1, 20) for sample in samples.inputs)


def test_held_out_samples_did_not_calibrate(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Held-out samples are the dataset's next rows or a file of their own, never a conversation that calibrated."""
    from bundler.quantize.samples import load_samples
    from bundler.quantize.stream import load_processor

    recipe = make_recipe(tmp_path / "recipe")
    processor = load_processor(tiny("dense") / "body")
    same = RECIPE.replace("[fidelity]", '[fidelity]\ndataset = "./calibration.jsonl"').replace("= 96", "= 512")
    for text in (RECIPE.replace("= 96", "= 512"), same):
        samples = load_samples(parse(text, recipe.folder), None, processor)
        used = [tuple(sample["input_ids"][0].tolist()) for sample in (*samples.inputs, *samples.heldout)]
        assert len(samples.heldout) == 2
        assert len(set(used)) == 8
    with pytest.raises(SourceError, match=r"fidelity.num_samples asks for 37 samples, its data holds 36"):
        load_samples(parse(same.replace("num_samples = 2", "num_samples = 37"), recipe.folder), None, processor)


def test_parquet_and_jsonl_are_the_same_samples(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A .parquet of the same conversations gives the same samples as the .jsonl."""
    import pyarrow
    import torch
    from pyarrow import parquet

    from bundler.quantize.samples import load_samples
    from bundler.quantize.stream import load_processor

    recipe = make_recipe(tmp_path / "recipe")
    lines = (recipe.folder / "calibration.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if isinstance(row["messages"][0]["content"], str)]
    (recipe.folder / "calibration.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), recipe.folder / "calibration.parquet")
    processor = load_processor(tiny("dense") / "body")
    both = [
        load_samples(parse(text, recipe.folder), None, processor)
        for text in (RECIPE, RECIPE.replace(".jsonl", ".parquet"))
    ]
    for ours, theirs in zip(both[0].inputs, both[1].inputs, strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])

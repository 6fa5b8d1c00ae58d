"""The whole path: a recipe becomes a bundle that transformers loads, whole or not at all, the same bytes each time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundler import checkpoint, gemma4, manifest
from bundler.build import Watch, build, resolve
from bundler.errors import CompatibilityError, RecipeError
from bundler.quantize import Progress
from bundler.recipe import Recipe, load, parse
from bundler.verify import verify

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "recipes" / "tiny-31b.toml").read_text()


@pytest.fixture(scope="session")
def built(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind → a finished bundle of that kind, built once per session."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            recipe = make_recipe(tiny(kind), tmp_path_factory.mktemp("recipe"), kind)
            finished = build(recipe, tmp_path_factory.mktemp("dist"))
            assert finished is not None
            made[kind] = finished.folder
        return made[kind]

    return make


def make_recipe(pair: Path, folder: Path, name: str = "bundle") -> Recipe:
    """recipes/tiny-31b.toml for another pair of checkpoints, its calibration data beside it."""
    example = ROOT / "examples" / "tiny-31b"
    for file in ("calibration.jsonl", "heldout.jsonl"):
        shutil.copy(example / file, folder)
    shutil.copytree(example / "images", folder / "images")
    text = TEXT.replace("../examples/tiny-31b/calibration", "./calibration")
    text = text.replace("../examples/tiny-31b/heldout", "./heldout").replace(
        "[fidelity]", "[fidelity]\naccept = 'random'"
    )
    text = text.replace("../examples/tiny-31b", str(pair)).replace('"tiny-31b"', f'"{name}"')
    text = text.replace('version = ">=0.21"', 'version = ">=0.27.1"')
    text = text.replace("num_samples = 42", "num_samples = 6").replace("num_samples = 24", "num_samples = 2")
    return parse(text, folder)


@pytest.mark.parametrize("kind", ["dense", "moe", "per-layer", "unified"])
def test_a_bundle_of_every_kind_verifies(built: Callable[[str], Path], tiny: Callable[[str], Path], kind: str) -> None:
    """Every kind becomes a bundle without findings, planned to the byte, its drafter and side files the source's."""
    folder = built(kind)
    assert verify(folder) == []
    source, made = tiny(kind), manifest.load(folder)
    for path in (source / "drafter").iterdir():
        assert (folder / "assistant" / path.name).read_bytes() == path.read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / "body" / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "body" / "config.json").read_text())
    assert all(name.startswith("re:") for name in quantization["ignore"] if name != "lm_head")
    assert made.quantization.quantized_modules > 0


def test_the_plan_is_right_to_the_byte(bundle: Path) -> None:
    """The sizes that the plan gives are the sizes that the build writes."""
    plan = resolve(load(ROOT / "recipes" / "tiny-31b.toml"))
    sizes = {shard.file: shard.nbytes for shard in plan.layout.shards}
    assert {name: (bundle / name).stat().st_size for name in sizes} == sizes
    assert plan.body_bytes == sum(sizes.values()) + (bundle / checkpoint.INDEX).stat().st_size
    assert plan.drafter_bytes == sum(path.stat().st_size for path in (bundle / "assistant").glob("*.safetensors"))


def test_two_builds_are_byte_identical(bundle: Path, tmp_path: Path) -> None:
    """Equal inputs give equal bytes, bundle.json and the card included."""
    built = build(load(ROOT / "recipes" / "tiny-31b.toml"), tmp_path)
    assert built is not None
    again = built.folder
    files = manifest.list_files(bundle)
    assert manifest.list_files(again) == files
    for path in (*files, Path(manifest.NAME)):
        assert (again / path).read_bytes() == (bundle / path).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [bundle.name]


def load_body(folder: Path) -> Any:
    """The bundle's body in transformers, its weights dequantized to float32; every tensor found and used.

    Activations are not rounded to 4 bit here: rounding would turn the last bit of a float32 sum, which depends on how
    many tokens are computed at once, into another token now and then.
    """
    from compressed_tensors.quantization import disable_quantization
    from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

    model, info = AutoModelForImageTextToText.from_pretrained(
        folder,
        dtype="auto",
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not any(info.values()), info
    return model.float().eval().apply(disable_quantization)


@pytest.mark.filterwarnings("ignore")  # transformers' and compressed-tensors' own
@pytest.mark.parametrize("kind", ["dense", "per-layer", "unified"])
def test_transformers_loads_and_drafts(built: Callable[[str], Path], kind: str) -> None:
    """The body loads with nothing missing or unexpected; greedy text is the same with and without the drafter."""
    import torch
    from transformers import AutoModelForCausalLM, AutoProcessor

    folder = built(kind)
    model = load_body(folder)
    drafter, info = AutoModelForCausalLM.from_pretrained(
        folder / "assistant", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    messages = [[{"role": "user", "content": [{"type": "text", "text": "Sort 9, 4, 17 and 2."}]}]]
    inputs = AutoProcessor.from_pretrained(folder).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    greedy = {**inputs, "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    alone = model.generate(**greedy, output_logits=True)
    drafted = model.generate(**greedy, assistant_model=drafter.eval())
    margins = [float(first - second) for first, second in (step.topk(2).values[0] for step in alone.logits)]
    assert min(margins) > 1e-4, "a tie within float32's own error says nothing; choose another prompt"
    assert alone.sequences.shape[1] > inputs["input_ids"].shape[1]
    assert alone.sequences.tolist() == drafted.sequences.tolist()


def test_the_packed_experts_are_the_sources(built: Callable[[str], Path], tiny: Callable[[str], Path]) -> None:
    """Every quantized weight of a MoE body, dequantized by the format's own definition, is close to its source."""
    import torch
    from safetensors.torch import load_file

    weights = load_file(built("moe") / "model-00001-of-00001.safetensors")
    source = load_file(tiny("moe") / "body" / "model.safetensors")
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    modules = [name.removesuffix(".weight_packed") for name in weights if name.endswith(".weight_packed")]
    assert sum(".experts." in name for name in modules) == 6 * 8 * 3
    for name in modules:
        packed = weights[f"{name}.weight_packed"]
        unpacked = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()]
        scale = weights[f"{name}.weight_scale"].float() / weights[f"{name}.weight_global_scale"]
        ours = unpacked * scale.repeat_interleave(gemma4.GROUP_SIZE, dim=1)
        if ".experts." in name:
            parent, expert, projection = name.rsplit(".", 2)
            fused = source[f"{parent}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"][int(expert)]
            half = fused.shape[0] // 2
            theirs = {"gate_proj": fused[:half], "up_proj": fused[half:], "down_proj": fused}[projection].float()
        else:
            theirs = source[f"{name}.weight"].float()
        assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.99, name


def test_a_failed_build_leaves_no_bundle(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A build that dies leaves no dist/<name>; the same command carries on from the stage and ends in a bundle."""
    (tmp_path / "recipe").mkdir()
    recipe = make_recipe(tiny("dense"), tmp_path / "recipe")

    def die(progress: Progress) -> None:
        if progress.layers == 3:
            raise MemoryError

    with pytest.raises(MemoryError):
        build(recipe, tmp_path / "dist", watch=Watch(bake=die))
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [".bundle.stage"]
    seen: list[Progress] = []
    built = build(recipe, tmp_path / "dist", watch=Watch(bake=seen.append))
    assert seen[-1].layers == seen[-1].num_layers == 6
    assert built is not None
    assert verify(built.folder) == []
    assert [path.name for path in (tmp_path / "dist").iterdir()] == ["bundle"]


def test_an_existing_bundle_is_not_touched(bundle: Path, tmp_path: Path) -> None:
    """A bundle that is there is kept unless --replace is given, and then until the new one is whole."""
    recipe = load(ROOT / "recipes" / "tiny-31b.toml")
    old = tmp_path / recipe.name
    old.mkdir()
    (old / "mine.txt").write_text("mine")
    with pytest.raises(RecipeError, match="exists"):
        build(recipe, tmp_path)
    assert (old / "mine.txt").exists()
    build(recipe, tmp_path, replace=True)
    assert manifest.list_files(old) == manifest.list_files(bundle)
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


def test_a_pair_that_does_not_fit_is_refused_before_the_work(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Body and drafter of two kinds are refused by the plan; nothing is written."""
    (tmp_path / "recipe").mkdir()
    recipe = make_recipe(tiny("dense"), tmp_path / "recipe")
    text = recipe.text.replace(str(tiny("dense") / "drafter"), str(tiny("unified") / "drafter"))
    with pytest.raises(CompatibilityError) as caught:
        build(parse(text, recipe.folder), tmp_path / "dist")
    assert "drafter-model-type" in {finding.code for finding in caught.value.findings}
    assert not (tmp_path / "dist").exists()

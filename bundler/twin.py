"""A twin: a small bundle with the structure of a large one, and weights whose right answer is known.

The bundle's own JSON is shrunk: numbers are scaled; keys, head ratios, layer pattern, ignore list and tensor names
stay. It is never saved again by transformers, which would write another schema and so hide real faults. The weights
make the body repeat the last token and the drafter foresee that; they are baked by the same code as the bundle was.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler.checkpoint import load_json
from bundler.errors import CompatibilityError
from bundler.findings import Finding, error
from bundler.gemma4 import find_kind, layer_of, make_ignore, to_published_schema
from bundler.inventory import body_shapes, drafter_shapes
from bundler.known_answer import make_body_weights, make_drafter_weights, make_embedding
from bundler.weights import check_shards

if TYPE_CHECKING:
    pass

HIDDEN_SIZE = 256
DRAFTER_HIDDEN_SIZE = 128
"""Wide enough that none of 262,144 random directions is mistaken for another."""
EXPERTS = 8
_TOWER_LAYERS = 2
_SEED = 7
_CONVERSATIONS = (
    ("What is the capital of Japan?", "Tokyo."),
    ("日本の首都はどこですか。", "東京です。"),
    ("Write a line about rain in autumn.", "Grey water taps the yellow leaves."),
    ("Sort 9, 4 and 17.", "4, 9, 17."),
    ("def main():", "    return 0"),
    ("秋の雨について一行書いてください。", "黄色い葉を雨がたたく。"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How a bundle's numbers become its twin's."""

    width: float
    """Of hidden sizes and of everything that grows with them."""
    heads: int
    """Every head count is divided by this."""
    head_dim: int
    layers: tuple[int, ...]
    """The bundle's decoder layers that the twin keeps, in order."""
    shared: int
    """How many of those share another layer's K and V."""


def make_twin(bundle: Path, out: Path) -> Path:
    """Make the twin of a bundle in the folder `out` and bake it; the folder of the finished twin.

    CompatibilityError where the structure cannot be shrunk or the twin's tensors are not the bundle's by name.
    """
    from bundler.recipe import load_bundled

    config, drafter = load_json(bundle / "config.json"), load_json(bundle / "assistant" / "config.json")
    small, small_drafter = shrink(config, drafter)
    version = load_bundled(bundle).serve.version
    made = bake(small, small_drafter, (bundle, bundle / "assistant"), out, version=version)
    if found := check_twin(bundle, made, make_scale(config, drafter)):
        raise CompatibilityError("the twin is not built like its bundle", findings=found)
    return made


def bake(
    config: Mapping[str, Any],
    drafter: Mapping[str, Any],
    side_files: tuple[Path, Path],
    out: Path,
    *,
    version: str,
) -> Path:
    """Bake a body and a drafter of these two config.json, with the known answer as weights.

    `side_files` are the folders whose tokenizer, processor and templates are taken. The two config.json of the
    finished bundle are these, word for word: what is odd in them stays so.
    """
    from bundler.build import build
    from bundler.recipe import parse

    source = {key: value for key, value in to_published_schema(config)[0].items() if key != "quantization_config"}
    out.mkdir(parents=True, exist_ok=True)
    _write_checkpoints(side_files, out, source, to_published_schema(drafter)[0])
    asked = dict(config).get("quantization_config", {}).get("ignore", ())
    extra = [pattern for pattern in asked if pattern not in make_ignore(find_kind(config))]
    built = build(parse(_recipe_text(extra, version), out), out)
    assert built is not None  # None is for the other ranks of a torchrun
    if "quantization_config" in config:
        _write_json(built.folder / "config.json", config)
    _write_json(built.folder / "assistant" / "config.json", drafter)
    return built.folder


# ---- shrinking JSON -------------------------------------------------------------------------------------------------


def shrink(config: Mapping[str, Any], drafter: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A body's and a drafter's config.json, smaller: every key is there, only numbers and the layer list differ."""
    scale = make_scale(config, drafter)
    small, small_drafter = copy.deepcopy(dict(config)), copy.deepcopy(dict(drafter))
    _shrink_text(small["text_config"], scale, _width(config["text_config"]["hidden_size"], scale.width))
    text = small["text_config"]
    text["layer_types"] = [config["text_config"]["layer_types"][index] for index in scale.layers]
    text["num_hidden_layers"] = len(scale.layers)
    if text.get("num_kv_shared_layers"):
        text["num_kv_shared_layers"] = scale.shared
    _shrink_per_layer(small, scale)
    if isinstance(small.get("vision_config"), dict):
        _shrink_vision(small["vision_config"], text["hidden_size"], scale)
    if isinstance(small.get("audio_config"), dict):
        _shrink_audio(small["audio_config"])
    own = drafter["text_config"]["hidden_size"]
    hidden = min(own, max(DRAFTER_HIDDEN_SIZE, _width(own, scale.width)))
    _shrink_text(small_drafter["text_config"], scale, hidden)
    _shrink_per_layer(small_drafter, scale)
    small_drafter["backbone_hidden_size"] = text["hidden_size"]
    return small, small_drafter


def make_scale(config: Mapping[str, Any], drafter: Mapping[str, Any]) -> Scale:
    """The factors for a body and its drafter together, so that what they share stays equal."""
    text, own = config["text_config"], drafter["text_config"]
    counts = [
        count
        for section in (text, own)
        for key in ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
        if (count := section.get(key))
    ]
    layers, shared = _choose_layers(text["layer_types"], text.get("num_kv_shared_layers") or 0)
    return Scale(
        width=min(1.0, HIDDEN_SIZE / text["hidden_size"]),
        heads=math.gcd(*counts),
        head_dim=4 if text["head_dim"] >= 128 else 1,
        layers=layers,
        shared=shared,
    )


def _choose_layers(types: Sequence[str], shared: int) -> tuple[tuple[int, ...], int]:
    """One round of the layer pattern of those with a KV cache, and one of those without."""
    period = next((step for step in range(1, len(types)) if types[step:] == types[:-step]), len(types))
    own = len(types) - shared
    first = min(own, period if "full_attention" in types[:period] else own)
    last = min(shared, period)
    return tuple(range(first)) + tuple(range(len(types) - last, len(types))), last


def _width(size: int, factor: float, step: int = 16) -> int:
    return size if factor == 1 else max(step, round(size * factor / step) * step)


def _shrink_text(text: dict[str, Any], scale: Scale, hidden_size: int) -> None:
    factor = hidden_size / text["hidden_size"]
    text["hidden_size"] = hidden_size
    for key, step in (("intermediate_size", 64), ("moe_intermediate_size", 64), ("hidden_size_per_layer_input", 16)):
        if text.get(key):
            text[key] = _width(text[key], factor, step)
    for key in ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"):
        if text.get(key):
            text[key] //= scale.heads
    for key in ("head_dim", "global_head_dim"):
        if text.get(key):
            text[key] //= scale.head_dim
    if (text.get("sliding_window") or 0) > 128:
        text["sliding_window"] = 128
    if (text.get("num_experts") or 0) > EXPERTS:
        text["top_k_experts"] = max(1, text["top_k_experts"] * EXPERTS // text["num_experts"], 2)
        text["num_experts"] = EXPERTS


def _shrink_per_layer(config: dict[str, Any], scale: Scale) -> None:
    """The newer schema's own words for full-attention layers, where a bundle (wrongly) has them."""
    for section in (config, config["text_config"]):
        if not isinstance(section.get("per_layer_config"), dict):
            continue
        kept = {}
        for new, old in enumerate(scale.layers):
            if (entry := section["per_layer_config"].get(str(old))) is not None:
                kept[str(new)] = {
                    key: value // {"head_dim": scale.head_dim, "num_key_value_heads": scale.heads}.get(key, 1)
                    if isinstance(value, int)
                    else value
                    for key, value in entry.items()
                }
        section["per_layer_config"] = kept


def _shrink_vision(vision: dict[str, Any], hidden_size: int, scale: Scale) -> None:
    for key in ("mm_embed_dim", "output_proj_dims"):  # the encoder-free 12B
        if key in vision:
            vision[key] = hidden_size if scale.width < 1 else vision[key]
    if "num_attention_heads" not in vision:
        return
    heads = min(2, vision["num_attention_heads"])
    size = heads * vision["head_dim"]
    vision["intermediate_size"] = _width(vision["intermediate_size"], min(1.0, size / vision["hidden_size"]))
    vision["num_key_value_heads"] = max(1, vision["num_key_value_heads"] * heads // vision["num_attention_heads"])
    vision |= {"hidden_size": size, "num_attention_heads": heads}
    vision["num_hidden_layers"] = min(_TOWER_LAYERS, vision["num_hidden_layers"])


def _shrink_audio(audio: dict[str, Any]) -> None:
    if "num_attention_heads" not in audio or audio["num_hidden_layers"] <= _TOWER_LAYERS:
        return
    heads = min(2, audio["num_attention_heads"])
    size = audio["hidden_size"] // audio["num_attention_heads"] * heads
    audio["output_proj_dims"] = _width(audio["output_proj_dims"], size / audio["hidden_size"])
    audio |= {"hidden_size": size, "num_attention_heads": heads, "num_hidden_layers": _TOWER_LAYERS}


# ---- writing -------------------------------------------------------------------------------------------------------


def _write_checkpoints(
    side_files: tuple[Path, Path], out: Path, config: Mapping[str, Any], drafter: Mapping[str, Any]
) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(_SEED)
    vocabulary, ordering, centroids = make_embedding(config, drafter, generator)
    body = make_body_weights(body_shapes(config), vocabulary, generator)
    assistant = make_drafter_weights(drafter_shapes(drafter), vocabulary, ordering, centroids, generator)
    card = "---\nlicense: apache-2.0\n---\nA twin of a bundle's structure: its weights say nothing.\n"
    for name, document, tensors, side in (
        ("body", config, body, side_files[0]),
        ("drafter", drafter, assistant, side_files[1]),
    ):
        folder = out / name
        folder.mkdir(exist_ok=True)
        for path in side.iterdir():
            if path.suffix in (".json", ".jinja", ".model") and path.name not in _WRITTEN:
                shutil.copyfile(path, folder / path.name)
        _write_json(folder / "config.json", document)
        (folder / "README.md").write_text(card, encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    lines = [
        json.dumps({"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]})
        for ask, answer in _CONVERSATIONS
    ]
    (out / "calibration.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_WRITTEN = ("config.json", "bundle.json", "model.safetensors.index.json")


# ---- the same structure? --------------------------------------------------------------------------------------------


def check_twin(bundle: Path, made: Path, scale: Scale) -> list[Finding]:
    """Whether the twin has, for every layer that it keeps, the tensors of the bundle's by name and dtype."""
    findings = []
    for folder, at in ((Path(), ""), (Path("assistant"), "assistant/")):
        layers = scale.layers if not at else ()
        wanted = _names(bundle / folder, layers, old=True)
        found = _names(made / folder, layers, old=False)
        for name in sorted(wanted.items() ^ found.items()):
            message = "is only in the bundle" if name in wanted.items() else "is only in the twin"
            findings.append(error("twin-differs", f"{at}{name[0]}", f"{message} ({name[1]})"))
    return findings[:20]


def _names(folder: Path, layers: Iterable[int], *, old: bool) -> dict[str, str]:
    """Tensor → dtype, in the twin's own numbering, without the tower layers and experts that a twin leaves out."""
    new_index = {index: new for new, index in enumerate(layers)} if old else {}
    names = {}
    for name, tensor in check_shards(folder, index_required=False)[0].tensors.items():
        index = layer_of(name)
        if index is not None and old:
            if index not in new_index:
                continue
            name = name.replace(f".layers.{index}.", f".layers.{new_index[index]}.", 1)
        parts = name.split(".")
        number = {"experts": EXPERTS, "layers": _TOWER_LAYERS}
        tower = "tower" in name
        if any(
            part in number and (part == "experts" or tower) and later.isdigit() and int(later) >= number[part]
            for part, later in pairwise(parts)
        ):
            continue
        names[name] = tensor.shape.dtype
    return names


def _recipe_text(ignore: Iterable[str], version: str) -> str:
    return f"""edition = 1
name = "twin"
[body]
model = "./body"
[quantization]
ignore = {json.dumps(list(ignore))}
compute = "exact"
[calibration]
dataset = "./calibration.jsonl"
num_samples = 4
max_seq_length = 64
[fidelity]
num_samples = 2
accept = "a twin's weights mean nothing"
[drafter]
model = "./drafter"
[serve]
version = {json.dumps(version)}
"""

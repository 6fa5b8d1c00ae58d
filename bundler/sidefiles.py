"""What stands beside the weights: config.json, generation config, tokenizer, processor; checks on parsed JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from bundler.errors import CompatibilityError
from bundler.findings import Finding, error, note, warning
from bundler.gemma4 import find_kind, is_ignored, linear_shapes, make_ignore
from bundler.inventory import body_shapes, check_geometry

FORMAT = "nvfp4-pack-quantized"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_ARCHITECTURES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}
_QUANTIZATION: Mapping[str, object] = {
    "quant_method": "compressed-tensors",
    "format": FORMAT,
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
}
_SOFT_TOKENS = {"gemma4": "default_output_length", "gemma4_unified": "num_soft_tokens"}
_NO_TOKENS = "vLLM #45039, #45070"
_NUMBERS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_SCHEME = {"weights": {**_NUMBERS, "dynamic": False}, "input_activations": {**_NUMBERS, "dynamic": "local"}}
_END_OF_TURN = "<turn|>"
_RESAVED = "copy the source's own file: transformers rewrites tokenizers when it saves them"


def check_config(config: Mapping[str, Any]) -> list[Finding]:
    """Whether config.json is a Gemma 4 body's in the schema that Google publishes and every engine reads."""
    try:
        find_kind(config)
    except CompatibilityError as exc:
        return [error("config-kind", "config.json: model_type", str(exc), exc.hint)]
    findings = check_geometry(config, "config.json")
    architecture = _ARCHITECTURES[config["model_type"]]
    if config.get("architectures") != [architecture]:
        message = f"is {config.get('architectures')!r}, must be [{architecture!r}]"
        findings.append(error("config-architectures", "config.json: architectures", message))
    for path in _find_key(config, "per_layer_config"):
        message = "is transformers' new schema: vLLM 0.20 to 0.28 refuse the file, even with the old keys beside it"
        findings.append(error("config-schema", f"config.json: {path}", message, source="vLLM #51744, #52768"))
    return findings + _check_vision(config)


def _find_key(value: object, key: str, at: str = "") -> list[str]:
    if not isinstance(value, Mapping):
        return []
    here = [f"{at}{key}"] if key in value else []
    return here + [path for name, item in value.items() for path in _find_key(item, key, f"{at}{name}.")]


def _check_vision(config: Mapping[str, Any]) -> list[Finding]:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return []
    findings = []
    rope = vision.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("rope_type") == "axial":
        message = 'is "axial", which transformers <= 5.16.1 refuses; Google publishes "default" for the same thing'
        findings.append(warning("config-axial", "config.json: vision_config.rope_parameters.rope_type", message))
    return findings


def check_quantization(config: Mapping[str, Any]) -> list[Finding]:
    """Whether quantization_config says what NVFP4 W4A4 is, and its ignore list names what engines must leave alone.

    `config` must pass `check_config`.
    """
    at, section = "config.json: quantization_config", config.get("quantization_config")
    if not isinstance(section, Mapping):
        return [error("quantization-config", at, "is missing: engines would read packed weights as plain ones")]
    groups = section.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    group = group if isinstance(group, Mapping) else {}
    pairs = [(key, section.get(key), value) for key, value in _QUANTIZATION.items()]
    pairs += [("config_groups.*.targets", group.get("targets"), ["Linear"])]
    pairs += [("config_groups.*.format", group.get("format") or FORMAT, FORMAT)]
    pairs += [("config_groups.*.output_activations", group.get("output_activations"), None)]
    pairs += [(key, section.get(key) or {}, {}) for key in ("sparsity_config", "transform_config")]
    for name, numbers in _SCHEME.items():
        have = group.get(name)
        have = have if isinstance(have, Mapping) else {}
        pairs += [(f"config_groups.*.{name}.{key}", have.get(key), value) for key, value in numbers.items()]
    wrong = [(key, have, want) for key, have, want in pairs if have != want]
    if not group:
        wrong = [("config_groups", groups, "one group")]
    findings = [
        error("quantization-config", f"{at}.{key}", f"is {have!r:.60}, NVFP4 W4A4 has {want!r}")
        for key, have, want in wrong
    ]
    return findings + _check_ignore(config, section.get("ignore"))


def usable_ignore(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns of quantization_config.ignore that can be matched at all."""
    section = config.get("quantization_config")
    ignore = section.get("ignore") if isinstance(section, Mapping) else None
    return tuple(p for p in ignore if _pattern_fault(p) is None) if isinstance(ignore, list) else ()


def _pattern_fault(pattern: object) -> str | None:
    if not isinstance(pattern, str):
        return "is no string"
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as exc:
            return f"is no regular expression: {exc}"
    elif re.search(r"[*+?^$|()\[\]\\]", pattern):
        return "looks like a regular expression but lacks `re:`, so it matches nothing"
    return None


def _check_ignore(config: Mapping[str, Any], ignore: object) -> list[Finding]:
    at = "config.json: quantization_config.ignore"
    if not isinstance(ignore, list):
        return [error("quantization-config", at, f"is {ignore!r:.60}, must be a list")]
    findings = [
        error("ignore-pattern", f"{at}[{index}]", f"{pattern!r} {fault}", "write `re:` before a regular expression")
        for index, pattern in enumerate(ignore)
        if (fault := _pattern_fault(pattern)) is not None
    ]
    usable, shapes = usable_ignore(config), body_shapes(config)
    # the head and the towers are modules of the class in every kind, whether this checkpoint stores them or not
    fixed = make_ignore(find_kind(config))
    modules = {"lm_head", *linear_shapes(shapes)}
    modules |= {name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight")}
    for pattern in usable:
        if pattern not in fixed and not any(is_ignored(module, (pattern,)) for module in modules):
            message = f"{pattern!r} matches no module of this body"
            findings.append(warning("dead-ignore", at, message, "check its spelling against the tensors' names"))
    decoder = linear_shapes(shapes)
    for module in sorted(modules - decoder.keys()):
        if _is_linear(module, shapes) and not is_ignored(module, usable):
            message = f"does not name {module}: an engine would look for its scales"
            findings.append(error("ignore-incomplete", at, message, source="vLLM #19643, #44571"))
    return findings


def _is_linear(module: str, shapes: Mapping[str, Any]) -> bool:
    if module == "lm_head":
        return True
    table = module.endswith((".embed_tokens", ".embed_tokens_per_layer"))
    return not table and len(shapes[f"{module}.weight"].dims) == 2


def check_generation(
    generation: Mapping[str, Any], config: Mapping[str, Any], vocabulary: Mapping[str, int]
) -> list[Finding]:
    """Whether generation_config.json stops where config.json says and at the end of a turn."""
    stops, text = generation.get("eos_token_id"), config.get("text_config")
    declared = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, Mapping) else None)
    needed = _ids(declared) | _ids(vocabulary.get(_END_OF_TURN))
    lacking = needed - _ids(stops)
    if isinstance(stops, list) and not lacking:
        return []
    fault = f"without {sorted(lacking)}" if lacking else "not a list"
    message = f"is {stops!r}, {fault}: the model would not stop at the end of its turn"
    hint = "copy the source's own file; Google's -it models have [1, 106, 50]"
    return [error("stop-tokens", "generation_config.json: eos_token_id", message, hint, "vLLM #45591")]


def _ids(value: object) -> set[int]:
    return {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}


def check_tokenizer(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], vocabulary: Mapping[str, int], config: Mapping[str, Any]
) -> list[Finding]:
    """Whether the tokenizer's ids fit the embeddings, and whether its files are the source's or a re-saved form."""
    findings = []
    text = config.get("text_config")
    vocab_size = text.get("vocab_size") if isinstance(text, Mapping) else None
    if isinstance(vocab_size, int) and vocabulary and max(vocabulary.values()) >= vocab_size:
        message = f"has ids up to {max(vocabulary.values())}, config.json's vocab_size is {vocab_size}"
        findings.append(error("tokenizer-vocab", "tokenizer.json", message))
    marks = []
    if settings.get("tokenizer_class") == "TokenizersBackend":
        marks.append(("tokenizer_config.json: tokenizer_class", "is TokenizersBackend"))
    if isinstance(settings.get("extra_special_tokens"), list):
        marks.append(("tokenizer_config.json: extra_special_tokens", "is a list, which transformers 4 cannot read"))
    if tokenizer.get("padding") is not None:
        marks.append(("tokenizer.json: padding", "is set"))
    return findings + [warning("tokenizer-resaved", where, message, _RESAVED) for where, message in marks]


def check_processor(processor: Mapping[str, Any], config: Mapping[str, Any]) -> list[Finding]:
    """Whether config.json promises the engine as many tokens of an image as the processor cuts it into."""
    vision, key = config.get("vision_config"), _SOFT_TOKENS.get(str(config.get("model_type")))
    if not isinstance(vision, Mapping) or key is None:
        return []
    where, hint = f"config.json: vision_config.{key}", "take the number from the processor's max_soft_tokens"
    if key not in vision:
        message = "is missing: vLLM asks for the number of an image's tokens, and does not start"
        return [error("vision-tokens-missing", where, message, hint, _NO_TOKENS)]
    have, want = _max_soft_tokens(processor), vision[key]
    if have is None or have == want:
        return []
    message = f"is {want}, the processor's max_soft_tokens is {have}: vLLM stops at the first image"
    return [error("vision-tokens-differ", where, message, hint)]


def complete_vision(config: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the number of an image's tokens where only the processor says it, as in Google's 12B QAT."""
    vision, key = config.get("vision_config"), _SOFT_TOKENS.get(str(config.get("model_type")))
    tokens = _max_soft_tokens(processor)
    if not isinstance(vision, Mapping) or key is None or key in vision or tokens is None:
        return dict(config)
    return {**config, "vision_config": {**vision, key: tokens}}


def check_completed(config: Mapping[str, Any], completed: Mapping[str, Any]) -> list[Finding]:
    """Whether a source needed `complete_vision`."""
    if config == completed:
        return []
    message = "does not say how many tokens an image takes, and vLLM would not start: the processor's number is added"
    return [note("vision-tokens-completed", "config.json: vision_config", message, source=_NO_TOKENS)]


def _max_soft_tokens(processor: Mapping[str, Any]) -> int | None:
    image = processor.get("image_processor", processor)
    tokens = image.get("max_soft_tokens") if isinstance(image, Mapping) else None
    return tokens if isinstance(tokens, int) else None


def check_presence(present: Iterable[str]) -> list[Finding]:
    """Whether the files that a bundle cannot do without are among `present`."""
    names = set(present)
    needed = {
        "config.json": "no engine knows what the weights are",
        "generation_config.json": "without its stop tokens the model may never stop",
        "tokenizer.json": "no engine can read text",
        "tokenizer_config.json": "no engine can read text",
        "assistant/config.json": "there is no drafter",
        "README.md": "there is no card",
        "LICENSE": "nobody knows what they may do with it",
        "recipe.toml": "nobody can build it again",
    }
    if names.isdisjoint(PROCESSORS):
        needed["processor_config.json"] = "no engine starts a multimodal body without it"
    return [
        error("side-file-missing", name, f"is missing: {why}", "copy it from the source, or build the bundle again")
        for name, why in needed.items()
        if name not in names
    ]


def check_chat_template(present: Iterable[str], settings: Mapping[str, Any]) -> list[Finding]:
    """Whether the bundle says how a conversation becomes a prompt."""
    if {"chat_template.jinja", "chat_template.json"} & set(present) or "chat_template" in settings:
        return []
    message = "is missing: a chat engine has to be given one"
    return [warning("chat-template-missing", "chat_template.jinja", message, "copy it from the source")]

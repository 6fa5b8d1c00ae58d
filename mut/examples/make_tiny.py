"""Make small random Gemma 4 checkpoints of every kind, each with its drafter: real architecture, real tokenizer, real processor.

    python examples/make_tiny.py dense examples/tiny-31b

writes OUT/body and OUT/drafter in the schema that Google publishes. The weights are random (seeded), so the texts they
write are noise; everything else (tensor names, attention pattern, vision tower, chat template, stop tokens) is as in
the real family.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KINDS = ("dense", "moe", "per-layer", "unified")
IMAGE_TOKENS = 70

_SPECIAL = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"),
    *("<|tool>", "<tool|>", "<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
]
_CORPUS = [
    "The kettle is on the stove and the water is warm. The cat sleeps under the window.",
    "A steam engine turns heat into motion: water boils, pressure rises, a piston moves.",
    "Write three short lines about rain in autumn. Sort the numbers 9, 4, 17 and 2.",
    "What is the capital of Japan? The capital of Japan is Tokyo. What is the weather like today?",
    "Quantization maps real numbers to a small set of levels, so that a model fits in less memory.",
    "やかんは火の上にあります。水はあたたかいです。猫は窓の下で寝ています。",
    "日本の首都は東京です。今日の天気は晴れです。明日は雨が降るでしょう。",
    "秋の雨について短い詩を書いてください。数字を小さい順に並べてください。",
]
_CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.content is string %}{{ message.content | trim }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{ part.text | trim }}
{%- elif part.type == 'image' %}{{ '<|image|>' }}
{%- elif part.type == 'audio' %}{{ '<|audio|>' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}
"""
_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: {pipeline_tag}
---
# {title}

{text} Random weights, made by examples/make_tiny.py of bundler: for trying tools, not for talking to.
"""


def make_tokenizer(vocab_size: int) -> Any:
    """A byte-fallback BPE tokenizer of Gemma's build, trained on a few English and Japanese sentences."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = _SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    bpe.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    )
    model = json.loads(bpe.to_str())["model"]
    tokenizer = GemmaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        extra_special_tokens={
            **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
            **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
            **{"sot_token": "<|turn>", "eot_token": "<turn|>", "video_token": "<|video|>"},
        },
    )
    tokenizer.padding_side = "left"
    return tokenizer


def make_body(kind: str, tokenizer: Any, *, layers: int = 6, hidden_size: int = 128) -> tuple[Any, Any]:
    """A random body of a kind in bf16 and its processor. `hidden_size` and the mlp are multiples of 16 (NVFP4)."""
    import transformers as tf

    ids = {
        key: tokenizer.convert_tokens_to_ids(token)
        for key, token in {
            **{"boi_token_id": "<|image>", "eoi_token_id": "<image|>", "image_token_id": "<|image|>"},
            **{"boa_token_id": "<|audio>", "eoa_token_index": "<audio|>", "audio_token_id": "<|audio|>"},
            "video_token_id": "<|video|>",
        }.items()
    }
    text = {
        **_text_config(tokenizer, layers=layers, global_kv_heads=1, k_eq_v=True),
        **{"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "final_logit_softcapping": 30.0},
    }
    if kind == "unified":
        del text["vocab_size_per_layer_input"]
        config = tf.Gemma4UnifiedConfig(
            text_config=tf.Gemma4UnifiedTextConfig(**text),
            vision_config=tf.Gemma4UnifiedVisionConfig(
                mm_embed_dim=hidden_size, output_proj_dims=hidden_size, mm_posemb_size=64
            ),
            audio_config=tf.Gemma4UnifiedAudioConfig(),
            **ids,
        )
        model = tf.Gemma4UnifiedForConditionalGeneration(config)
        processor = tf.Gemma4UnifiedProcessor(
            feature_extractor=tf.Gemma4UnifiedAudioFeatureExtractor(),
            image_processor=tf.Gemma4UnifiedImageProcessor(max_soft_tokens=IMAGE_TOKENS),
            video_processor=tf.Gemma4UnifiedVideoProcessor(),
            tokenizer=tokenizer,
            chat_template=_CHAT_TEMPLATE,
        )
        return model, processor

    if kind == "per-layer":
        text |= {"num_hidden_layers": 2 * layers, "layer_types": text["layer_types"] * 2, "attention_k_eq_v": False}
        text |= {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}
        text |= {"num_global_key_value_heads": None}
    else:
        text |= {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    if kind == "moe":
        text |= {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    audio = tf.Gemma4AudioConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, output_proj_dims=96, subsampling_conv_channels=[32, 16]
    )
    config = tf.Gemma4Config(
        text_config=tf.Gemma4TextConfig(**text),
        vision_config=tf.Gemma4VisionConfig(
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 64},
            **{"standardize": kind != "per-layer", "use_clipped_linears": kind == "per-layer"},
        ),
        audio_config=audio if kind == "per-layer" else None,
        **ids,
    )
    model = tf.Gemma4ForConditionalGeneration(config)
    processor = tf.Gemma4Processor(
        feature_extractor=tf.Gemma4AudioFeatureExtractor(),
        image_processor=tf.Gemma4ImageProcessor(max_soft_tokens=IMAGE_TOKENS),
        video_processor=tf.Gemma4VideoProcessor(max_soft_tokens=IMAGE_TOKENS),
        image_seq_length=IMAGE_TOKENS,
        tokenizer=tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )
    return model, processor


def make_drafter(kind: str, tokenizer: Any, *, backbone_hidden_size: int = 128) -> Any:
    """A random drafter that fits a body of the kind: it reads the KV of the body's last layers of each type."""
    import torch
    import transformers as tf

    per_layer, unified = kind == "per-layer", kind == "unified"
    text = {
        **_text_config(tokenizer, layers=4, global_kv_heads=None if per_layer else 1, k_eq_v=not per_layer),
        **{"hidden_size": 64, "intermediate_size": 128, "num_kv_shared_layers": 4, "final_logit_softcapping": None},
    }
    if unified:
        del text["vocab_size_per_layer_input"]
    else:
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text_class = tf.Gemma4UnifiedTextConfig if unified else tf.Gemma4TextConfig
    config_class = tf.Gemma4UnifiedAssistantConfig if unified else tf.Gemma4AssistantConfig
    model_class = tf.Gemma4UnifiedAssistantForCausalLM if unified else tf.Gemma4AssistantForCausalLM
    model = model_class(
        config_class(
            text_config=text_class(**text),
            backbone_hidden_size=backbone_hidden_size,
            use_ordered_embeddings=per_layer,
            num_centroids=32,
            centroid_intermediate_top_k=4,
        )
    )
    if per_layer:
        order = torch.randperm(text["vocab_size"], generator=torch.Generator().manual_seed(3))
        model.masked_embedding.token_ordering.copy_(order)
    return model


def _text_config(tokenizer: Any, *, layers: int, global_kv_heads: int | None, k_eq_v: bool) -> dict[str, Any]:
    vocab_size = -(-len(tokenizer) // 64) * 64
    return {
        **{"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size, "max_position_embeddings": 4096},
        **{"num_hidden_layers": layers, "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"]},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": global_kv_heads},
        **{"head_dim": 32, "global_head_dim": 64, "sliding_window": 32, "attention_k_eq_v": k_eq_v},
        **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "initializer_range": 0.05},
    }


def randomize(model: Any, seed: int) -> None:
    """Fill a model with seeded random weights of a size that keeps activations in bf16's range."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = 0.025 if "embed_tokens" in name else 0.05
            parameter.data.normal_(0, scale, generator=generator)
        elif "norm" in name:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 0.5 + 0.75)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.9)
        elif name.endswith("std_scale"):
            buffer.fill_(0.5)


def write_checkpoint(folder: Path, model: Any, parts: Any, *, stop_token_id: int, card: str) -> None:
    """Save a model with its processor or tokenizer, its config in the schema that Google publishes."""
    import torch
    import transformers as tf

    model.to(torch.bfloat16).eval()
    model.generation_config = tf.GenerationConfig(
        bos_token_id=2, pad_token_id=0, eos_token_id=[1, stop_token_id], do_sample=True, top_k=64, top_p=0.95
    )
    model.save_pretrained(folder)
    parts.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_published_schema(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").write_text(card)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("extra_special_tokens", None)  # a list here is the mark of a re-saved tokenizer; each has its own key
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def write_published_schema(config: dict[str, Any]) -> None:
    """Undo in place what transformers 5.17 changes when it saves a config, so that it reads as Google's files do."""
    text, vision = config["text_config"], config.get("vision_config") or {}
    per_layer = text.pop("per_layer_config", None)
    if per_layer:
        full = next(iter(per_layer.values()))
        text["global_head_dim"] = full["head_dim"]
        text["num_global_key_value_heads"] = full.get("num_key_value_heads")
    text["dtype"] = "bfloat16"
    if vision.get("model_type") == "gemma4_vision":
        vision["rope_parameters"] = {"rope_theta": 100.0, "rope_type": "default"}
        vision["default_output_length"] = IMAGE_TOKENS
        config["vision_soft_tokens_per_image"] = IMAGE_TOKENS
    elif vision:
        vision["num_soft_tokens"] = IMAGE_TOKENS


def write_pair(kind: str, out: Path, *, vocab_size: int = 768, layers: int = 6) -> None:
    """Write OUT/body and OUT/drafter of a kind."""
    tokenizer = make_tokenizer(vocab_size)
    stop = tokenizer.convert_tokens_to_ids("<turn|>")
    body, processor = make_body(kind, tokenizer, layers=layers)
    drafter = make_drafter(kind, tokenizer)
    seed = KINDS.index(kind) + 1
    randomize(body, seed)
    randomize(drafter, seed + 10)
    title = f"tiny Gemma 4 ({kind})"
    card = _CARD.format(title=title, text="A body of the Gemma 4 architecture.", pipeline_tag="image-text-to-text")
    write_checkpoint(out / "body", body, processor, stop_token_id=stop, card=card)
    card = _CARD.format(title=f"{title} drafter", text="An MTP drafter for it.", pipeline_tag="text-generation")
    write_checkpoint(out / "drafter", drafter, tokenizer, stop_token_id=stop, card=card)


def main() -> None:
    """Command line: KIND OUT."""
    parser = argparse.ArgumentParser(description="Make a small random Gemma 4 body and its drafter.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_pair(arguments.kind, arguments.out)


if __name__ == "__main__":
    main()

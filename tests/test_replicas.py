"""The weightless replicas that plans are tested on, against what transformers itself builds from their configs."""

from __future__ import annotations

import re

import pytest
from published import BODIES, DRAFTERS, QAT, config_of, shapes_of


@pytest.mark.parametrize("repo", [repo for repo in (*BODIES, *DRAFTERS) if QAT in repo])
def test_tensors_are_what_transformers_builds(repo: str) -> None:
    """A model of a replica's config on the meta device has its tensors, by name and shape, and the tied head."""
    import torch
    import transformers

    config = config_of(repo)
    [architecture], kind = config.pop("architectures"), config.pop("model_type")
    with torch.device("meta"):
        model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(kind, **config))
    built = {_published(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    del built["lm_head.weight"]
    assert built == {name: shape.dims for name, shape in shapes_of(repo).items()}


def _published(name: str) -> str:
    """The 12B's checkpoint has other names than its modules: transformers renames them when it loads."""
    name = re.sub(r"embed_vision\.(patch_|pos_)", r"vision_embedder.\1", name)
    return re.sub(r"(embed_vision|embed_audio)\.multimodal_embedder\.", r"\1.", name)

"""Calibration datasets on the Hub, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bundler.errors import SourceError
from bundler.recipe import Calibration


def load_dataset_rows(calibration: Calibration, commit: str | None) -> Iterator[tuple[Path, Any]]:
    """The rows of a Hub dataset's split at a commit, shuffled as llm-compressor's examples do: `shuffle(seed=...)`.

    Each comes with the folder that its relative paths start from; a Hub dataset's rows hold their images themselves.

    SourceError if the dataset, its config or its split cannot be had.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    name = calibration.dataset
    try:
        rows = datasets.load_dataset(name, calibration.config, split=calibration.split, revision=commit)
    except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as exc:
        raise SourceError(
            f"cannot load split {calibration.split!r} of {name} at {commit}: {exc}",
            hint="look at the dataset's page for its configs and splits",
        ) from exc
    return ((Path(), row) for row in rows.shuffle(seed=calibration.seed))

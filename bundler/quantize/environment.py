"""Whether this environment can quantize: the `bake` extra is installed and its versions go together."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement

from bundler.findings import Finding, error

LIBRARIES = ("torch", "torchvision", "transformers", "compressed-tensors", "llmcompressor", "datasets", "pillow")


def check() -> list[Finding]:
    """Findings for missing libraries, or for ones that llm-compressor was not made for."""
    installed = versions()
    missing = [name for name in LIBRARIES if name not in installed]
    if missing:
        hint = "pip install 'bundler[bake]'"
        return [error("bake-extra-missing", "environment", f"not installed: {', '.join(missing)}", hint=hint)]
    return [
        error(
            "bake-versions",
            "environment",
            f"{requirement.name} {found} is installed; llmcompressor {installed['llmcompressor']} was made for "
            f"{requirement.specifier}",
            hint=f"pip install '{requirement.name}{requirement.specifier}'",
            source="llmcompressor's own metadata",
        )
        for requirement in map(Requirement, metadata.requires("llmcompressor") or [])
        if requirement.marker is None
        and (found := installed.get(requirement.name)) is not None
        and not requirement.specifier.contains(found, prereleases=True)
    ]


def versions() -> Mapping[str, str]:
    """Installed versions of the libraries that decide the bytes of a body."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

"""A bundle's bill of materials: CycloneDX 1.6, with the bundle, its sources and its dataset as ML components.

Written by cyclonedx-python-lib from the manifest alone. No clock and no chance: equal manifests give equal bytes.
"""

from __future__ import annotations

import importlib.util
import json
import uuid
from typing import TYPE_CHECKING

from bundler.errors import VerificationError
from bundler.manifest import Manifest, SourceEntry
from bundler.manifest import render as render_manifest

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import DisjunctiveLicense

_SPDX = {"apache-2.0": "Apache-2.0", "mit": "MIT", "cc-by-4.0": "CC-BY-4.0", "bsd-3-clause": "BSD-3-Clause"}


def render_bom(manifest: Manifest, *, repo_id: str | None = None) -> str:
    """The bill of materials as JSON text.

    VerificationError where the library is not installed, or the manifest holds what CycloneDX's schema does not take.
    """
    if importlib.util.find_spec("cyclonedx") is None:
        raise VerificationError("cyclonedx-python-lib is not installed", hint='pip install "bundler[bom]"')
    from cyclonedx.model.bom import Bom
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    body, drafter = _source("body", manifest.body), _source("drafter", manifest.drafter)
    dataset, bundle = _dataset(manifest), _bundle(manifest, repo_id)
    bom = Bom(components=[body, drafter, dataset, *_files(manifest)])
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, render_manifest(manifest))
    bom.metadata.component = bundle
    bom.metadata.tools.components.update(_tools(manifest))
    bom.register_dependency(bundle, [body, drafter, dataset])
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["metadata"]["timestamp"]  # it is optional, and the only thing that would differ
    text = json.dumps(document, indent=2, sort_keys=True) + "\n"
    if fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise VerificationError(f"the bill of materials would not be valid CycloneDX: {fault}"[:500])
    return text


def _bundle(manifest: Manifest, repo_id: str | None) -> Component:
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType

    record = manifest.quantization
    told = {
        "scheme": record.scheme,
        "format": record.format,
        "quantized_modules": record.quantized_modules,
        "quantized_parameters": record.quantized_parameters,
        "kept_parameters": record.kept_parameters,
        "recipe_sha256": manifest.recipe_sha256,
    }
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=repo_id or manifest.name,
        bom_ref="bundle",
        licenses=_licences(manifest.body),
        properties=[Property(name=f"bundler:{name}", value=str(value)) for name, value in told.items()],
    )


def _source(role: str, source: SourceEntry) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    namespace, _, name = source.model.rpartition("/")
    on_hub = source.commit is not None
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=source.model,
        version=source.commit,
        bom_ref=role,
        purl=PackageURL("huggingface", namespace, name, source.commit) if on_hub else None,
        licenses=_licences(source),
        properties=[Property(name="bundler:role", value=role)],
        components=[
            Component(
                type=ComponentType.FILE,
                name=file.path,
                bom_ref=f"{role}/{file.path}",
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file.sha256)],
            )
            for file in source.files
        ],
    )


def _dataset(manifest: Manifest) -> Component:
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component, ComponentType

    used = manifest.quantization.calibration
    told = {"split": used.split, "num_samples": used.num_samples, "seed": used.seed, "num_tokens": used.num_tokens}
    return Component(
        type=ComponentType.DATA,
        name=used.dataset,
        version=used.commit,
        bom_ref="calibration",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=used.sha256)] if used.sha256 else [],
        properties=[Property(name=f"bundler:{name}", value=str(value)) for name, value in told.items()],
    )


def _files(manifest: Manifest) -> list[Component]:
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.component import Component, ComponentType

    return [
        Component(
            type=ComponentType.FILE,
            name=file.path,
            bom_ref=f"bundle/{file.path}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=file.sha256)],
            properties=[
                Property(name="bundler:role", value=file.role),
                Property(name="bundler:size_bytes", value=str(file.size_bytes)),
            ],
        )
        for file in manifest.files
    ]


def _tools(manifest: Manifest) -> list[Component]:
    from cyclonedx.model.component import Component, ComponentType

    return [
        Component(type=ComponentType.LIBRARY, name=name, version=version, bom_ref=f"tool/{name}")
        for name, version in manifest.tool.items()
    ]


def _licences(source: SourceEntry) -> list[DisjunctiveLicense]:
    from cyclonedx.model import XsUri
    from cyclonedx.model.license import DisjunctiveLicense

    licence, link = str(source.card.get("license") or ""), source.card.get("license_link")
    if licence in _SPDX:
        return [DisjunctiveLicense(id=_SPDX[licence])]
    name = str(source.card.get("license_name") or licence)
    return [DisjunctiveLicense(name=name, url=XsUri(str(link)) if link else None)] if name else []

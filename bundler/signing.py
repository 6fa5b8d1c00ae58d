"""OpenSSF model signatures (https://github.com/sigstore/model-transparency) over what an engine runs.

Signed are weights, configs, tokenizers, licence and recipe, of body and drafter. Cards, measurements, evidence and
bundle.json are not: they may change later, and the signature still holds.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundler import manifest
from bundler.errors import VerificationError
from bundler.findings import Finding, error, errors, note
from bundler.manifest import FileEntry
from bundler.verify import verify

NAME = "model.sig"
_SIGNED_ROLES = {"body", "drafter", "licence", "recipe"}


def sign(root: Path, *, key: Path | None = None) -> None:
    """Sign a bundle with a private elliptic-curve key (PEM), or keyless: as whom a browser or the CI says you are.

    VerificationError if the bundle is not what its manifest says, or signing fails; then nothing is changed.
    """
    if found := errors(verify(root)):
        raise VerificationError(f"{root} is not what its manifest says, so it is not signed", findings=found)
    made, part = manifest.load(root), root / f"{NAME}.part"
    model_signing = _load_library()
    unsigned = [entry.path for entry in made.files if not _is_signed(entry.path)]
    hashing = model_signing.hashing.Config().set_allow_symlinks(True)
    hashing.set_ignored_paths(paths=[root / name for name in (*unsigned, NAME, manifest.NAME, part.name)])
    config = model_signing.signing.Config().set_hashing_config(hashing)
    try:
        config = config.use_elliptic_key_signer(private_key=key) if key else config.use_sigstore_signer()
        config.sign(root, part)
        part.replace(root / NAME)
    except Exception as exc:  # the library raises whatever its own libraries raise
        raise VerificationError(f"{root} could not be signed: {exc}", hint="look at the key, or log in again") from exc
    finally:
        part.unlink(missing_ok=True)
    size_bytes, sha256 = manifest.hash_file(root / NAME)
    entry = FileEntry(path=NAME, size_bytes=size_bytes, sha256=sha256, role=manifest.role_of(NAME))
    files = [file for file in made.files if file.path != NAME]
    manifest.write(root, replace(made, files=tuple(sorted([*files, entry], key=lambda file: file.path))))


def check_signature(
    root: Path, *, key: Path | None = None, identity: str | None = None, issuer: str | None = None
) -> list[Finding]:
    """Whether a bundle is signed by a public key (PEM), or by an identity that an issuer vouches for.

    Every file that should be signed must be. Without a key or identity, that there is a signature is only noted.
    """
    asked = key is not None or identity is not None
    if not (root / NAME).is_file():
        message = "is not here: the bundle is not signed"
        return [error("signature-missing", NAME, message, "ask its publisher")] if asked else []
    if not asked:
        message = "was not checked: say whose it must be"
        return [note("signature-unchecked", NAME, message, "--key PUBLIC.pem, or --identity WHO --issuer URL")]
    library = _load_library()
    hashing = library.hashing.Config().set_allow_symlinks(True)  # a snapshot in the Hub's cache is made of links
    verifying = library.verifying.Config().set_hashing_config(hashing).set_ignore_unsigned_files(True)
    try:
        if key is not None:
            verifying = verifying.use_elliptic_key_verifier(public_key=key)
        else:
            verifying = verifying.use_sigstore_verifier(identity=identity, oidc_issuer=issuer or "")
        verifying.verify(root, root / NAME)
        signed = _read_names(root / NAME)
    except Exception as exc:  # the library raises whatever its own libraries raise
        said = (str(exc) or type(exc).__name__).splitlines()[0]
        return [error("signature-wrong", NAME, f"does not hold: {said}", "do not use this bundle")]
    present = [path.as_posix() for path in manifest.list_files(root)]
    return [
        error("signature-partial", path, f"is not covered by {NAME}", "do not use this bundle")
        for path in present
        if _is_signed(path) and path not in signed
    ]


def _is_signed(path: str) -> bool:
    return manifest.role_of(path) in _SIGNED_ROLES and not path.endswith("README.md")


def _read_names(signature: Path) -> set[str]:
    """The files that a signature covers: the resources of its in-toto statement."""
    envelope = json.loads(signature.read_bytes())["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    return {str(resource["name"]) for resource in statement["predicate"]["resources"]}


def _load_library() -> Any:
    if importlib.util.find_spec("model_signing") is None:
        raise VerificationError("model-signing is not installed", hint='pip install "bundler[sign]"')
    import model_signing

    return model_signing

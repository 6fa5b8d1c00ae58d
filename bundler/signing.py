"""OpenSSF model signatures (https://github.com/sigstore/model-transparency) over what an engine runs.

Signed are weights, configs, tokenizers, licence and recipe, of body and drafter. Cards, measurements, evidence and
bundle.json are not: they may change later, and the signature still holds.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from contextlib import redirect_stdout
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
    """Sign a bundle with a private elliptic-curve key (PEM), or keyless: as who the CI, or a browser, says you are.

    VerificationError if the bundle is not what its manifest says, or signing fails; then nothing is changed. One that
    was stopped in between is made good by signing again.
    """
    part = root / f"{NAME}.part"
    if found := [found for found in errors(verify(root)) if found.where not in {NAME, part.name}]:
        raise VerificationError(f"{root} is not what its manifest says, so it is not signed", findings=found)
    made = manifest.load(root)
    model_signing = _load_library()
    unsigned = [entry.path for entry in made.files if not _is_signed(entry.path)]
    hashing = model_signing.hashing.Config().set_allow_symlinks(True)
    hashing.set_ignored_paths(paths=[*unsigned, NAME, manifest.NAME, part.name, ".cache"])
    config = model_signing.signing.Config().set_hashing_config(hashing)
    try:
        if key is not None:
            config.use_elliptic_key_signer(private_key=key)
        else:
            config.use_sigstore_signer(use_ambient_credentials=True)
        config.sign(root, part)
        part.replace(root / NAME)
    except Exception as exc:  # the library raises whatever its own libraries raise
        raise VerificationError(
            f"{root} could not be signed: {_said(exc)}", hint="look at the key, or log in again"
        ) from exc
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
    VerificationError if the key cannot be read, or the identity's certificates cannot be had.
    """
    asked = key is not None or identity is not None
    if not (root / NAME).is_file():
        message = "is not here: the bundle is not signed"
        return [error("signature-missing", NAME, message, "ask its publisher")] if asked else []
    if not asked:
        message = "was not checked: say whose it must be"
        return [note("signature-unchecked", NAME, message, "--key PUBLIC.pem, or --identity WHO --issuer URL")]
    verifying = _make_verifier(key, identity, issuer)
    try:
        with redirect_stdout(sys.stderr):  # where the library warns of old signatures
            verifying.verify(root, root / NAME)
        signed = _read_names(root / NAME)
    except Exception as exc:  # the library raises whatever its own libraries raise
        return [error("signature-wrong", NAME, f"does not hold: {_said(exc)}", "do not use this bundle")]
    present = [path.as_posix() for path in manifest.list_files(root)]
    return [
        error("signature-partial", path, f"is not covered by {NAME}", "do not use this bundle")
        for path in present
        if _is_signed(path) and path not in signed
    ]


def _make_verifier(key: Path | None, identity: str | None, issuer: str | None) -> Any:
    library = _load_library()
    hashing = library.hashing.Config().set_allow_symlinks(True)  # a snapshot in the Hub's cache is made of links
    config = library.verifying.Config().set_hashing_config(hashing).set_ignore_unsigned_files(True)
    try:
        if key is not None:
            return config.use_elliptic_key_verifier(public_key=key)
        return config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    except Exception as exc:  # the library raises whatever its own libraries raise
        what, hint = (
            (f"with {key}", "it must be a public elliptic-curve key, PEM") if key else ("keyless", "try again")
        )
        raise VerificationError(f"the signature cannot be checked {what}: {_said(exc)}", hint=hint) from exc


def _said(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0]


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

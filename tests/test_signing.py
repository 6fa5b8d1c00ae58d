"""A signature covers what an engine runs, wherever the bundle lies, and cards may change without breaking it."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner

from bundler import manifest
from bundler.card import write_bundle
from bundler.cli import main
from bundler.errors import VerificationError
from bundler.signing import check_signature, sign
from bundler.verify import verify


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private and a public key; a second pair would be a stranger's."""
    return make_keys(tmp_path_factory.mktemp("keys"))


def make_keys(folder: Path) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "private.pem", folder / "public.pem"
    private.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def signed(ready_copy: Path, keys: tuple[Path, Path]) -> Path:
    sign(ready_copy, key=keys[0])
    return ready_copy


def codes(root: Path, public: Path | None) -> list[str]:
    return [found.code for found in check_signature(root, key=public)]


def test_a_signed_bundle_is_a_bundle_and_its_signature_holds(signed: Path, keys: tuple[Path, Path]) -> None:
    """The manifest lists the signature; nothing else changes; whose it is has to be said to be checked."""
    assert verify(signed) == []
    assert manifest.load(signed).files[-1].path != "model.sig"
    assert [entry.role for entry in manifest.load(signed).files if entry.path == "model.sig"] == ["signature"]
    assert codes(signed, keys[1]) == []
    assert codes(signed, None) == ["signature-unchecked"]


def test_another_key_does_not_fit(signed: Path, tmp_path: Path) -> None:
    """A signature by somebody else is no signature."""
    assert codes(signed, make_keys(tmp_path)[1]) == ["signature-wrong"]


@pytest.mark.parametrize("name", ["config.json", "assistant/model.safetensors", "recipe.toml", "LICENSE"])
def test_what_is_signed_cannot_be_changed(signed: Path, keys: tuple[Path, Path], name: str) -> None:
    """Weights, configs, recipe and licence: one byte more, and the signature does not hold."""
    with (signed / name).open("ab") as file:
        file.write(b" ")
    assert codes(signed, keys[1]) == ["signature-wrong"]


def test_nothing_unsigned_can_be_slipped_in(signed: Path, keys: tuple[Path, Path]) -> None:
    """A file that an engine would read and that no signature covers is found, though the manifest be rewritten."""
    (signed / "added_tokens.json").write_text("{}")
    found = check_signature(signed, key=keys[1])
    assert [(one.code, one.where) for one in found] == [("signature-partial", "added_tokens.json")]


def test_cards_and_measurements_may_change(signed: Path, keys: tuple[Path, Path]) -> None:
    """A card for another repo, a new measurement: what was signed stays signed."""
    write_bundle(signed, repo_id="acme/other")
    (signed / "measurements").mkdir(exist_ok=True)
    (signed / "measurements" / "new.json").write_text("{}")
    (signed / "README.md").write_text("another")
    assert codes(signed, keys[1]) == []


def as_download(signed: Path, target: Path) -> Path:
    """A folder as `hf download --local-dir` leaves it."""
    shutil.copytree(signed, target / "download")
    cache = target / "download" / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "config.json.metadata").write_text("x")
    (target / "download" / ".gitattributes").write_text("x")
    return target / "download"


def as_snapshot(signed: Path, target: Path) -> Path:
    """A snapshot of the Hub's cache: links to blobs."""
    blobs, snapshot = target / "blobs", target / "snapshots" / "abc"
    blobs.mkdir()
    for path in [path for path in signed.rglob("*") if path.is_file()]:
        blob, link = blobs / manifest.hash_file(path)[1], snapshot / path.relative_to(signed)
        shutil.copyfile(path, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.mark.parametrize("place", [as_download, as_snapshot])
def test_a_signature_holds_wherever_the_bundle_lies(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path, place: Callable[[Path, Path], Path]
) -> None:
    """In a download with its .cache folder, and in a cache snapshot that is made of links."""
    (tmp_path / "there").mkdir()
    root = place(signed, tmp_path / "there")
    assert codes(root, keys[1]) == []
    assert verify(root) == []


def test_a_broken_bundle_is_not_signed(ready_copy: Path, keys: tuple[Path, Path]) -> None:
    """A signature says that this is what was built."""
    (ready_copy / "config.json").write_text("{}")
    with pytest.raises(VerificationError, match="is not what its manifest says"):
        sign(ready_copy, key=keys[0])
    assert not (ready_copy / "model.sig").exists()


def test_signing_that_was_stopped_is_made_good(signed: Path, keys: tuple[Path, Path]) -> None:
    """A signature that the manifest does not know, and a half of one, are what a kill leaves: sign again."""
    (signed / "model.sig").write_text("another")
    (signed / "model.sig.part").write_text("half")
    sign(signed, key=keys[0])
    assert verify(signed) == []
    assert codes(signed, keys[1]) == []


def test_a_download_can_be_signed(ready_copy: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """What the Hub and its client add is no part of the signature, and no path of this machine is in it."""
    root = as_download(ready_copy, tmp_path)
    sign(root, key=keys[0])
    shutil.rmtree(root / ".cache")
    (root / ".gitattributes").unlink()
    assert codes(root, keys[1]) == []
    payload = base64.b64decode(json.loads((root / "model.sig").read_text())["dsseEnvelope"]["payload"]).decode()
    assert "download/" not in payload
    assert str(tmp_path) not in payload
    assert "README.md" not in {item["name"] for item in json.loads(payload)["predicate"]["resources"]}


def test_a_key_that_is_none_changes_nothing(ready_copy: Path, tmp_path: Path) -> None:
    """Whatever goes wrong, there is no half-written signature."""
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(VerificationError, match="could not be signed"):
        sign(ready_copy, key=tmp_path / "key.pem")
    assert verify(ready_copy) == []


def test_an_unsigned_bundle_is_told_from_a_wrongly_signed_one(ready_copy: Path, keys: tuple[Path, Path]) -> None:
    """Asked for a signature, none is an error; not asked, nothing is said."""
    assert codes(ready_copy, keys[1]) == ["signature-missing"]
    assert codes(ready_copy, None) == []
    (ready_copy / "model.sig").write_text("{}")
    assert codes(ready_copy, keys[1]) == ["signature-wrong"]


def test_a_check_that_cannot_be_made_is_no_wrong_signature(signed: Path, keys: tuple[Path, Path]) -> None:
    """A private key in place of the public one; an identity while the certificates cannot be had."""
    with pytest.raises(VerificationError, match="cannot be checked with"):
        check_signature(signed, key=keys[0])
    with pytest.raises(VerificationError, match="cannot be checked keyless"):
        check_signature(signed, identity="a@example.org", issuer="https://example.org")


def test_keyless_without_a_network_changes_nothing(ready_copy: Path) -> None:
    """No key: the CI's or a browser's word is asked for, and where that cannot be, the bundle stays as it is."""
    with pytest.raises(VerificationError, match="could not be signed"):
        sign(ready_copy)
    assert verify(ready_copy) == []


def test_the_commands_sign_and_verify(ready_copy: Path, keys: tuple[Path, Path]) -> None:
    """`bundle sign --key`, then `bundle verify --key`: exit 0; with one byte changed, exit 7. Half a question is 2."""
    with chdir(ready_copy.parent):
        done = CliRunner().invoke(main, ["sign", ready_copy.name, "--key", str(keys[0])])
    assert done.exit_code == 0, done.output
    for asked in (["--identity", "me"], ["--issuer", "https://example.org"], ["--key", str(ready_copy / "none.pem")]):
        assert CliRunner().invoke(main, ["verify", str(ready_copy), *asked]).exit_code == 2
    assert CliRunner().invoke(main, ["verify", "acme/tiny", "--key", str(keys[1])]).exit_code == 2
    assert CliRunner().invoke(main, ["verify", str(ready_copy), "--key", str(keys[1])]).exit_code == 0
    (ready_copy / "recipe.toml").write_text("x")
    assert CliRunner().invoke(main, ["verify", str(ready_copy), "--key", str(keys[1])]).exit_code == 7

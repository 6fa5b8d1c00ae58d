"""The bill of materials is valid, says what the manifest says, and is the same each time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bundler import manifest
from bundler.bom import render_bom
from bundler.cli import main
from bundler.errors import VerificationError


def test_it_is_valid_against_its_schema_and_repeatable(ready: Path) -> None:
    """CycloneDX's own strict validator takes it; no clock and no chance are in it."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = render_bom(manifest.load(ready))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert render_bom(manifest.load(ready)) == text
    assert "timestamp" not in text


def test_it_names_every_file_source_dataset_and_tool(ready: Path) -> None:
    """Each with its hash or commit, and what depends on what."""
    made = manifest.load(ready)
    body = replace(made.body, model="google/gemma-4-31B-it", commit="a" * 40)
    document = json.loads(render_bom(replace(made, body=body), repo_id="acme/x"))
    components = {component["bom-ref"]: component for component in document["components"]}
    for entry in made.files:
        assert components[f"bundle/{entry.path}"]["hashes"] == [{"alg": "SHA-256", "content": entry.sha256}]
    assert components["body"]["purl"] == f"pkg:huggingface/google/gemma-4-31B-it@{'a' * 40}"
    assert components["body"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert {file["name"] for file in components["drafter"]["components"]} == {f.path for f in made.drafter.files}
    assert components["calibration"]["type"] == "data"
    assert document["metadata"]["component"]["name"] == "acme/x"
    assert {tool["name"] for tool in document["metadata"]["tools"]["components"]} == set(made.tool)
    needed = next(entry["dependsOn"] for entry in document["dependencies"] if entry["ref"] == "bundle")
    assert sorted(needed) == ["body", "calibration", "drafter"]


def test_another_licence_is_named_and_linked(ready: Path) -> None:
    """What is no SPDX licence appears under its own name."""
    made = manifest.load(ready)
    card = {"license": "other", "license_name": "terms-of-x", "license_link": "https://example.org/terms"}
    document = json.loads(render_bom(replace(made, body=replace(made.body, card=card))))
    licence = document["metadata"]["component"]["licenses"][0]["license"]
    assert (licence["name"], licence["url"]) == ("terms-of-x", "https://example.org/terms")


def test_what_the_schema_does_not_take_is_said(ready: Path) -> None:
    """A source's card is somebody else's word: a link that is none ends with a message, not with a bad document."""
    made = manifest.load(ready)
    card = {"license": "other", "license_link": "ht tp://<no link>"}
    with pytest.raises(VerificationError, match="not be valid CycloneDX"):
        render_bom(replace(made, body=replace(made.body, card=card)))


def test_the_command_prints_it(ready: Path) -> None:
    """`bundle bom BUNDLE` writes the document on stdout and nothing else."""
    done = CliRunner().invoke(main, ["bom", str(ready)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bomFormat"] == "CycloneDX"

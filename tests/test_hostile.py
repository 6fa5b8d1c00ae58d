"""Files that could do something to whoever opens a bundle are found without opening them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from bundler.hostile import check_hostile
from bundler.verify import verify

GOOD = """{%- macro say(m) -%}{{ m['content'] | trim }}{%- endmacro -%}
{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}
{% generation %}{{ say(m) }}{% endgeneration %}{% set ns = namespace(found=false) %}{% endfor %}
{{ raise_exception('no') }}{{ strftime_now('%d') }}{{ "<|turn>" + bos_token }}"""


def found(root: Path) -> list[tuple[str, str]]:
    return [(finding.code, finding.where) for finding in check_hostile(root)]


def test_a_usual_template_is_fine(tmp_path: Path) -> None:
    """Loops, macros, namespaces, transformers' own tag and functions are what templates are made of."""
    (tmp_path / "chat_template.jinja").write_text(GOOD)
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__init__') }}",
        "{{ messages['__cl' ~ 'ass__'] }}",
        "{{ messages | attr(messages[0]) }}",
        "{{ cycler._x }}",
        "{% include '/etc/passwd' %}",
        "{% import 'x' as x %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "x" * 1_000_001,
    ],
)
def test_a_template_that_reaches_out_is_found(tmp_path: Path, text: str) -> None:
    """Python's inner attributes, by dot, by key or by filter, and other files: none of it belongs into a template."""
    (tmp_path / "chat_template.jinja").write_text(text)
    assert found(tmp_path) == [("template-unsafe", "chat_template.jinja")]


@pytest.mark.parametrize("text", ["{% if %}", "{{ a", "{{ " + "(" * 5000 + " }}"])
def test_a_template_that_cannot_be_read_is_found(tmp_path: Path, text: str) -> None:
    """Broken or nested without end, it is refused and does no harm."""
    (tmp_path / "chat_template.jinja").write_text(text)
    assert found(tmp_path) == [("template-unreadable", "chat_template.jinja")]


@pytest.mark.parametrize(
    "held", ["{{ x.__class__ }}", [{"name": "default", "template": GOOD}, {"name": "tool", "template": "{{ x._y }}"}]]
)
def test_templates_inside_json_are_looked_at(tmp_path: Path, held: object) -> None:
    """A tokenizer config holds one template, or several by name."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": held}))
    assert found(tmp_path) == [("template-unsafe", "tokenizer_config.json")]


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b'{"chat_template": 3}', b'{"chat_template": [3]}'])
def test_what_is_no_template_is_left_to_other_checks(tmp_path: Path, content: bytes) -> None:
    """Broken JSON has findings of its own."""
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    assert found(tmp_path) == []


@pytest.mark.parametrize("name", ["model.bin", "x.PT", "y.joblib"])
def test_a_pickle_is_found(tmp_path: Path, name: str) -> None:
    """By its name, in whatever case."""
    (tmp_path / name).write_bytes(b"x")
    assert found(tmp_path) == [("pickle-present", name)]


def test_a_pickle_or_an_archive_under_another_name_is_found(tmp_path: Path) -> None:
    """By its first bytes; a shard's own are a length, which may look like anything."""
    (tmp_path / "a.json").write_bytes(pickle.dumps({}))
    for kind in ("zip", "tar", "gztar", "bztar", "xztar"):
        made = Path(shutil.make_archive(str(tmp_path.parent / kind), kind, tmp_path, "a.json"))
        made.replace(tmp_path / f"{kind}.json")
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04" + bytes(1200))
    (tmp_path / "short.json").write_bytes(b"P")
    assert found(tmp_path)[0] == ("pickle-present", "a.json")
    assert {code for code, _ in found(tmp_path)[1:]} == {"archive-present"}
    assert len(found(tmp_path)) == 6


@pytest.mark.parametrize("name", ["weights.zip", "x.tar.gz", "data.7z", "tool.whl"])
def test_an_archive_is_found(tmp_path: Path, name: str) -> None:
    """Nobody sees what is in it."""
    (tmp_path / name).write_bytes(b"x")
    assert found(tmp_path) == [("archive-present", name)]


def test_verify_looks_for_all_of_it(bundle_copy: Path) -> None:
    """It is part of every verification, of a folder and of a repo."""
    (bundle_copy / "chat_template.jinja").write_text("{{ x.__class__ }}")
    assert "template-unsafe" in {finding.code for finding in verify(bundle_copy)}

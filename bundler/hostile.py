"""What a file of a bundle could do to whoever opens it: pickles, archives that hide things, templates that reach out.

Pickles and archives are known by their names or by their first bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jinja2 import Environment, TemplateError, nodes

from bundler.checkpoint import PICKLES
from bundler.findings import Finding, error
from bundler.manifest import list_files

ARCHIVES = frozenset({".7z", ".bz2", ".gz", ".rar", ".tar", ".tgz", ".whl", ".xz", ".zip", ".zst"})
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_ARCHIVE = re.compile(
    rb"PK(\x03\x04|\x05\x06)|\x1f\x8b|BZh|\xfd7zXZ\x00|\x28\xb5\x2f\xfd|7z\xbc\xaf\x27\x1c|Rar!|.{257}ustar", re.DOTALL
)
_MAX_TEMPLATE_BYTES = 1_000_000
_MARKER = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # transformers' own tag, which says where answers are
_INNER = "__"  # `x["__class__"]` is `x.__class__`, also put together from parts
_HINT = "take the template of the original checkpoint"


def check_hostile(root: Path) -> list[Finding]:
    """Every pickle and archive of a bundle, and every chat template that does more than to put messages together."""
    paths = [path.as_posix() for path in list_files(root)]
    findings = []
    for path in paths:
        suffix, head = Path(path).suffix.lower(), _read_head(root / path)
        if suffix in PICKLES or _PICKLE.match(head):
            message = "is a pickle, which runs code when it is opened"
            findings.append(error("pickle-present", path, message, "keep safetensors only"))
        elif suffix in ARCHIVES or _ARCHIVE.match(head):
            message = "is an archive: nobody sees what is in it, and unpacking it may write anywhere"
            findings.append(error("archive-present", path, message, "keep the files themselves"))
    return findings + check_templates(root, paths)


def check_templates(folder: Path, paths: Iterable[str]) -> list[Finding]:
    """Every chat template in these files that does more than to put messages together."""
    return [
        finding
        for path in paths
        if path.endswith(".jinja") or Path(path).name in {"tokenizer_config.json", "chat_template.json"}
        for template in _read_templates(folder / path)
        for finding in _check_template(path, template)
    ]


def _read_head(path: Path) -> bytes:
    """The first bytes of a file; none of a shard, whose own begin with a length, or where it cannot be read."""
    try:
        with path.open("rb") as file:
            return b"" if path.suffix == ".safetensors" else file.read(262)
    except OSError:
        return b""


def _read_templates(path: Path) -> Iterator[str]:
    """The templates in a file; none where it cannot be read, which other checks report."""
    try:
        if path.stat().st_size > 50 * _MAX_TEMPLATE_BYTES:
            return
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jinja":
            yield text
            return
        held = json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    for entry in held if isinstance(held, list) else [{"template": held}]:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            yield entry["template"]


def _check_template(where: str, text: str) -> list[Finding]:
    """The tree of a template is looked at; nothing of it is run."""
    if len(text) > _MAX_TEMPLATE_BYTES:
        return [error("template-unsafe", where, f"holds a template of {len(text)} characters", _HINT)]
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKER.sub("", text))
    except (TemplateError, RecursionError) as exc:
        return [error("template-unreadable", where, f"holds a template that cannot be read: {exc}", _HINT)]
    reached = [
        *(type(node).__name__.lower() for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport))),
        *("extends" for _ in tree.find_all(nodes.Extends)),
        *(node.attr for node in tree.find_all(nodes.Getattr) if node.attr.startswith("_")),
        *("attr" for node in tree.find_all(nodes.Filter) if node.name == "attr"),
        *(str(node.value) for node in tree.find_all(nodes.Const) if _INNER in str(node.value)),
    ]
    if not reached:
        return []
    message = f"holds a template that reaches beyond its messages: {', '.join(sorted(set(reached)))[:80]}"
    return [error("template-unsafe", where, message, _HINT)]

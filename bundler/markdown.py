"""Values made safe for markdown: whatever a recipe or a file holds, it stays one cell, one line, and text."""

from __future__ import annotations

import html
import re


def prose(value: object) -> str:
    """One line of text: no HTML, no line break; markdown emphasis and links stay."""
    return " ".join(html.escape(str(value), quote=False).replace("&amp;", "&").split())


def cell(value: object) -> str:
    """One table cell: as `prose`, and a pipe is no border."""
    return re.sub(r"(?<!\\)\|", r"\\|", prose(value))


def code(value: object) -> str:
    """A code span that may also stand in a table: fenced by more backticks than it holds, pipes escaped."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if len(fence) > 1 else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def link(text: str, url: object) -> str:
    """A link that is safe in a cell; empty where `url` is no web address and no file of the repository."""
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^\s<>\"`]+|[\w.-]+(/[\w.-]+)*", url):
        return ""
    return f"[{cell(text)}]({url.replace('(', '%28').replace(')', '%29').replace('|', '%7C')})"

"""A finding: one thing that a check has to say. Checks return findings; only verbs raise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`error` stops the verb, `warning` is printed and recorded, `note` is recorded."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault or remark: a stable `code`, the place, what is wrong there, and what to do about it."""

    severity: Severity
    code: str
    where: str
    message: str
    hint: str | None = None
    source: str | None = None
    """Where the rule comes from: an issue, a document, a measurement."""


def error(code: str, where: str, message: str, hint: str | None = None, source: str | None = None) -> Finding:
    """A finding that stops the verb."""
    return Finding(severity=Severity.ERROR, code=code, where=where, message=message, hint=hint, source=source)


def warning(code: str, where: str, message: str, hint: str | None = None, source: str | None = None) -> Finding:
    """A finding that the user should read before going on."""
    return Finding(severity=Severity.WARNING, code=code, where=where, message=message, hint=hint, source=source)


def note(code: str, where: str, message: str, hint: str | None = None, source: str | None = None) -> Finding:
    """A finding that belongs on the record and needs no action."""
    return Finding(severity=Severity.NOTE, code=code, where=where, message=message, hint=hint, source=source)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop the verb."""
    return [finding for finding in findings if finding.severity is Severity.ERROR]

"""The error tree. One class per exit code; `cli` is the only place that catches it.

    BundlerError
    ├── RecipeError           3  the recipe says something that cannot be done
    ├── SourceError           4  a checkpoint or dataset is absent, closed or damaged
    ├── CompatibilityError    5  body, drafter and engine do not fit together
    ├── QuantizationError     6  the body could not be quantized, or came out wrong
    ├── VerificationError     7  the bundle is not what its manifest says
    ├── PublishError          8  the Hub refused, or holds something else than we sent
    └── EngineError           9  an engine did not start, answer or agree

Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from bundler.findings import Finding


class BundlerError(Exception):
    """What went wrong and where (`str(error)`), what to do next (`hint`), and every finding behind it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, findings: Iterable[Finding] = ()) -> None:
        super().__init__(message)
        self.hint = hint
        self.findings = tuple(findings)


class RecipeError(BundlerError):
    """The recipe cannot be read, or asks for something that does not exist."""

    exit_code = 3


class SourceError(BundlerError):
    """A checkpoint or dataset is absent, closed, truncated or not what it claims to be."""

    exit_code = 4


class CompatibilityError(BundlerError):
    """Body, drafter and engine do not fit together."""

    exit_code = 5


class QuantizationError(BundlerError):
    """The body could not be quantized, or its quantized form failed a check."""

    exit_code = 6


class VerificationError(BundlerError):
    """The bundle is not what its manifest says, or would not serve."""

    exit_code = 7


class PublishError(BundlerError):
    """The Hub refused the push, or holds something else than was sent."""

    exit_code = 8


class EngineError(BundlerError):
    """An engine did not start, did not answer, or did not agree."""

    exit_code = 9

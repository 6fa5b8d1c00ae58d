"""What the commands share: arguments, and the one place that turns errors into exit codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

RECIPE = click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path))
BUNDLE = click.argument("bundle", type=click.Path(file_okay=False, path_type=Path))
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there."
)


def to_dicts(values: Iterable[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(value) for value in values]


@contextmanager
def error_boundary() -> Iterator[None]:
    """Our own errors become a message and an exit code; anything else is a bug and keeps its traceback."""
    from bundler.errors import BundlerError

    try:
        yield
    except BundlerError as exc:
        from bundler import printing

        printing.print_error(exc)
        raise SystemExit(exc.exit_code) from exc
    except KeyboardInterrupt as exc:
        click.echo("stopped; what was finished is kept", err=True)
        raise SystemExit(130) from exc

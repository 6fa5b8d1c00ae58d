"""The command line: parse, call one function, print. The one place that turns errors into exit codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bundler import __version__

if TYPE_CHECKING:
    from bundler.findings import Finding

_RECIPE = click.argument("recipe", type=click.Path(dir_okay=False, path_type=Path))
_BUNDLE = click.argument("bundle", type=click.Path(file_okay=False, path_type=Path))
_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="bundle")
def main() -> None:
    """Package and publish model bundles: an NVFP4 Gemma 4 body with its MTP drafter, in one Hub repo.

    A recipe becomes a plan, a plan becomes a bundle that proves itself, a proven bundle becomes one commit.
    """


@main.command()
@_RECIPE
@_JSON
def plan(recipe: Path, as_json: bool) -> None:
    """Show what a RECIPE will do and what would fail; downloads no weights."""
    with _error_boundary():
        from bundler import printing
        from bundler.build import refuse, resolve
        from bundler.plan import plan_to_dict
        from bundler.recipe import load

        made = resolve(load(recipe))
        if as_json:
            printing.print_json(plan_to_dict(made))
        else:
            printing.print_plan(made)
        refuse(made)


@main.command()
@_RECIPE
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Where the bundle appears, under its name.",
)
@click.option("--replace", is_flag=True, help="Replace a bundle that is already there, once the new one is whole.")
def build(recipe: Path, out: Path, replace: bool) -> None:
    """Make the bundle of a RECIPE: fetch, quantize, add the drafter, card and manifest, verify.

    The bundle appears whole or not at all. A build that was stopped carries on when run again.
    """
    with _error_boundary():
        from bundler import printing
        from bundler.build import Watch
        from bundler.build import build as run
        from bundler.recipe import load

        with printing.progress("layers", "layer") as layer, printing.progress("fetch", "bytes") as fetch:
            built = run(
                load(recipe),
                out,
                replace=replace,
                watch=Watch(
                    plan=printing.print_plan,
                    step=printing.print_step,
                    fetch=lambda path, done, total: fetch(done, total, what=path),
                    layer=lambda done, count, tokens: layer(done, count, tokens=tokens),
                ),
            )
        printing.print_result(
            f"{built.folder} is ready",
            f"check it again:  bundle verify {built.folder}",
            f"publish it:      bundle push {built.folder} --repo ORG/NAME --dry-run",
        )


@main.command()
@_BUNDLE
@_JSON
def verify(bundle: Path, as_json: bool) -> None:
    """Prove the bytes of a BUNDLE folder against its manifest and against what engines need; needs no torch."""
    with _error_boundary():
        from bundler import printing
        from bundler.errors import VerificationError
        from bundler.findings import errors
        from bundler.verify import verify as run

        findings = run(bundle)
        if as_json:
            printing.print_json({"bundle": str(bundle), "ok": not errors(findings), "findings": _to_dicts(findings)})
        else:
            printing.print_findings(findings)
        if found := errors(findings):
            raise VerificationError(f"{bundle} has {len(found)} faults", hint="do not publish or serve it as it is")
        if not as_json:
            printing.print_result(f"{bundle} is what its manifest says")


@main.command()
@click.argument("source", metavar="BUNDLE|RECIPE", type=click.Path(path_type=Path))
@click.option("--preview", is_flag=True, help="Print the card instead of writing it.")
def card(source: Path, preview: bool) -> None:
    """Render the card of a BUNDLE folder again from what is recorded, or preview the card of a RECIPE."""
    with _error_boundary():
        from bundler import printing
        from bundler.card import render_bundle, render_recipe, write_bundle
        from bundler.recipe import load

        if source.suffix == ".toml":
            click.echo(render_recipe(load(source)), nl=False)
        elif preview:
            click.echo(render_bundle(source), nl=False)
        else:
            write_bundle(source)
            printing.print_result(f"{source / 'README.md'} is written")


@main.command()
@_BUNDLE
@click.option("--repo", "repo_id", metavar="ORG/NAME", help="The Hub repo; the recipe's publish.repo_id by default.")
@click.option("--tag", help="Tag the commit; the recipe's publish.tag by default.")
@click.option(
    "--private/--public", default=None, help="Visibility when done; the recipe's publish.private by default."
)
@click.option("--message", help="The commit's message.")
@click.option("--dry-run", is_flag=True, help="Show what would change; create and send nothing.")
@_JSON
def push(
    bundle: Path,
    repo_id: str | None,
    tag: str | None,
    private: bool | None,
    message: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish a BUNDLE folder as one commit in one Hub repo, and check afterwards what the Hub holds.

    HF_TOKEN and HF_ENDPOINT mean what they mean to huggingface_hub.
    """
    with _error_boundary():
        from bundler import printing
        from bundler.push import push as run
        from bundler.recipe import load_bundled

        publish = load_bundled(bundle).publish
        target = repo_id or publish.repo_id
        if target is None:
            raise click.UsageError("no repo: give --repo ORG/NAME, or publish.repo_id in the recipe")
        with printing.progress("upload", "bytes") as upload:
            outcome = run(
                bundle,
                target,
                private=publish.private if private is None else private,
                tag=tag or publish.tag,
                message=message,
                dry_run=dry_run,
                progress=lambda path, done, total: upload(done, total, what=path),
            )
        if as_json:
            printing.print_json(outcome.to_dict())
        else:
            printing.print_outcome(outcome)


def _to_dicts(findings: list[Finding]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(finding) for finding in findings]


@contextmanager
def _error_boundary() -> Iterator[None]:
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

"""Real engines: prove a bundle on one, and keep their environments."""

from __future__ import annotations

from pathlib import Path

import click

from bundler.cli.edge import BUNDLE, JSON, error_boundary, to_dicts


@click.command(short_help="Serve a bundle with a real engine, and judge it")
@BUNDLE
@click.option("--engine", metavar="NAME==VERSION", help="vllm==0.32.0; the newest the recipe allows by default.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="cuda where there is a GPU, else cpu.")
@click.option("--twin", is_flag=True, help="Prove a small copy of the structure: for a body that does not fit.")
@click.option("--untrained", is_flag=True, help="The drafter has random weights: none of its drafts need be right.")
@click.option("--timeout", type=float, default=900, show_default=True, help="Seconds that each start may take.")
@JSON
def prove(
    bundle: Path, engine: str | None, device: str | None, twin: bool, untrained: bool, timeout: float, as_json: bool
) -> None:
    """Start a real engine on a BUNDLE folder, without and with the drafter, and record what it does as evidence.

    The engine gets an environment of its own under the user's cache; uv makes it.
    """
    with error_boundary():
        from bundler import printing
        from bundler.errors import EngineError
        from bundler.evidence import Outcome, to_dict
        from bundler.findings import errors
        from bundler.prove import prove as run
        from bundler.session import Watch

        evidence = run(
            bundle,
            engine=engine,
            device=device,
            with_twin=twin,
            untrained=untrained,
            timeout_s=timeout,
            watch=Watch(step=printing.print_step, command=lambda line: printing.print_step(f"$ {line}")),
        )
        if as_json:
            printing.print_json(to_dict(evidence))
        else:
            printing.print_evidence(evidence)
        if evidence.outcome is not Outcome.PROVEN:
            raise EngineError(
                f"{evidence.outcome.replace('-', ' ')}: {evidence.engine} {evidence.version} on {evidence.device}",
                hint=f"{bundle / evidence.file} holds the command, the answers and the log's end",
                findings=errors(evidence.findings),
            )


@click.group(short_help="Engine environments, and which release runs what")
def engines() -> None:
    """The engines' own environments, and what is known of their releases."""


@engines.command("list")
def engines_list() -> None:
    """Show every engine environment with its size."""
    with error_boundary():
        from bundler import printing
        from bundler.engines.environments import folder, installed

        printing.print_environments(installed(), folder())


@engines.command("install")
@click.argument("engine", metavar="NAME==VERSION")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="cuda where there is a GPU, else cpu.")
def engines_install(engine: str, device: str | None) -> None:
    """Make the environment of an engine release now, so that prove finds it ready."""
    with error_boundary():
        from bundler import printing
        from bundler.engines import load_facts
        from bundler.engines.environments import find_device, install, parse_release

        made = install(parse_release(engine, device or find_device()), load_facts(), printing.print_step)
        printing.print_result(f"{made.release.name} is ready in {made.root}")


@engines.command("remove")
@click.argument("engine", metavar="NAME==VERSION")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="cuda where there is a GPU, else cpu.")
def engines_remove(engine: str, device: str | None) -> None:
    """Delete the environment of an engine release."""
    with error_boundary():
        from bundler import printing
        from bundler.engines.environments import find_device, parse_release, remove

        release = parse_release(engine, device or find_device())
        printing.print_result(f"{release.name} is removed: {remove(release) / 1e6:,.0f} MB freed")


@engines.command("matrix")
@click.argument("source", metavar="RECIPE|BUNDLE", type=click.Path(path_type=Path))
@click.option("--among", "among", metavar="VERSION", multiple=True, help="Look at these versions alone; repeatable.")
@click.option("--require", metavar="NAME==VERSION", help="Exit with code 5 unless this release runs it as it is.")
@JSON
def engines_matrix(source: Path, among: tuple[str, ...], require: str | None, as_json: bool) -> None:
    """Show which engine releases run a RECIPE's or BUNDLE's body with its drafter, and why others do not."""
    with error_boundary():
        from bundler import printing
        from bundler.card import load_setting
        from bundler.engines import load_facts
        from bundler.engines.matrix import check_required, first_that_works, make_matrix

        facts, setting = load_facts(), load_setting(source)
        lines = make_matrix(facts, setting, among)
        first = first_that_works(lines) or first_that_works(make_matrix(facts, setting))
        if as_json:
            printing.print_json({"first": first, "releases": to_dicts(lines)})
        else:
            printing.print_matrix(lines, first)
        if require:
            check_required(facts, setting, require)

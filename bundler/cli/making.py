"""From a checkpoint to a bundle: init, plan, build, card, diff."""

from __future__ import annotations

from pathlib import Path

import click

from bundler.cli.edge import JSON, RECIPE, error_boundary, to_dicts


@click.command(short_help="Write a recipe for a checkpoint")
@click.argument("body")
@click.option("--drafter", help="The drafter; by default the one that belongs to the body.")
@click.option("--dataset", help="Calibration data; by default ultrachat, or calibration.jsonl beside a local body.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The recipe's file; by default ./NAME.toml."
)
def init(body: str, drafter: str | None, dataset: str | None, out: Path | None) -> None:
    """Write a recipe for a BODY, a Gemma 4 checkpoint on the Hub or in a folder; downloads no weights."""
    with error_boundary():
        from bundler import printing
        from bundler.init import init as run

        written = run(body, out, drafter=drafter, dataset=dataset)
        printing.print_findings(written.plan.findings)
        printing.print_result(
            f"{written.path} is written: {written.plan.body.model} with {written.plan.drafter.model}",
            f"see what it leads to:  bundle plan {written.path}",
            f"make it:               bundle build {written.path}",
        )


@click.command(short_help="What a recipe will do, and what would fail")
@RECIPE
@click.option("--target", metavar="BOX", help="Plan for serving on this box: 4x16GB, 2x24GB, 1xH200.")
@click.option(
    "--set", "changes", metavar="KEY=VALUE", multiple=True, help="Try a change: --set calibration.num_samples=32."
)
@JSON
def plan(recipe: Path, target: str | None, changes: tuple[str, ...], as_json: bool) -> None:
    """Show what a RECIPE will do, what it takes, where it can be served, and what would fail; downloads no weights."""
    with error_boundary():
        from bundler import printing
        from bundler.build import refuse, resolve
        from bundler.engines import parse_box
        from bundler.plan_json import plan_to_dict
        from bundler.recipe import load

        try:
            box = parse_box(target) if target is not None else None
        except ValueError as exc:
            raise click.BadParameter(str(exc), param_hint="--target") from exc
        made = resolve(load(recipe, changes), box=box)
        if as_json:
            printing.print_json(plan_to_dict(made))
        else:
            printing.print_plan(made)
        refuse(made)


@click.command(short_help="Make the bundle of a recipe")
@RECIPE
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("dist"),
    show_default=True,
    help="Where the bundle appears, under its name.",
)
@click.option("--replace", is_flag=True, help="Replace a bundle that is already there, once the new one is whole.")
@click.option(
    "--device", default="cpu", show_default=True, help="Where to calibrate: cpu, cuda or cuda:N. One device."
)
@click.option(
    "--memory-limit", metavar="SIZE", help="Memory that the bake may take, such as 8GiB; more goes to a file."
)
def build(recipe: Path, out: Path, replace: bool, device: str, memory_limit: str | None) -> None:
    """Make the bundle of a RECIPE: fetch, quantize, add the drafter, card and manifest, verify.

    The bundle appears whole or not at all. A build that was stopped carries on when run again. Several processes share
    the calibration under torchrun: torchrun --nproc-per-node 2 -m bundler build RECIPE
    """
    with error_boundary():
        from bundler import hash_cache, printing
        from bundler.build import Means, Watch
        from bundler.build import build as run
        from bundler.quantize.memory import parse_bytes
        from bundler.recipe import load

        means = Means(device=device, memory_limit_bytes=parse_bytes(memory_limit) if memory_limit else None)
        with printing.baking() as bake, printing.progress("fetch", "bytes") as fetch:
            watch = Watch(
                plan=printing.print_plan,
                step=printing.print_step,
                fetch=lambda path, done, total: fetch(done, total, what=path),
                bake=bake,
            )
            built = run(load(recipe), out, replace=replace, means=means, watch=watch)
        if built is None:
            return
        hash_cache.remember_unless((), hash_cache.look(built.folder))
        printing.print_result(
            f"{built.folder} is ready",
            f"check it again:  bundle verify {built.folder}",
            f"publish it:      bundle push {built.folder} --repo ORG/NAME --dry-run",
        )


@click.command(short_help="Render the card again, or preview it")
@click.argument("source", metavar="BUNDLE|RECIPE", type=click.Path(path_type=Path))
@click.option("--preview", is_flag=True, help="Print the card instead of writing it.")
def card(source: Path, preview: bool) -> None:
    """Render the card of a BUNDLE folder again from what is recorded, or preview the card of a RECIPE."""
    with error_boundary():
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


@click.command(short_help="What differs between two bundles or recipes")
@click.argument("left", metavar="A")
@click.argument("right", metavar="B")
@JSON
def diff(left: str, right: str, as_json: bool) -> None:
    """Show what differs between A and B: recipes, bundle folders, or Hub ids (ORG/NAME@REVISION)."""
    with error_boundary():
        from bundler import printing
        from bundler.diff import compare, gather, look

        views = look(left), look(right)
        found = compare(*views)
        if as_json:
            printing.print_json({"left": left, "right": right, "differences": to_dicts(found)})
        else:
            printing.print_differences(left, right, gather(found))

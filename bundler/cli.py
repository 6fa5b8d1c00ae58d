"""The command line: parse, call one function, print. The one place that turns errors into exit codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bundler import __version__

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
@click.option("--target", metavar="BOX", help="Plan for serving on this box: 4x16GB, 2x24GB, 1xH200.")
@click.option(
    "--set", "changes", metavar="KEY=VALUE", multiple=True, help="Try a change: --set calibration.num_samples=32."
)
@_JSON
def plan(recipe: Path, target: str | None, changes: tuple[str, ...], as_json: bool) -> None:
    """Show what a RECIPE will do, what it takes, where it can be served, and what would fail; downloads no weights."""
    with _error_boundary():
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


@main.command()
@click.argument("body")
@click.option("--drafter", help="The drafter; by default the one that belongs to the body.")
@click.option("--dataset", help="Calibration data; by default ultrachat, or calibration.jsonl beside a local body.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The recipe's file; by default ./NAME.toml."
)
def init(body: str, drafter: str | None, dataset: str | None, out: Path | None) -> None:
    """Write a recipe for a BODY, a Gemma 4 checkpoint on the Hub or in a folder; downloads no weights."""
    with _error_boundary():
        from bundler import printing
        from bundler.init import init as run

        written = run(body, out, drafter=drafter, dataset=dataset)
        printing.print_findings(written.plan.findings)
        printing.print_result(
            f"{written.path} is written: {written.plan.body.model} with {written.plan.drafter.model}",
            f"see what it leads to:  bundle plan {written.path}",
            f"make it:               bundle build {written.path}",
        )


@main.command()
@click.argument("left", metavar="A")
@click.argument("right", metavar="B")
@_JSON
def diff(left: str, right: str, as_json: bool) -> None:
    """Show what differs between A and B: recipes, bundle folders, or Hub ids (ORG/NAME@REVISION)."""
    with _error_boundary():
        from bundler import printing
        from bundler.diff import compare, gather, look

        views = look(left), look(right)
        found = compare(*views)
        if as_json:
            printing.print_json({"left": left, "right": right, "differences": _to_dicts(found)})
        else:
            printing.print_differences(left, right, gather(found))


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
    with _error_boundary():
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


@main.command()
@click.argument("bundle", metavar="FOLDER|ORG/NAME[@REVISION]")
@click.option("--full", is_flag=True, help="Of a bundle on the Hub, download and verify every byte.")
@_JSON
def verify(bundle: str, full: bool, as_json: bool) -> None:
    """Prove the bytes of a bundle against its manifest and against what engines need; needs no torch.

    Of a bundle on the Hub, anyone's, weights are not downloaded: the Hub's own hashes and the shards' headers are
    looked at. A public one needs no token.
    """
    with _error_boundary():
        from bundler import hash_cache, printing
        from bundler.errors import VerificationError
        from bundler.findings import errors
        from bundler.remote import parse_address, verify_remote
        from bundler.verify import verify as run

        folder, address, commit = Path(bundle), parse_address(bundle), None
        if address is None or folder.is_dir() or folder.parent.is_dir():
            before = hash_cache.look(folder)
            findings = run(folder)
            hash_cache.remember_unless(errors(findings), before)
        else:
            with printing.progress("fetch", "bytes" if full else "file") as fetch:
                commit, findings = verify_remote(
                    address, full=full, progress=lambda path, done, total: fetch(done, total, what=path)
                )
        if as_json:
            ok = not errors(findings)
            printing.print_json({"bundle": bundle, "commit": commit, "ok": ok, "findings": _to_dicts(findings)})
        else:
            printing.print_findings(findings)
        if found := errors(findings):
            raise VerificationError(f"{bundle} has {len(found)} faults", hint="do not publish or serve it as it is")
        if not as_json:
            printing.print_result(f"{bundle} is what its manifest says" + (f" at {commit}" if commit else ""))


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
@click.option("--pr", "pull_request", is_flag=True, help="Commit to a pull request of yours, open or new.")
@click.option(
    "--prune/--no-prune",
    default=None,
    help="Delete what is not the bundle's, in the same commit. By default only where bundles put everything there.",
)
@click.option("--full", is_flag=True, help="Download the commit again and verify every byte before it is announced.")
@click.option("--dry-run", is_flag=True, help="Show what would change; create and send nothing.")
@_JSON
def push(
    bundle: Path,
    repo_id: str | None,
    tag: str | None,
    private: bool | None,
    message: str | None,
    pull_request: bool,
    prune: bool | None,
    full: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish a BUNDLE folder as one commit in one Hub repo, and check what others will get before they see it.

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
        if pull_request and (tag is not None or private is not None):
            raise click.UsageError("a pull request changes neither tags nor visibility: leave --tag, --public out")
        with printing.progress("upload", "bytes") as upload, printing.progress("fetch back", "bytes") as fetch:
            outcome = run(
                bundle,
                target,
                private=publish.private if private is None else private,
                tag=tag or publish.tag,
                message=message,
                pull_request=pull_request,
                prune=prune,
                full=full,
                dry_run=dry_run,
                progress=lambda path, done, total: upload(done, total, what=path),
                download=lambda path, done, total: fetch(done, total, what=path),
                step=printing.print_step,
            )
        if as_json:
            printing.print_json(outcome.to_dict())
        else:
            printing.print_outcome(outcome)


@main.command()
@_RECIPE
@click.option("--bundle", metavar="FOLDER|ORG/NAME", help="The bundle; dist/NAME or publish.repo_id by default.")
@_JSON
def outdated(recipe: Path, bundle: str | None, as_json: bool) -> None:
    """Tell whether body, drafter or chat template have moved on since the bundle of a RECIPE was built."""
    with _error_boundary():
        from bundler import printing
        from bundler.outdated import check_outdated, load_recorded
        from bundler.recipe import load

        asked = load(recipe)
        findings = check_outdated(asked, load_recorded(asked, bundle, Path("dist")))
        if as_json:
            printing.print_json({"recipe": str(recipe), "findings": _to_dicts(findings)})
        elif findings:
            printing.print_findings(findings)
        else:
            printing.print_result(f"the sources of {asked.name} are where the bundle was built from")


@main.command()
@_BUNDLE
@click.option("--engine", metavar="NAME==VERSION", help="vllm==0.32.0; the newest the recipe allows by default.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="cuda where there is a GPU, else cpu.")
@click.option("--twin", is_flag=True, help="Prove a small copy of the structure: for a body that does not fit.")
@click.option("--untrained", is_flag=True, help="The drafter has random weights: none of its drafts need be right.")
@click.option("--timeout", type=float, default=900, show_default=True, help="Seconds that each start may take.")
@_JSON
def prove(
    bundle: Path, engine: str | None, device: str | None, twin: bool, untrained: bool, timeout: float, as_json: bool
) -> None:
    """Start a real engine on a BUNDLE folder, without and with the drafter, and record what it does as evidence.

    The engine gets an environment of its own under the user's cache; uv makes it.
    """
    with _error_boundary():
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


@main.group()
def engines() -> None:
    """The engines' own environments, and what is known of their releases."""


@engines.command("list")
def engines_list() -> None:
    """Show every engine environment with its size."""
    with _error_boundary():
        from bundler import printing
        from bundler.engines.environments import folder, installed

        printing.print_environments(installed(), folder())


@engines.command("install")
@click.argument("engine", metavar="NAME==VERSION")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="cuda where there is a GPU, else cpu.")
def engines_install(engine: str, device: str | None) -> None:
    """Make the environment of an engine release now, so that prove finds it ready."""
    with _error_boundary():
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
    with _error_boundary():
        from bundler import printing
        from bundler.engines.environments import find_device, parse_release, remove

        release = parse_release(engine, device or find_device())
        printing.print_result(f"{release.name} is removed: {remove(release) / 1e6:,.0f} MB freed")


@engines.command("matrix")
@click.argument("source", metavar="RECIPE|BUNDLE", type=click.Path(path_type=Path))
@click.option("--among", "among", metavar="VERSION", multiple=True, help="Look at these versions alone; repeatable.")
@click.option("--require", metavar="NAME==VERSION", help="Exit with code 5 unless this release runs it as it is.")
@_JSON
def engines_matrix(source: Path, among: tuple[str, ...], require: str | None, as_json: bool) -> None:
    """Show which engine releases run a RECIPE's or BUNDLE's body with its drafter, and why others do not."""
    with _error_boundary():
        from bundler import printing
        from bundler.card import load_setting
        from bundler.engines import load_facts
        from bundler.engines.matrix import check_required, first_that_works, make_matrix

        facts, setting = load_facts(), load_setting(source)
        lines = make_matrix(facts, setting, among)
        first = first_that_works(lines) or first_that_works(make_matrix(facts, setting))
        if as_json:
            printing.print_json({"first": first, "releases": _to_dicts(lines)})
        else:
            printing.print_matrix(lines, first)
        if require:
            check_required(facts, setting, require)


def _to_dicts(values: Iterable[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(value) for value in values]


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

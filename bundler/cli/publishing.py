"""From a bundle to a repo: verify, sign, bom, push, outdated."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from bundler.cli.edge import BUNDLE, JSON, RECIPE, error_boundary, to_dicts

PEM = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Find every fault of a bundle")
@click.argument("bundle", metavar="FOLDER|ORG/NAME[@REVISION]")
@click.option("--full", is_flag=True, help="Of a bundle on the Hub, download and verify every byte.")
@click.option("--key", type=PEM, help="A public key (PEM) that must have signed it.")
@click.option("--identity", help="Who must have signed it keyless, as the issuer names them.")
@click.option("--issuer", metavar="URL", help="The OpenID issuer of that identity.")
@JSON
def verify(bundle: str, full: bool, key: Path | None, identity: str | None, issuer: str | None, as_json: bool) -> None:
    """Prove the bytes of a bundle against its manifest and against what engines need; needs no torch.

    Of a bundle on the Hub, anyone's, weights are not downloaded: the Hub's own hashes and the shards' headers are
    looked at. A public one needs no token.
    """
    if (identity is None) != (issuer is None) or (key and identity):
        raise click.UsageError("say whose signature it must be: --key, or --identity with --issuer")
    with error_boundary():
        from bundler import hash_cache, printing
        from bundler.errors import VerificationError
        from bundler.findings import errors
        from bundler.remote import parse_address, verify_remote
        from bundler.signing import check_signature
        from bundler.verify import verify as run

        folder, address, commit = Path(bundle), parse_address(bundle), None
        signed = partial(check_signature, key=key, identity=identity, issuer=issuer)
        if address is None or folder.is_dir() or folder.parent.is_dir():
            before = hash_cache.look(folder)
            findings = run(folder) + signed(folder)
            hash_cache.remember_unless(errors(findings), before)
        elif (key or identity) and not full:
            raise click.UsageError("a signature is over every byte: add --full")
        else:
            with printing.progress("fetch", "bytes" if full else "file") as fetch:
                commit, findings = verify_remote(
                    address, full=full, also=signed, progress=lambda path, done, total: fetch(done, total, what=path)
                )
        if as_json:
            ok = not errors(findings)
            printing.print_json({"bundle": bundle, "commit": commit, "ok": ok, "findings": to_dicts(findings)})
        else:
            printing.print_findings(findings)
        if found := errors(findings):
            raise VerificationError(f"{bundle} has {len(found)} faults", hint="do not publish or serve it as it is")
        if not as_json:
            printing.print_result(f"{bundle} is what its manifest says" + (f" at {commit}" if commit else ""))


@click.command(short_help="Sign weights, configs and recipe")
@BUNDLE
@click.option("--key", type=PEM, help="A private elliptic-curve key (PEM); keyless without it.")
def sign(bundle: Path, key: Path | None) -> None:
    """Sign the weights, configs and recipe of a BUNDLE folder (OpenSSF model signing); cards may change later."""
    with error_boundary():
        from bundler import printing
        from bundler.signing import NAME
        from bundler.signing import sign as run

        run(bundle, key=key)
        whose = "--key PUBLIC.pem" if key else "--identity WHO --issuer URL"
        printing.print_result(f"{bundle / NAME} is written", f"check it:  bundle verify {bundle} {whose}")


@click.command(short_help="Print the bill of materials")
@BUNDLE
@click.option(
    "--repo", "repo_id", metavar="ORG/NAME", help="What the bundle is called in it; its own name by default."
)
def bom(bundle: Path, repo_id: str | None) -> None:
    """Print the bill of materials of a BUNDLE folder: CycloneDX 1.6 JSON, with its sources and its dataset."""
    with error_boundary():
        from bundler.bom import render_bom
        from bundler.manifest import load

        click.echo(render_bom(load(bundle), repo_id=repo_id), nl=False)


@click.command(short_help="Publish a bundle as one commit, and check it")
@BUNDLE
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
@JSON
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
    with error_boundary():
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


@click.command(short_help="Whether the sources have moved on")
@RECIPE
@click.option("--bundle", metavar="FOLDER|ORG/NAME", help="The bundle; dist/NAME or publish.repo_id by default.")
@JSON
def outdated(recipe: Path, bundle: str | None, as_json: bool) -> None:
    """Tell whether body, drafter or chat template have moved on since the bundle of a RECIPE was built."""
    with error_boundary():
        from bundler import printing
        from bundler.outdated import check_outdated, load_recorded
        from bundler.recipe import load

        asked = load(recipe)
        findings = check_outdated(asked, load_recorded(asked, bundle, Path("dist")))
        if as_json:
            printing.print_json({"recipe": str(recipe), "findings": to_dicts(findings)})
        elif findings:
            printing.print_findings(findings)
        else:
            printing.print_result(f"the sources of {asked.name} are where the bundle was built from")

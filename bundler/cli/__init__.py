"""The command line: parse, call one function, print. What each command does is in the module of its verb."""

from __future__ import annotations

import click

from bundler import __version__
from bundler.cli.making import build, card, diff, init, plan
from bundler.cli.proving import engines, prove
from bundler.cli.publishing import bom, outdated, push, sign, verify


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="bundle")
def main() -> None:
    """Package and publish model bundles: an NVFP4 Gemma 4 body with its MTP drafter, in one Hub repo.

    A recipe becomes a plan, a plan becomes a bundle that proves itself, a proven bundle becomes one commit.
    """


for _command in (init, plan, build, card, diff, prove, engines, verify, sign, bom, push, outdated):
    main.add_command(_command)

"""What is known about the engines, as rows of TOML with a source and a date, and the lines that start them."""

from bundler.engines.cards import Box, Card, load_cards, parse_box, usual_cards
from bundler.engines.facts import (
    Facts,
    Match,
    ReleaseRange,
    Setting,
    Verdict,
    allowed_releases,
    check_hardware,
    check_serve,
    load_facts,
    make_release_ranges,
    parse_facts,
    select_facts,
)
from bundler.engines.serve import FOLDER, ServeCommand, make_argv, make_serve_command, render_bash, render_powershell

__all__ = [
    "FOLDER",
    "Box",
    "Card",
    "Facts",
    "Match",
    "ReleaseRange",
    "ServeCommand",
    "Setting",
    "Verdict",
    "allowed_releases",
    "check_hardware",
    "check_serve",
    "load_cards",
    "load_facts",
    "make_argv",
    "make_release_ranges",
    "make_serve_command",
    "parse_box",
    "parse_facts",
    "render_bash",
    "render_powershell",
    "select_facts",
    "usual_cards",
]

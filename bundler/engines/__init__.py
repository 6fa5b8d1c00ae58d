"""What is known about the engines, as rows of TOML with a source and a date, and the lines that start them."""

from bundler.engines.facts import (
    Facts,
    Match,
    Setting,
    Verdict,
    check_serve,
    load_facts,
    make_release_ranges,
    parse_facts,
    select_facts,
)
from bundler.engines.serve import FOLDER, ServeCommand, make_serve_command, render_bash, render_powershell

__all__ = [
    "FOLDER",
    "Facts",
    "Match",
    "ServeCommand",
    "Setting",
    "Verdict",
    "check_serve",
    "load_facts",
    "make_release_ranges",
    "make_serve_command",
    "parse_facts",
    "render_bash",
    "render_powershell",
    "select_facts",
]

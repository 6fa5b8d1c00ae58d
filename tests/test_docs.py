"""The docs are true: every command, option, exit code and finding code that they name exists, and none is left out."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bundler import errors
from bundler.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SAYERS = {"error", "warning", "note", "say"}


def literal_strings() -> set[str]:
    """Every string literal of the package."""
    return {
        node.value
        for path in (ROOT / "bundler").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def finding_codes() -> set[str]:
    """Every code that is written where a finding is made."""
    codes = set()
    for path in (ROOT / "bundler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in SAYERS and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", str(node.args[0].value)):
                    codes.add(node.args[0].value)
    return codes


def documented_codes() -> set[str]:
    """Every code in the README's table."""
    table = README[README.index("## Finding codes") :]
    return {
        code
        for row in table.splitlines()
        if row.startswith("| `")
        for code in re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])
    }


def test_every_finding_code_is_documented() -> None:
    """The README's table holds every code there is, and no other."""
    assert finding_codes() - documented_codes() == set()
    literals = literal_strings()
    unknown = [
        code for code in documented_codes() if code not in literals and f"{code.split('-')[0]}-" not in literals
    ]
    assert unknown == []


def test_every_command_is_documented() -> None:
    """Every command is in the README with its options; every one has help that is a sentence."""
    for name, command in main.commands.items():
        assert f"bundle {name}" in README, name
        assert command.get_short_help_str(), name
    for option in re.findall(r"`(--[a-z-]+)", README):
        known = {
            switch
            for command in main.commands.values()
            for parameter in [
                *command.params,
                *(p for c in getattr(command, "commands", {}).values() for p in c.params),
            ]
            if isinstance(parameter, click.Option)
            for switch in [*parameter.opts, *parameter.secondary_opts]
        }
        assert option in known, option


def test_every_exit_code_is_documented() -> None:
    """The README's table of exit codes is the error tree's."""
    classes = [errors.BundlerError, *errors.BundlerError.__subclasses__()]
    for code in {cls.exit_code for cls in classes} - {1}:
        assert re.search(rf"^\| {code} \|", README, re.MULTILINE), code


def test_help_is_quick_and_light() -> None:
    """`bundle --help` imports neither torch nor transformers nor huggingface_hub."""
    script = (
        "import sys; from click.testing import CliRunner; from bundler.cli import main;"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0;"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'llmcompressor', 'numpy', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_usage_is_code_2() -> None:
    """A command line that cannot be read ends with 2."""
    assert CliRunner().invoke(main, ["plan"]).exit_code == 2
    assert CliRunner().invoke(main, ["fly"]).exit_code == 2


def test_errors_become_one_message_and_their_code(tmp_path: Path) -> None:
    """A broken recipe says what, where and what next on stderr, with 3; nothing on stdout."""
    recipe = tmp_path / "broken.toml"
    recipe.write_text('edition = 1\nname = "x"\n[body]\nmodle = "a/b"\n')
    run = subprocess.run(
        [sys.executable, "-m", "bundler", "plan", str(recipe)], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 3
    assert run.stdout == ""
    assert "body.modle" in run.stderr
    assert "body.model" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_the_wheel_carries_what_it_needs(tmp_path: Path) -> None:
    """A built wheel holds templates and data files, and its package renders a card."""
    subprocess.run(["uv", "build", "--wheel", "--out-dir", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import bundler; from pathlib import Path;"
        "from bundler import card, recipe; assert bundler.__file__.startswith(sys.argv[1]);"
        "print(card.render_recipe(recipe.load(Path(sys.argv[2]))))"
    )
    recipe = ROOT / "recipes" / "31b-abliterated.toml"
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "site"), str(recipe)], check=True, capture_output=True, text=True
    )
    assert "speculative-config" in run.stdout


def test_nothing_records_where_it_was_downloaded_from() -> None:
    """pyproject names no registry and the tree holds no lock file."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "index" not in pyproject["tool"]["uv"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert not [path for path in tracked if path.endswith((".lock", "package-lock.json"))]

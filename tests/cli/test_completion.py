"""Completion, asked for in the shells themselves where they are installed."""

import shutil
import subprocess
import sys

import pytest

from replicator.cli import main as cli

# Bash fills COMP_WORDS and COMP_CWORD, calls the function, and shows COMPREPLY.
_BASH = """
source "$1"; shift
function=$(complete -p replicator | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$function" replicator "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell, folder, capsys):
    assert cli.main(["completion", shell]) == 0
    path = folder / f"replicator.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def in_bash(path, *words, cwd=None):
    command = ["bash", "--norc", "-c", _BASH, "bash", str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    return done.stdout.split()


def test_bash_completes_commands_options_and_choices(tmp_path, capsys):
    path = script("bash", tmp_path, capsys)
    assert {"demo", "devices", "doctor"} == set(in_bash(path, "replicator", "d"))
    assert in_bash(path, "replicator", "doctor", "--d") == ["--directory"]
    assert "fish" in in_bash(path, "replicator", "completion", "")
    assert "--version" in in_bash(path, "replicator", "--")


def test_bash_completes_directories_where_one_is_wanted(tmp_path, capsys):
    path = script("bash", tmp_path, capsys)
    (tmp_path / "runs").mkdir()
    (tmp_path / "rumour.txt").touch()
    assert in_bash(path, "replicator", "report", "ru", cwd=tmp_path) == ["runs"]


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_the_script_names_all_commands_and_the_shell_can_parse_it(
    shell, check, tmp_path, capsys
):
    path = script(shell, tmp_path, capsys)
    assert all(name in path.read_text() for name in cli.COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: `apt-get install {shell}`")
    subprocess.run([shell, check, path], check=True)


@pytest.mark.skipif(
    shutil.which("fish") is None, reason="fish is not installed: `apt-get install fish`"
)
def test_fish_completes_commands(tmp_path, capsys):
    path = script("fish", tmp_path, capsys)
    asked = f"source {path}; complete -C 'replicator d'"
    command = ["fish", "--no-config", "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert names == {"demo", "devices", "doctor"}


def test_another_shell_is_bad_input(capsys):
    assert cli.main(["completion", "csh"]) == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err


def test_shtab_is_asked_for_by_name_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'jax-replicator[completion]'" in capsys.readouterr().err

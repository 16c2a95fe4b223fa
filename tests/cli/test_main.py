"""The command itself: its table, its errors in one line, its exit codes."""

import argparse
import importlib
import os
import subprocess
import sys

import pytest

from replicator.base.version import __version__
from replicator.cli import main as cli
from replicator.errors import ArgumentError, CheckpointError


def run_cli(*words, **options):
    command = [sys.executable, "-m", "replicator.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )


def raising(failure):
    def run():
        raise failure

    return run


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_is_a_module_of_three_names(name):
    command = importlib.import_module(cli.COMMANDS[name])
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert callable(command.main)
    assert 10 < len(command.SUMMARY) < 80
    assert not command.SUMMARY.endswith(".")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_help(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert name in capsys.readouterr().out


def test_help_lists_all_commands(capsys):
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"\n    {name}" in told for name in cli.COMMANDS)


def test_the_version_names_what_it_runs_on(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"replicator {__version__} (jax ")


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["doctor", "--frobnicate"]])
def test_what_is_not_understood_is_bad_input(words, capsys):
    assert cli.main(words) == 2
    assert "replicator: error: " in capsys.readouterr().err


def test_a_launch_of_what_is_not_there_starts_nothing(capsys):
    assert cli.main(["launch", "--processes", "2", "nowhere.py"]) == 2
    assert "`script` must be a file, got 'nowhere.py'." in capsys.readouterr().err
    assert cli.main(["launch", "--processes", "2", "-m", "nowhere.at_all"]) == 2
    assert "`module` must be one that Python finds" in capsys.readouterr().err


def test_a_launch_names_what_is_missing_and_no_more(capsys):
    assert cli.main(["launch", "--processes", "2"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.endswith("the following arguments are required: SCRIPT")


@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [
        (ArgumentError("`a` must\n be 1."), 2, "`a` must be 1."),
        (CheckpointError("gone"), 1, "gone"),
        (OSError(28, "No space left"), 1, "[Errno 28] No space left"),
        (KeyError("x"), 1, "KeyError: 'x' (`--traceback` shows where)"),
        (ValueError(), 1, "ValueError: no message (`--traceback` shows where)"),
    ],
)
def test_an_error_is_one_line_and_a_code(failure, code, told, capsys):
    assert cli.run_guarded(raising(failure), show_trace=False) == code
    assert capsys.readouterr().err == f"replicator: error: {told}\n"


def test_a_traceback_is_there_for_who_asks(capsys):
    failure = ArgumentError("`a` must be 1.")
    assert cli.run_guarded(raising(failure), show_trace=True) == 2
    assert capsys.readouterr().err.startswith("Traceback")


@pytest.mark.parametrize("words", [["--traceback"], []])
def test_traceback_may_stand_before_or_after_the_command(words, capsys, tmp_path):
    after = [] if words else ["--traceback"]
    assert cli.main([*words, "report", str(tmp_path), *after]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(capsys):
    assert cli.run_guarded(raising(KeyboardInterrupt()), show_trace=True) == 130
    assert capsys.readouterr().err == "replicator: interrupted\n"


@pytest.mark.slow
def test_help_starts_no_backend_and_no_plotting():
    code = """
import sys
from replicator.cli.main import main
main(["--help"])
from jax._src import xla_bridge
assert not xla_bridge._backends
heavy = {"flax", "sklearn", "plotly", "tensorstore", "shtab"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as gone:
        command = [sys.executable, "-m", "replicator.cli", "devices"]
        done = subprocess.run(
            command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
def test_python_m_replicator_is_the_command():
    command = [sys.executable, "-m", "replicator", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"replicator {__version__} (jax ")

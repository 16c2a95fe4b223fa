"""Find the command that is asked for, run it, and report an error in one line.

A command is a module with `SUMMARY`, `add_arguments(parser)` and `main(arguments)`,
which returns the exit code; `COMMANDS` is the one list of them. Only the command that
is asked for is imported, and none starts JAX before its `main`.

Exit codes: that of the command; 2 for bad input, 130 after Ctrl-C, 1 for any other
error, and if a line of the output could not be written (without a message if its reader
went away). `launch` returns the exit code of its processes.
"""

import argparse
import importlib
import platform
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

import jax

from replicator.base.host.standard_streams import lossy_output, take_loss
from replicator.base.version import __version__
from replicator.errors import ReplicatorError

COMMANDS: Mapping[str, str] = {
    "demo": "replicator.cli.demo",
    "launch": "replicator.cli.launch",
    "program": "replicator.cli.look.program",
    "report": "replicator.cli.look.report",
    "plan": "replicator.cli.look.plan",
    "checkpoints": "replicator.cli.checkpoints",
    "replay": "replicator.cli.replay",
    "devices": "replicator.cli.look.devices",
    "doctor": "replicator.cli.doctor",
    "certificates": "replicator.cli.certificates",
    "completion": "replicator.cli.completion",
}
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


def main(command_line: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    Args:
      command_line: Arguments as typed after `replicator`; those of this process by
        default.
    """
    with lossy_output():
        code = _run(sys.argv[1:] if command_line is None else list(command_line))
        if loss := take_loss():
            code, (message, why) = code or FAILED, loss
            if not isinstance(why, BrokenPipeError):
                print(f"replicator: error: {message}", file=sys.stderr)
        return code


def _run(command_line: Sequence[str]) -> int:
    asked = next((each for each in command_line if not each.startswith("-")), "")
    known = [asked] if asked in COMMANDS else list(COMMANDS)
    try:
        arguments = make_parser(known).parse_args(command_line)
    except SystemExit as end:  # argparse has printed the reason
        return end.code if isinstance(end.code, int) else BAD_INPUT
    return run_guarded(lambda: arguments.run(arguments), show_trace=arguments.traceback)


def make_parser(commands: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return a parser that knows some commands.

    Args:
      commands: Their names, all by default; their modules are imported.

    >>> make_parser(["report"]).parse_args(["report", "runs/a"]).directory
    'runs/a'
    """
    parser = argparse.ArgumentParser(
        prog="replicator",
        description="Write what one replica does; run it on many devices.",
        epilog="`replicator COMMAND --help` shows the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument("--traceback", action="store_true", help=_TRACEBACK)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS if commands is None else commands:
        _add_command(subparsers, name)
    return parser


def run_guarded(run: Callable[[], int], *, show_trace: bool) -> int:
    """Call `run`; turn an exception into a line on standard error and an exit code.

    >>> run_guarded(lambda: 0, show_trace=False)
    0
    """
    try:
        return run()
    except KeyboardInterrupt:
        print("replicator: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as failure:
        if show_trace:
            traceback.print_exc()
        else:
            print(f"replicator: error: {_in_one_line(failure)}", file=sys.stderr)
        return _code(failure)


_TRACEBACK = "show the whole traceback of an error"


def _add_command(subparsers: argparse._SubParsersAction, name: str) -> None:
    command = importlib.import_module(COMMANDS[name])
    parser = subparsers.add_parser(
        name, help=command.SUMMARY, description=f"{command.SUMMARY}."
    )
    command.add_arguments(parser)
    # Here, too, and without a default, which would undo one given before the command.
    parser.add_argument(
        "--traceback", action="store_true", default=argparse.SUPPRESS, help=_TRACEBACK
    )
    parser.set_defaults(run=command.main, make_parser=make_parser)


def _versions() -> str:
    python = platform.python_version()
    return f"replicator {__version__} (jax {jax.__version__}, Python {python})"


def _in_one_line(failure: Exception) -> str:
    message = " ".join(str(failure).split())
    if isinstance(failure, ReplicatorError | OSError | ImportError) and message:
        return message
    # Not written for users: name its type, and how to see more.
    name = type(failure).__name__
    return f"{name}: {message or 'no message'} (`--traceback` shows where)"


def _code(failure: Exception) -> int:
    ours = isinstance(failure, ReplicatorError) and isinstance(failure, ValueError)
    return BAD_INPUT if ours else FAILED

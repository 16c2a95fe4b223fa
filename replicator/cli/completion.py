"""`replicator completion SHELL`: print a shell's completion script for our commands.

shtab writes the script from the argument parser, once: pressing Tab then starts no
Python, which with JAX in it would take half a second each time (argcomplete does that).
An argument is completed with directories if its metavar is `DIR`, with files if it is
`FILE` or `SCRIPT`.
"""

import argparse
from collections.abc import Iterator

from replicator.base.optional_package import optional_package

SUMMARY = "Print the completion script of a shell"
SHELLS = ("bash", "zsh", "fish")
_DIRECTORIES = frozenset({"DIR", "DIRECTORY"})
_FILES = frozenset({"FILE", "SCRIPT"})
_HOW = """add one line to the file that your shell reads at its start:
  bash  ~/.bashrc:                   source <(replicator completion bash)
  zsh   ~/.zshrc, after compinit:    source <(replicator completion zsh)
  fish  ~/.config/fish/config.fish:  replicator completion fish | source"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=SHELLS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HOW


def main(arguments: argparse.Namespace) -> int:
    """Print the script."""
    with optional_package("completion", "shtab", extra="completion"):
        import shtab
    parser: argparse.ArgumentParser = arguments.make_parser()
    for action in _actions(parser):
        # shtab reads this attribute: which arguments are paths, and of what.
        name = str(action.metavar or action.dest).upper()
        if name in _DIRECTORIES | _FILES:
            paths = shtab.DIRECTORY if name in _DIRECTORIES else shtab.FILE
            action.complete = paths  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(parser, shell=arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)

"""Replay a step that failed, from its post-mortem bundle, on one device."""

import argparse

from replicator.errors import ArgumentError
from replicator.training.postmortem.bundle import read_bundle
from replicator.training.postmortem.replay import (
    load_function,
    replay_recorded,
    replay_step,
)

SUMMARY = "Run a failed step again, and show where a number first went bad"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", help="the bundle: <run>/postmortem/<step>")
    parser.add_argument(
        "--step",
        metavar="MODULE:FUNCTION",
        help="run this step function instead of the program in the bundle",
    )
    parser.add_argument(
        "--init",
        metavar="MODULE:FUNCTION",
        help="with --step: the init function, for the structure of the state",
    )


def main(arguments: argparse.Namespace) -> int:
    """Replay; 0 if the failure is reproduced, else 1.

    Raises:
      ArgumentError: There is no bundle, or it holds too little.
    """
    if (arguments.step is None) != (arguments.init is None):
        raise ArgumentError(
            "`--step` and `--init` must be given together, got one of them. "
            "Name both, as `module:function`."
        )
    bundle = read_bundle(arguments.directory)
    print(f"step {bundle.step}: {bundle.error['type']}: {bundle.error['message']}")
    if arguments.step is None:
        verdict = replay_recorded(bundle)
    else:
        step_fn = load_function(arguments.step)
        init_fn = load_function(arguments.init)
        verdict = replay_step(bundle, step_fn, init_fn)
    print(verdict.describe())
    return 0 if verdict.outputs else 1

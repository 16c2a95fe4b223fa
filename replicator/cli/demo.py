"""`replicator demo`: train on real handwritten digits, here and now.

Everything is in the package, the digits included. Where there is no accelerator eight
fake CPU devices stand in for them.
"""

import argparse
import os
import time
from pathlib import Path

import jax

from replicator.base.host.fake_devices import ENVIRONMENT_VARIABLE, size_cpu_pool
from replicator.base.host.paths import expanded
from replicator.cli import demo_training
from replicator.cli.tables import print_table
from replicator.errors import check_count

SUMMARY = "Train on real handwritten digits, on fake devices if there are no others"
_FAKE_DEVICES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "--steps", type=int, default=400, help="updates (default: %(default)s)"
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        default=128,
        metavar="N",
        help="examples per update, over all replicas (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--directory",
        type=expanded,
        default=Path("runs/demo"),
        metavar="DIR",
        help="where the run's records go (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Train, test and say how it went."""
    check_count("steps", arguments.steps)
    check_count("global_batch", arguments.global_batch)
    stand_in_for_accelerators()
    started_s = time.monotonic()
    outcome = demo_training.train(
        steps=arguments.steps,
        global_batch=arguments.global_batch,
        seed=arguments.seed,
        directory=arguments.directory,
    )
    seconds = time.monotonic() - started_s
    platform = jax.devices()[0].platform
    rows = [
        ("test accuracy", f"{outcome.accuracy:.1%} of {outcome.examples} digits"),
        ("throughput", f"{outcome.examples_per_s:,.0f} examples/s"),
        ("replicas", f"{outcome.replicas} ({platform})"),
        ("took", f"{seconds:.0f} s, compilation and test included"),
        ("metrics", str(arguments.directory / "metrics.jsonl")),
        ("to see it", f"replicator report {arguments.directory}"),
    ]
    print_table(("demo", f"{arguments.steps} steps"), rows)
    return 0


def stand_in_for_accelerators() -> None:
    """Have JAX make fake CPU devices; it uses them only where it finds no others."""
    chosen = jax.config.jax_num_cpu_devices != -1  # pyright: ignore
    if chosen or os.environ.get(ENVIRONMENT_VARIABLE) or os.environ.get("XLA_FLAGS"):
        return
    size_cpu_pool(_FAKE_DEVICES)
    jax.config.update("jax_num_cpu_devices", _FAKE_DEVICES)

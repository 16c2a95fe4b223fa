"""The flag of all example programs: where their nodes run."""

import sys
from collections.abc import Callable

from absl import flags

from experiments import config_flags

LAUNCH_TYPE = flags.DEFINE_enum(
    "launch_type", "threads", ["threads", "processes", "ray"], "Where nodes run."
)
# `--help` shows what the script itself defines, and each of them shares this one.
flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["launch_type"])


def run(main: Callable[[str], None]) -> None:
    """Call `main` with where nodes are to run, and exit."""
    config_flags.start(lambda: main(LAUNCH_TYPE.value))

"""The flag of all example programs: where their nodes run."""

import sys

from absl import flags

LAUNCH_TYPE = flags.DEFINE_enum(
    "launch_type", "threads", ["threads", "processes", "ray"], "Where nodes run."
)
# `--help` shows what the script itself defines, and each of them shares this one.
flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["launch_type"])

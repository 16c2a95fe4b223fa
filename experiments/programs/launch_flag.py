"""The flag of all example programs: where their nodes run."""

from absl import flags

LAUNCH_TYPE = flags.DEFINE_enum(
    "launch_type", "threads", ["threads", "processes", "ray"], "Where nodes run."
)

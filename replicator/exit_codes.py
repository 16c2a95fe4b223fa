"""Exit codes of a run's process, for launchers that may start it again."""

PREEMPTED = 75
"""The run was asked to stop, and everything is saved: start it again."""

HUNG = 76
"""The watchdog ended a run that made no progress: start all its processes again."""


INTERRUPTED = 130
"""Everything was saved after one Ctrl-C: the exit code that shells use for it."""

"""What a process of ours says by its exit code, to whoever may start it again."""

PREEMPTED = 75
"""Everything was saved because somebody asked the run to stop: start it again."""

HUNG = 76
"""The watchdog ended a run that made no progress: start all its processes again."""


INTERRUPTED = 130
"""Everything was saved because of one Ctrl-C: the code that shells use for it."""

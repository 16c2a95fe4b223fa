"""What a process of a run says by its exit code, to whoever may start it again."""

from replicator.base.host.exit_codes import HUNG, INTERRUPTED, PREEMPTED

__all__ = ["HUNG", "INTERRUPTED", "PREEMPTED"]

"""Guard a run while it runs: against hanging, and against being killed unsaved."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from replicator.distributed.notices import OwnNotices, open_notices
from replicator.monitoring.phases import Phases
from replicator.training.preemption.hook import Preemption
from replicator.training.preemption.stop_agreement import StopAgreement
from replicator.training.watchdog import Limits, Watchdog


@contextmanager
def guarded(
    phases: Phases,
    *,
    limits: Limits | None = None,
    directory: str | os.PathLike[str] | None = None,
    together: bool = False,
    saved: bool = False,
    tell: Callable[..., None] | None = None,
) -> Iterator[Preemption | None]:
    """Watch the calling thread's run, and hear signals for it.

    Args:
      phases: What the run is doing.
      limits: How long it may do it.
      directory: Where stacks go, should it hang.
      together: Whether all processes make this run; they call this in the same order.
      saved: Whether the run is saved. One that is not has nothing to save when it is
        asked to stop: then signals do what they always do.
      tell: Learns of `hung` and `straggler`.

    Yields:
      What hears signals, for `LeaveSaved`; None if they are left alone.
    """
    notices = open_notices() if together else OwnNotices()
    with Watchdog(
        phases, limits=limits, directory=directory, notices=notices, tell=tell
    ):
        if not saved:
            yield None
            return
        with Preemption(StopAgreement(notices)) as preemption:
            yield preemption

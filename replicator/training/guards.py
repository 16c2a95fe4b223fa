"""Guard a run: against hanging, being killed unsaved, and ending without a word."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from replicator.distributed.leaving import leave_at_once
from replicator.distributed.notices import OwnNotices, open_notices
from replicator.errors import Preempted
from replicator.training.preemption.hook import Preemption
from replicator.training.preemption.stop_agreement import StopAgreement
from replicator.training.training import Training
from replicator.training.watchdog import Watchdog


@contextmanager
def guarded(of: Training, *, hears: bool = True) -> Iterator[Preemption | None]:
    """Watch the calling thread's run, and hear signals for it.

    A run that is not saved has nothing to save when it is asked to stop: then signals
    do what they always do. In a node of a program the node says when to stop, in place
    of signals, and is what fails if the run hangs, in place of the process.

    Args:
      of: The run. Where all processes make it, they call this in the same order.
      hears: Whether it can be asked to stop at all, by signals or by its node.

    Yields:
      What hears who asks the run to stop; None if it is left alone.
    """
    notices = open_notices() if of.together else OwnNotices()
    node = of.node if hears else None
    with Watchdog(
        of.phases,
        limits=of.limits,
        directory=of.recording.directory,
        notices=notices,
        tell=of.tell,
        fail=None if node is None else node.fail,
    ):
        if not hears or (of.checkpointing is None and node is None):
            yield None
            return
        with Preemption(StopAgreement(notices), node=node) as preemption:
            yield preemption


@contextmanager
def end_told(of: Training) -> Iterator[None]:
    """Tell the journal of a run's end, and of what ended it."""
    try:
        yield
    except Preempted:
        raise  # the journal says so already
    except SystemExit as leaving:
        step = of.phases.current.step
        of.tell("ended", step=step, error=f"sys.exit({leaving.code!r})")
        is_main = threading.current_thread() is threading.main_thread()
        if leaving.code not in (None, 0) and is_main:
            # The others wait in a step: whoever watches them must see that one left.
            leave_at_once(leaving.code if isinstance(leaving.code, int) else 1)
        raise
    except BaseException as failure:
        of.tell("ended", step=of.phases.current.step, error=_one_line(failure))
        raise
    of.tell("ended", step=of.phases.current.step)


def _one_line(failure: BaseException) -> str:
    words = str(failure).split("\n", 1)[0]
    return f"{type(failure).__name__}: {words}" if words else type(failure).__name__

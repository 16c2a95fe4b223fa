"""Guard a run: against hanging, being killed unsaved, and ending without a word."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from replicator.distributed.leaving import leave_at_once
from replicator.distributed.notices import OwnNotices, open_notices
from replicator.errors import Preempted
from replicator.monitoring.phases import Phases
from replicator.training.node import Node
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
    node: Node | None = None,
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
      node: Of a program, if the run is in one: it says when to stop, in place of
        signals, and is what fails if the run hangs, in place of the process.

    Yields:
      What hears who asks the run to stop; None if it is left alone.
    """
    notices = open_notices() if together else OwnNotices()
    with Watchdog(
        phases,
        limits=limits,
        directory=directory,
        notices=notices,
        tell=tell,
        fail=None if node is None else node.fail,
    ):
        if not saved and node is None:
            yield None
            return
        with Preemption(StopAgreement(notices), node=node) as preemption:
            yield preemption


@contextmanager
def end_told(tell: Callable[..., None], phases: Phases) -> Iterator[None]:
    """Tell of a run's end, and of what ended it.

    Args:
      tell: For example `EventLog.write`.
      phases: What the run is doing.
    """
    try:
        yield
    except Preempted:
        raise  # the journal says so already
    except SystemExit as leaving:
        step = phases.current.step
        tell("ended", step=step, error=f"sys.exit({leaving.code!r})")
        is_main = threading.current_thread() is threading.main_thread()
        if leaving.code not in (None, 0) and is_main:
            # The others wait in a step: whoever watches them must see that one left.
            leave_at_once(leaving.code if isinstance(leaving.code, int) else 1)
        raise
    except BaseException as failure:
        tell("ended", step=phases.current.step, error=_one_line(failure))
        raise
    tell("ended", step=phases.current.step)


def _one_line(failure: BaseException) -> str:
    words = str(failure).split("\n", 1)[0]
    return f"{type(failure).__name__}: {words}" if words else type(failure).__name__

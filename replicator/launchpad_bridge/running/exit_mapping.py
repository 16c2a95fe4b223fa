"""Map the end of a worker for the supervisor: done, a failure, another's failure.

When a node dies, calls to it fail within milliseconds, and each caller has an error of
its own. Which error is observed first is arbitrary; its kind shows which is the cause.
"""

from replicator.distributed.processes.exits import meaning
from replicator.distributed.processes.states import Ended, State
from replicator.distributed.processes.symptoms import is_symptom as says_peer_is_gone
from replicator.errors import (
    CallCancelledError,
    ConnectionLostError,
    NodeFailedError,
    NonFiniteError,
    RemoteError,
    ServerStoppedError,
    SpikeError,
)
from replicator.launchpad_bridge.protocols import Exited

_PEER_IS_GONE = (CallCancelledError, ConnectionLostError, ServerStoppedError)
# A learner goes on bit for bit, also into the same NaN.
_COMES_AGAIN = (NonFiniteError, SpikeError)
# For the stacks that the watchdogs of the others write.
_HUNG_GRACE_S = 5.0
_LONGEST_CHAIN = 32


def ended(
    exited: Exited,
    *,
    is_member: bool = False,
    is_stopping: bool = False,
    is_needed: bool = True,
    stop_grace_s: float = 0.0,
) -> Ended:
    """Return the end of a worker for the supervisor.

    Args:
      exited: Report of its launcher; `Ended.exited` later.
      is_member: Whether it was one of a group that JAX has joined: there a peer's death
        shows in the error text of collectives.
      is_stopping: Whether the run stops: then a preempted worker did as all must.
      is_needed: Whether a worker that the others serve still runs: if none does, all
        results are there, and a worker that is killed loses none.
      stop_grace_s: Seconds that the others of a group may take to end if one was
        preempted: they save together.
    """
    is_preempted = exited.outcome == "preempted"
    looks_killed = exited.outcome == "died" and meaning(exited.code) == "killed"
    is_failed = exited.outcome in ("raised", "died") or (
        is_preempted and not is_stopping
    )
    is_failed = is_failed and (is_needed or not looks_killed)
    grace_s = stop_grace_s if is_preempted else 0.0
    if meaning(exited.code) == "hung":
        grace_s = _HUNG_GRACE_S
    return Ended(
        name=exited.name,
        attempt=exited.attempt,
        outcome="failed" if is_failed else "done",
        text=_describe(exited),
        looks_killed=looks_killed,
        is_symptom=is_symptom(exited.error)
        or (is_member and says_peer_is_gone(_error_lines(exited))),
        comes_again=is_member and _is_from(exited.error, _COMES_AGAIN),
        others_grace_s=grace_s if is_member else 0.0,
        exited=exited,
    )


def first_failure(state: State) -> Ended | None:
    """Return the worker whose collective failed as a peer had ended; None for none.

    In a run that stops calls fail, as servers end before their clients. But members of
    a group end together: if nothing failed, this is why the group did not end well.
    Units that were killed do not count.

    Args:
      state: State of a run that is over.
    """
    ends = [
        end
        for unit in state.units
        if not unit.kills and unit.failure is None
        for end in unit.ends.values()
    ]
    for end in ends:
        of_collective = end.is_symptom and not is_symptom(end.exited.error)
        if end.outcome == "failed" and of_collective:
            return end
    return None


def is_symptom(error: BaseException | None) -> bool:
    """Return whether an error, or a cause of it, means that another node is gone.

    Args:
      error: Error of a node, here or in another process.

    >>> is_symptom(ConnectionLostError("lost")), is_symptom(ValueError())
    (True, False)
    """
    return _is_from(error, _PEER_IS_GONE)


def _error_lines(exited: Exited) -> list[bytes]:
    """Return the lines of the error text of a worker.

    Its output before it raised is about other things; for one that died without an
    error it is the only text.
    """
    error = exited.error
    if exited.outcome == "raised" and isinstance(error, NodeFailedError):
        error = error.__cause__
    return str(error).encode().splitlines()


def _is_from(error: BaseException | None, kinds: tuple[type[Exception], ...]) -> bool:
    """Return whether an error, or a cause of it, is of a kind, here or elsewhere."""
    names = {kind.__name__ for kind in kinds}
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return False
        if isinstance(error, kinds):
            return True
        if isinstance(error, RemoteError) and error.type_name in names:
            return True
        error = error.__cause__
    return False


def _describe(exited: Exited) -> str:
    """Describe in one line how a worker ended: "`actor/2` raised ValueError: …"."""
    error = exited.error
    if isinstance(error, NodeFailedError):
        return _first_line(error)
    if error is not None:
        text = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
        return f"`{exited.name}` raised {text}"
    return f"`{exited.name}` {exited.outcome}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")

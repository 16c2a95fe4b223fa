"""Errors of calls without a result; each names method, server and address."""

from typing import NamedTuple

from replicator.errors import (
    CallTimeoutError,
    ConnectionLostError,
    EncodeError,
    MessageTooLargeError,
    RpcError,
    ServerStoppedError,
)
from replicator.rpc.client.link import Failure
from replicator.rpc.client.retry import TryOutcome


class CallTarget(NamedTuple):
    """Method, server and address of a call, as errors name them.

    >>> str(CallTarget("add", "'counter'", "unix:/run/counter"))
    "`add` of 'counter' at unix:/run/counter"
    """

    method: str
    server: str
    address: str

    def __str__(self) -> str:
        return f"`{self.method}` of {self.server} at {self.address}"


def late(
    edge: CallTarget, failure: Failure, *, waited_s: float, attempts: int
) -> CallTimeoutError:
    """Return the error for a call whose deadline has passed.

    >>> target = CallTarget("add", "'counter'", "unix:/run/counter")
    >>> print(late(target, Failure(TryOutcome.LATE), waited_s=2.0, attempts=1))
    Deadline Exceeded: `add` of 'counter' at unix:/run/counter did not answer within
    2 s. It was not asked yet what it does. Give it longer with `timeout_s`, or look at
    it.
    """
    return CallTimeoutError(
        f"{_LATE} {edge} did not answer within {waited_s:.3g} s{_tries(attempts)}. "
        f"{_what_is_known(failure)} Give it longer with `timeout_s`, or look at it."
    )


def never_ready(
    edge: CallTarget, failure: Failure, *, waited_s: float
) -> CallTimeoutError:
    """Return the error for a call that found no server within its deadline."""
    return CallTimeoutError(
        f"{_LATE} {edge} was not called: no server was ready within {waited_s:.3g} s"
        f"{_because(failure)}. Start it, or pass its address."
    )


def failed(edge: CallTarget, failure: Failure, *, attempts: int) -> RpcError:
    """Return the error for a call that is not tried again."""
    # Whether the call may have run is the first thing that a caller must know.
    tries, why = _tries(attempts), _because(failure)
    match failure.outcome:
        case TryOutcome.UNREACHABLE:
            return ConnectionLostError(
                f"{edge} was not called: failed to connect to all addresses{why}. "
                "Start the server, or wait for it with `wait_for_ready=True`."
            )
        case TryOutcome.REFUSED:
            return ServerStoppedError(
                f"{edge} was not run: the server stops{tries}{why}. Call again."
            )
        case TryOutcome.UNKNOWN:
            return ConnectionLostError(
                f"{edge} may have run: the server lives and knows nothing of the call, "
                f"so it or its reply was lost{tries}. {_MARK}"
            )
        case _:
            return ConnectionLostError(
                f"{edge} may have run: the connection was lost before its reply came"
                f"{tries}{why}. {_MARK}"
            )


def abandoned(edge: CallTarget, ran_s: float) -> ServerStoppedError:
    """Return the error for a call that ran when its server stopped."""
    return ServerStoppedError(
        f"{edge} may have run in part: the server stopped {ran_s:.3g} s after it got "
        f"the call. {_MARK}"
    )


def expired(edge: CallTarget, waited_s: float) -> CallTimeoutError:
    """Return the error for a call that waited too long in the server."""
    return CallTimeoutError(
        f"{_LATE} {edge} was not run: it waited {waited_s:.3g} s in the server. "
        "Give the server a larger `pool_size`, or the call a longer `timeout_s`."
    )


def overran(edge: CallTarget, ran_s: float) -> CallTimeoutError:
    """Return the error for a call whose handler gave up when its deadline passed."""
    return CallTimeoutError(
        f"{_LATE} {edge} did not answer in time: its handler gave up after "
        f"{ran_s:.3g} s, when the deadline had passed. Give it longer with `timeout_s`."
    )


def inherited(address: str) -> RpcError:
    """Return the error for a client that was made before this process was forked."""
    return RpcError(
        f"The client of {address} belongs to the process that this one was forked "
        "from: both would write to one connection. Make a new `Client` here, or start "
        'processes with "spawn".'
    )


def unsendable(
    edge: CallTarget, error: EncodeError | MessageTooLargeError
) -> EncodeError | MessageTooLargeError:
    """Return the error for arguments that cannot be sent, with their names in it."""
    # The body of a call is a list: its second item holds the arguments by position.
    text = str(error).replace("`value[1]", "`args").replace("`value[2]", "`kwargs")
    return type(error)(f"{edge} was not called. {text}")


def unreadable(edge: CallTarget, error: RpcError) -> RpcError:
    """Return the error for a reply that cannot be decoded here."""
    return type(error)(f"{edge} has run, and its reply cannot be read. {error}")


# The text of gRPC, and so of Launchpad: programs match it.
_LATE = "Deadline Exceeded:"
_MARK = "Mark it `idempotent` if it may be run again."


def _tries(attempts: int) -> str:
    return f", {attempts} times" if attempts > 1 else ""


def _because(failure: Failure) -> str:
    return f" ({str(failure.cause).rstrip('.')})" if failure.cause is not None else ""


def _what_is_known(failure: Failure) -> str:
    if failure.silent_s > 0:
        return (
            f"It has given no sign of life for {failure.silent_s:.3g} s: it is "
            "stopped, stuck or cut off."
        )
    if failure.reported is not None:
        what, seconds = failure.reported
        done = "had run for" if what == "runs" else "had waited for a free place for"
        return f"It answers pings, and reported that the call {done} {seconds:.3g} s."
    if failure.cause is not None:
        return f"{failure.cause}"
    return "It was not asked yet what it does."

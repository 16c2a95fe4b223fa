"""Run the handler of one call, and send its result, in the calling thread."""

import logging
import time

from replicator.base.types import PyTree
from replicator.errors import (
    CallCancelledError,
    CallTimeoutError,
    EncodeError,
    MessageTooLargeError,
    RpcError,
)
from replicator.rpc.answers import (
    EXPIRED,
    OVERRAN,
    Answer,
    not_run,
    raised,
    without_attributes,
)
from replicator.rpc.protocols import MessageKind
from replicator.rpc.remote_errors import ErrorInfo, describe_error
from replicator.rpc.server.methods import QUICK_S
from replicator.rpc.server.served_call import ServedCall, running_here
from replicator.rpc.server.service import Service

_REPLY = int(MessageKind.REPLY)
_ERROR = int(MessageKind.ERROR)
# What a handler raises that heeds its deadline, or passes it on to what it calls.
_GAVE_UP = (TimeoutError, CallCancelledError)
_NONE: dict[str, PyTree] = {}
_log = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 30.0
"""Seconds after which a client that does not take a reply is disconnected."""


def run(service: Service, call: ServedCall, started_s: float) -> None:
    """Run a handler, which has a slot; free the slot; send its result."""
    target = call.target
    call.started_s = started_s
    # Of this thread alone; handlers read it by `current_call()`.
    running_here.call = call
    try:
        answer = Answer(_REPLY, target.function(*call.args, **call.kwargs))
    except BaseException as error:  # also one that would end a program
        answer = _answer_to(error, service, call)
    finally:
        running_here.call = None
        call.is_over = True
        # Before the reply is sent: a client that does not take it must hold no slot.
        service.pool.leave()
    try:
        _reply(service, call, answer, time.monotonic() - started_s)
    finally:  # it counts against what its client may have under way
        call.caller.end(call)


def _reply(service: Service, call: ServedCall, answer: Answer, seconds: float) -> None:
    """Send the result of a handler; record how long it took."""
    target = call.target
    # Arrays that lie in shared memory go back to their pool.
    # Before the reply: it may take up to 30 s, and arguments may be gigabytes.
    call.args, call.kwargs = (), _NONE
    if seconds > QUICK_S or not target.is_quick:
        target.took(seconds)
    bytes_out = 0
    # A cancelled call has no one to answer, unless the server itself cancelled it.
    if not call.is_given_up or not service.takes_calls:
        answer, bytes_out = send(call, answer)
    counted = seconds, call.num_bytes, bytes_out, answer.kind == _ERROR
    target.records.add(*counted)
    if (of_caller := service.records_of(call.caller.name)) is not None:
        of_caller.add(*counted)


def _answer_to(error: BaseException, service: Service, call: ServedCall) -> Answer:
    """Return the answer for a handler that raised."""
    now_s = time.monotonic()
    if isinstance(error, _GAVE_UP) and now_s >= call.deadline_s:
        return not_run(OVERRAN, now_s - call.received_s)
    return raised(describe_error(error, registry=service.registry))


def run_if_wanted(service: Service, call: ServedCall) -> None:
    """Run a handler that waited for its slot, if its caller still waits."""
    now_s = time.monotonic()
    is_late = True
    try:
        is_late = call.is_cancelled()
    finally:
        # `_dispatch` took a slot for this call, which `run` gives back where it runs.
        if is_late:
            service.pool.leave()
    if is_late:
        answer_unrun(service, call, not_run(EXPIRED, now_s - call.received_s))
    else:
        run(service, call, now_s)


def send(call: ServedCall, answer: Answer) -> tuple[Answer, int]:
    """Send an answer, or an error in its place; return what was sent, and its bytes."""
    caller = call.caller
    try:
        return answer, caller.connection.send(
            answer.kind, call.call_id, answer.value, timeout_s=REPLY_TIMEOUT_S
        )
    except (EncodeError, MessageTooLargeError) as error:
        answer = _sendable(call, answer, error)
        caller.send(
            MessageKind.ERROR,
            answer.value,
            call_id=call.call_id,
            timeout_s=REPLY_TIMEOUT_S,
        )
        return answer, 0
    except RpcError as error:
        if isinstance(error, CallTimeoutError):
            _log.warning(
                "%s did not take the reply of `%s` for %.0f s: it is disconnected",
                *(caller.connection.peer, call.method, REPLY_TIMEOUT_S),
            )
    # Its socket is closed by now, so the selector would never report its end.
    caller.close()
    return answer, 0


def answer_unrun(service: Service, call: ServedCall, answer: Answer) -> None:
    """Send the reason why a call was not run."""
    if not call.is_given_up:
        send(call, answer)
    call.caller.end(call)
    service.count_refusal()


def _sendable(call: ServedCall, answer: Answer, error: Exception) -> Answer:
    """Return the error to send in place of an answer that cannot be sent."""
    if answer.kind == MessageKind.ERROR:
        return without_attributes(answer)
    names = [cls.__name__ for cls in type(error).__mro__[:-2]]
    text = f"`{call.method}` returned what cannot be sent: {error}"
    return raised(ErrorInfo(names, text))

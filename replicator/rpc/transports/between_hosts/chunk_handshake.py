"""The handshake in the first chunks of a stream: one message of it in each.

A stranger's stream is read no further than the next step needs.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from replicator.errors import AuthenticationError, ConnectionLostError
from replicator.rpc.security.authentication import (
    HANDSHAKE_TIMEOUT_S,
    MESSAGE_BYTES,
    PRESSED_S,
    ClientHandshake,
    ServerHandshake,
)
from replicator.rpc.transports.between_hosts.chunk_queues import Outgoing, start_thread

_LOOK_S = 0.1


def prove_to_server(
    handshake: ClientHandshake,
    stream: Iterator[bytes],
    outgoing: Outgoing,
    *,
    peer: str,
    timeout_s: float,
) -> bytes:
    """Return what came behind the handshake, when both ends have proved the secret.

    Args:
      handshake: New.
      stream: What the server sends; raises EOFError if it was cut off.
      outgoing: Of the stream.
      peer: The server, for errors.
      timeout_s: How long the server may take to answer at all; the rest is quick.

    Raises:
      AuthenticationError: The server refused, or did not prove it.
      ConnectionLostError: It was silent: perhaps stopped, and to be tried again.
      EOFError: The stream ended.
    """
    deadline = time.monotonic() + timeout_s
    try:
        outgoing.put(handshake.hello(), deadline=deadline)
        answer = handshake.answer(_next_of(stream, lambda: deadline))
        deadline = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        outgoing.put(answer, deadline=deadline)
        chunk = _next_of(stream, lambda: deadline)
    except TimeoutError:
        raise ConnectionLostError(_silent(peer)) from None
    handshake.finish(chunk[:MESSAGE_BYTES])
    return chunk[MESSAGE_BYTES:]  # its first messages, if it was quick


def admit_client(
    handshake: ServerHandshake,
    stream: Iterator[bytes],
    outgoing: Outgoing,
    *,
    peer: str,
    deadline: float,
    do_others_wait: Callable[[], bool] = lambda: False,
) -> None:
    """Return when both ends have proved the secret.

    Args:
      handshake: New.
      stream: What the client sends; raises EOFError if it was cut off.
      outgoing: Of the stream.
      peer: The client, for errors.
      deadline: On the monotonic clock.
      do_others_wait: Whether this one has less time, `PRESSED_S`: it may be one of many
        strangers, and those who wait need not be.

    Raises:
      AuthenticationError: The client did not prove it, or was silent; it was told.
      EOFError: The stream ended.
    """
    pressed = min(deadline, time.monotonic() + PRESSED_S)

    def until() -> float:
        return pressed if do_others_wait() else deadline

    try:
        challenge = handshake.challenge(_next_of(stream, until))
        outgoing.put(challenge, deadline=deadline)
        welcome = handshake.verify(_next_of(stream, until))
        outgoing.put(welcome, deadline=deadline)
    except AuthenticationError:
        if handshake.refusal:
            outgoing.put(handshake.refusal, deadline=deadline)
        raise
    except TimeoutError:
        raise AuthenticationError(_silent(peer)) from None


def _next_of(stream: Iterator[bytes], until: Callable[[], float]) -> bytes:
    """Read one chunk, in a thread of its own: a stream has no time limits.

    Who is late leaves that thread behind, until the stream is cut off.
    """
    chunk: Future[bytes | None] = Future()

    def read() -> None:
        try:
            chunk.set_result(next(stream, None))
        except Exception as failure:
            chunk.set_exception(failure)

    start_thread("first", read)
    while True:
        try:
            found = chunk.result(max(min(until() - time.monotonic(), _LOOK_S), 0.0))
        except TimeoutError:
            if time.monotonic() >= until():
                raise
            continue
        if found is None:
            raise EOFError
        return found


def _silent(peer: str) -> str:
    return (
        f"{peer} was silent at the handshake, and was given up. Check that a server of "
        "this program listens there, and is not stopped."
    )

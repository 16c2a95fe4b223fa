"""The handshake in the first chunks of a stream: one message of it in each."""

import time
from collections.abc import Callable

from replicator.errors import AuthenticationError, ConnectionLostError
from replicator.rpc.security.authentication import (
    HANDSHAKE_TIMEOUT_S,
    PRESSED_S,
    ClientHandshake,
    ServerHandshake,
)
from replicator.rpc.transports.between_hosts.chunk_queues import Incoming, Outgoing

_LOOK_S = 0.1


def prove_to_server(
    handshake: ClientHandshake,
    incoming: Incoming,
    outgoing: Outgoing,
    *,
    peer: str,
    timeout_s: float,
) -> None:
    """Return when both ends have proved the secret.

    Args:
      handshake: New handshake.
      incoming: Received chunks of the stream.
      outgoing: Chunks to send on the stream.
      peer: Name of the server, for errors.
      timeout_s: Seconds that the server may take to answer at all; the rest is quick.

    Raises:
      AuthenticationError: The server refused, or did not prove it.
      ConnectionLostError: It was silent: perhaps stopped, and to be tried again.
      ClosedError: The stream ended.
    """
    # The stream's threads move the chunks; this one waits for them with no lock held.
    deadline = time.monotonic() + timeout_s
    outgoing.put(handshake.hello(), deadline=deadline)
    answer = handshake.answer(_of_server(incoming, deadline, peer=peer))
    deadline = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S)
    outgoing.put(answer, deadline=deadline)
    handshake.finish(_of_server(incoming, deadline, peer=peer))


def admit_client(
    handshake: ServerHandshake,
    incoming: Incoming,
    outgoing: Outgoing,
    *,
    peer: str,
    deadline: float,
    do_others_wait: Callable[[], bool] = lambda: False,
) -> None:
    """Return when both ends have proved the secret.

    Args:
      handshake: New handshake.
      incoming: Received chunks of the stream.
      outgoing: Chunks to send on the stream.
      peer: Name of the client, for errors.
      deadline: Time on the monotonic clock.
      do_others_wait: Whether this one has less time, `PRESSED_S`: it may be one of many
        strangers, and those that wait need not be.

    Raises:
      AuthenticationError: The client did not prove it, or was silent; it gets the
        reason.
      ClosedError: The stream ended.
    """
    pressed = min(deadline, time.monotonic() + PRESSED_S)

    def until() -> float:
        return pressed if do_others_wait() else deadline

    try:
        challenge = handshake.challenge(_next_of(incoming, until, peer=peer))
        outgoing.put(challenge, deadline=deadline)
        welcome = handshake.verify(_next_of(incoming, until, peer=peer))
    except AuthenticationError:
        if handshake.refusal:
            outgoing.put(handshake.refusal, deadline=deadline)
        raise
    # It leaves alone: a first message in the same chunk would not be seen.
    outgoing.put_large(iter([welcome]), deadline=deadline)


def _of_server(incoming: Incoming, deadline: float, *, peer: str) -> bytes:
    try:
        return _next_of(incoming, lambda: deadline, peer=peer)
    # A client may try again: a server that is stopped or late is not a stranger.
    except AuthenticationError as silence:
        raise ConnectionLostError(str(silence)) from None


def _next_of(incoming: Incoming, until: Callable[[], float], *, peer: str) -> bytes:
    while True:
        # In short looks: others may arrive meanwhile, and the bound becomes shorter.
        try:
            return incoming.next_chunk(min(until(), time.monotonic() + _LOOK_S))
        except TimeoutError:
            if time.monotonic() < until():
                continue
            raise AuthenticationError(
                f"{peer} was silent at the handshake, and was given up. Check that a "
                "server of this program listens there, and is not stopped."
            ) from None

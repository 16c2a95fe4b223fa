"""Make a connection of a socket: check user and secret, agree on shared memory.

All of it happens within `HANDSHAKE_TIMEOUT_S`, `PRESSED_S` while others wait for their
turn at the server, in messages of fixed size.

    client                                        server
      (both ask the kernel for the other's user: it must be their own)
      hello, answer         ->  <-      challenge, welcome     `authentication.py`
      bytes to share, end of a pair, board  ->
                                 <-     bytes to share, board   0: none
"""

import array
import contextlib
import logging
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Self

from replicator.errors import (
    AuthenticationError,
    ConnectionLostError,
    DecodeError,
    RpcError,
)
from replicator.rpc.security.authentication import (
    HANDSHAKE_TIMEOUT_S,
    MESSAGE_BYTES,
    PRESSED_S,
    ClientHandshake,
    ServerHandshake,
)
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.payloads import Encoding
from replicator.rpc.transports.same_host.sealed_memory import (
    IS_AVAILABLE,
    make_sealed,
    map_sealed,
)
from replicator.rpc.transports.same_host.shared_memory import (
    BOARD_BYTES,
    SharedMemory,
    received_descriptors,
)
from replicator.rpc.transports.same_host.unix_socket import UnixConnection

_log = logging.getLogger(__name__)
_BINDING = "unix"
_SHARING = struct.Struct("<Q")
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_PEER_CREDENTIALS = struct.Struct("3i")
# More than the default keeps a sender of a large message from waiting at each part.
_SEND_BUFFER_BYTES = 1 << 20
_LOOK_S = 0.1


def meet_client(
    sock: socket.socket,
    *,
    address: str,
    secret: Secret,
    encoding: Encoding,
    do_others_wait: Callable[[], bool],
) -> UnixConnection:
    """Let a client prove itself, and prove ourselves; return the connection.

    Args:
      sock: Accepted socket; closed if this fails.
      address: Address of the listener.
      secret: Secret of the program.
      encoding: Encoding of values.
      do_others_wait: Whether this one has less time, `PRESSED_S`.

    Raises:
      AuthenticationError: The client did not prove in time that it belongs here.
      ConnectionLostError: It went away.
    """
    try:
        peer = f"a client of {address}{_process(sock)}"
        # By the kernel, before anything is read: other users cost us nothing.
        _check_same_user(sock, peer)
        handshake = ServerHandshake(secret, binding=_BINDING, peer=peer)
        late, bound_s = AuthenticationError, HANDSHAKE_TIMEOUT_S
        with _Exchange(sock, peer, bound_s, late, do_others_wait) as exchange:
            try:
                exchange.send(handshake.challenge(exchange.receive(MESSAGE_BYTES)))
                exchange.send(handshake.verify(exchange.receive(MESSAGE_BYTES)))
            except AuthenticationError:
                if handshake.refusal:
                    with contextlib.suppress(RpcError):  # it need not wait for it
                        exchange.send(handshake.refusal)
                raise
            shared = _take_offer(exchange, encoding.limits.shared_bytes)
        return _connection(sock, peer, encoding, shared)
    except BaseException:
        sock.close()
        raise


def meet_server(
    sock: socket.socket,
    *,
    address: str,
    secret: Secret,
    encoding: Encoding,
    timeout_s: float,
) -> UnixConnection:
    """Prove ourselves to a server, and let it prove itself; return the connection.

    Args:
      sock: Connected socket; closed if this fails.
      address: Address of the server.
      secret: Secret of the program.
      encoding: Encoding of values.
      timeout_s: Seconds that all of it may take; `HANDSHAKE_TIMEOUT_S` at most.

    Raises:
      AuthenticationError: One end has another secret, or another user.
      ConnectionLostError: The server went away, or did not answer in time.
    """
    try:
        peer = f"{address}{_process(sock)}"
        _check_same_user(sock, peer)
        handshake = ClientHandshake(secret, binding=_BINDING, peer=peer)
        bound_s = min(timeout_s, HANDSHAKE_TIMEOUT_S)
        with _Exchange(sock, peer, bound_s, ConnectionLostError) as exchange:
            exchange.send(handshake.hello())
            exchange.send(handshake.answer(exchange.receive(MESSAGE_BYTES)))
            handshake.finish(exchange.receive(MESSAGE_BYTES))
            shared = _offer(exchange, encoding.limits.shared_bytes)
        return _connection(sock, peer, encoding, shared)
    except BaseException:
        sock.close()
        raise


class _Exchange:
    """Messages of fixed size, within one time for all of them.

    Attributes:
      peer: The other end, for errors.
      descriptors: Received descriptors that this object has to close.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        timeout_s: float,
        late_error: type[AuthenticationError | ConnectionLostError],
        do_others_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self.peer = peer
        self.descriptors: list[int] = []
        self._socket = sock
        self._began_s = time.monotonic()
        self._timeout_s = timeout_s
        self._late_error = late_error
        self._do_others_wait = do_others_wait
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send a message; the socket's buffer is empty, and larger than all of them.

        Descriptors that go with it stay the caller's as well. A peer that has hung up
        may have sent the reason: `receive` returns it, or raises.
        """
        with self._in_time(), contextlib.suppress(BrokenPipeError):
            if descriptors:
                socket.send_fds(self._socket, [message], list(descriptors))
            else:
                self._socket.sendall(message)

    def receive(self, num_bytes: int, *, most_descriptors: int = 0) -> bytes:
        """Return the next message; descriptors that come with it are appended."""
        received = b""
        room = 0  # the kernel closes what comes nevertheless
        if most_descriptors:
            room = socket.CMSG_SPACE(most_descriptors * array.array("i").itemsize)
        while len(received) < num_bytes:
            missing = num_bytes - len(received)
            with self._in_time():
                # In short looks: others may come, and wait.
                while not self._poll.poll(0):
                    self._poll.poll(min(self._left_s(is_theirs=True), _LOOK_S) * 1e3)
                text, ancillary, *_ = self._socket.recvmsg(
                    missing, room, _CLOSE_ON_EXEC
                )
            self.descriptors += received_descriptors(ancillary)
            if not text:
                raise ConnectionLostError(f"{self.peer} left during the handshake.")
            received += text
        return received

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Also those that an attacker sent along: none outlives the handshake.
        while self.descriptors:
            os.close(self.descriptors.pop())

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            self._socket.settimeout(self._left_s())
            yield
        except TimeoutError:
            raise self._late_error(
                f"{self.peer} did not complete the handshake within "
                f"{self._timeout_s:g} s."
            ) from None
        except OSError as error:
            raise ConnectionLostError(f"{self.peer} is gone ({error}).") from error

    def _left_s(self, *, is_theirs: bool = False) -> float:
        # Only a silent client is pressed, not one that waits for a late server.
        is_pressed = is_theirs and self._do_others_wait()
        bound_s = PRESSED_S if is_pressed else self._timeout_s
        left_s = self._began_s + bound_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


def _process(sock: socket.socket) -> str:
    credentials = _credentials(sock)
    return "" if credentials is None else f" (process {credentials[0]})"


def _check_same_user(sock: socket.socket, peer: str) -> None:
    credentials = _credentials(sock)
    if credentials is not None and credentials[1] != os.geteuid():
        raise AuthenticationError(
            f"{peer} must run as this user ({os.geteuid()}), got user {credentials[1]}."
        )


def _credentials(sock: socket.socket) -> tuple[int, int] | None:
    """Return process and user at the other end, where the system reports them."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    # Of the moment at which the socket was connected; a process cannot change them.
    size = _PEER_CREDENTIALS.size
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    process, user, _ = _PEER_CREDENTIALS.unpack(found)
    return process, user


def _offer(exchange: _Exchange, receive_bytes: int) -> SharedMemory | None:
    """Offer a channel for shared memory, and our board, to the server."""
    board = _make_board(exchange, receive_bytes)
    if board is None:
        exchange.send(_SHARING.pack(0))
        exchange.receive(_SHARING.size)
        return None
    # Packets: each carries one segment with its descriptor, and none is read in part.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            message = _SHARING.pack(receive_bytes)
            exchange.send(message, theirs.fileno(), exchange.descriptors[0])
        # More descriptors than that are closed by the kernel.
        message = exchange.receive(_SHARING.size, most_descriptors=1)
        accepted = _SHARING.unpack(message)[0]
        if not accepted or len(exchange.descriptors) != 2:
            ours.close()
            return None
        return _shared(ours, board, receive_bytes, accepted, exchange)
    except BaseException:
        ours.close()
        raise


def _take_offer(exchange: _Exchange, receive_bytes: int) -> SharedMemory | None:
    """Take the channel that a client offers, and send it our board."""
    message = exchange.receive(_SHARING.size, most_descriptors=2)
    offered = _SHARING.unpack(message)[0]
    board = None
    if offered and len(exchange.descriptors) == 2:
        board = _make_board(exchange, receive_bytes)
    if board is None:
        exchange.send(_SHARING.pack(0))
        return None
    channel = _channel(exchange)
    try:
        exchange.send(_SHARING.pack(receive_bytes), exchange.descriptors[0])
        return _shared(channel, board, receive_bytes, offered, exchange)
    except BaseException:
        channel.close()
        raise


def _channel(exchange: _Exchange) -> socket.socket:
    """Return the first descriptor that came, behind our own, as a socket."""
    try:
        channel = socket.socket(fileno=exchange.descriptors[1])
    except OSError as error:
        raise ConnectionLostError(f"{exchange.peer} offered no channel.") from error
    # The socket's from here on: `__exit__` must not close it as well.
    exchange.descriptors.pop(1)
    kind = channel.family, channel.type
    if kind == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        return channel
    channel.close()
    raise ConnectionLostError(f"{exchange.peer} offered another channel: {kind}.")


def _make_board(exchange: _Exchange, receive_bytes: int) -> mmap.mmap | None:
    """Make the page on which this end releases slots; its descriptor comes first.

    None: shared memory is not wanted, or not available.
    """
    if not IS_AVAILABLE or not receive_bytes:
        return None
    try:
        descriptor, board = make_sealed(BOARD_BYTES)
        exchange.descriptors.insert(0, descriptor)
        # Else a write to the board, when memory is short, would end the process.
        os.posix_fallocate(descriptor, 0, BOARD_BYTES)
    except OSError as error:
        _log.warning("Connections do without shared memory: %s.", error)
        return None
    return board


def _shared(
    channel: socket.socket,
    board: mmap.mmap,
    receive_bytes: int,
    peers_bytes: int,
    exchange: _Exchange,
) -> SharedMemory:
    channel.setblocking(True)  # each call passes MSG_DONTWAIT itself
    try:
        # To read only. Size and seals are the kernel's answer, not the peer's.
        peers_board = map_sealed(exchange.descriptors[1], BOARD_BYTES)
    except (DecodeError, OSError) as error:
        raise ConnectionLostError(f"{exchange.peer} cannot share: {error}") from error
    # Closed by the connection. Both boards are mapped, each written by one process.
    return SharedMemory(
        channel,
        board=board,
        peers_board=peers_board,
        send_bytes=min(receive_bytes, peers_bytes),
        receive_bytes=receive_bytes,
        peer=exchange.peer,
    )


def _connection(
    sock: socket.socket,
    peer: str,
    encoding: Encoding,
    shared: SharedMemory | None,
) -> UnixConnection:
    # From here on the connection owns the socket: no other code may close it.
    sock.settimeout(None)  # a timeout would cost a `poll` for each call
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return UnixConnection(sock, peer=peer, encoding=encoding, shared=shared)

"""Process 0's side of the meeting: collect the others, send each the outcome.

One thread and no blocking call but `select`. An outsider can neither stop it nor make
it grow: a connection has 10 s and 1 KiB to prove that it belongs to the run and to name
its process, and there are at most 64 of these, plus one for each missing process. One
that proves nothing gets a refusal, or no answer at all.
"""

import collections
import contextlib
import errno
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator

from replicator.distributed.clusters import Cluster, join_address
from replicator.distributed.meeting.members import (
    Hello,
    Members,
    describe_missing,
    parse_hello,
)
from replicator.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
)
from replicator.rpc.security.authentication import (
    MESSAGE_BYTES,
    ServerHandshake,
    is_hello,
)
from replicator.rpc.security.secret import FILE_VARIABLE, Secret

BINDING = "meeting"
"""Use of these proofs: none of them opens a server of `rpc`, nor the reverse."""
VERDICT_S = 5.0
"""Seconds beyond its own patience that a process waits for the outcome."""

_MAX_LINE = 1024
_MAX_UNIDENTIFIED = 64
_GREETING_S = 10.0


def serve(
    cluster: Cluster,
    *,
    address: str,
    timeout_s: float,
    secret: Secret | None = None,
    has_tls: bool = False,
) -> list[str]:
    """Wait for all processes of the group, then start all of them.

    Args:
      cluster: The group; this is its process 0.
      address: The address to listen on, of this host.
      timeout_s: Longest wait in seconds.
      secret: Secret of the run, which all must prove to know; None for no proof.
      has_tls: Whether this process is going to start JAX with a certificate.

    Returns:
      The host name of each process.

    Raises:
      DistributedTimeoutError: Processes are missing after `timeout_s`; names them.
      DistributedError: The processes do not fit each other, or nothing can listen here.
    """
    members = Members(
        num_processes=cluster.num_processes,
        deadline_s=time.monotonic() + timeout_s,
        has_tls=has_tls,
        hosts={0: socket.gethostname()},
    )
    with _listen(cluster, address) as listener:
        return _Server(listener, members, secret).serve()


@contextlib.contextmanager
def _listen(cluster: Cluster, address: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # For the seconds after a port was last used; two listeners still collide.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, cluster.port))
            listener.listen(1024)
        except OSError as error:
            raise DistributedError(
                _why_not_listening(cluster, address, error)
            ) from error
        listener.setblocking(False)
        yield listener


def _why_not_listening(cluster: Cluster, address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"`coordinator` must be free, got {address}:{cluster.port}, where another "
            "program listens. Choose another port, or end the run that has it."
        )
    return (
        f"`coordinator` must be an address of process 0's own host, got {cluster.host} "
        f"({address}): {error.strerror}. Set REPLICATOR_COORDINATOR_BIND to one."
    )


class _Connection:
    """A connection to process 0.

    Attributes:
      sock: Its socket.
      host: Address at the other end.
      expires_s: Time when it is closed, unless a process has arrived through it.
      handshake: Proof that it belongs to the run; None where none is required.
      unproved: Steps of the handshake that are left.
      unread: Bytes that arrived and are not yet a message.
      process_id: Number of its process, once it has arrived.
    """

    def __init__(self, sock: socket.socket, host: str, secret: Secret | None) -> None:
        self.sock = sock
        self.host = host
        self.expires_s = time.monotonic() + _GREETING_S
        self.handshake = ServerHandshake(secret, binding=BINDING) if secret else None
        self.unproved: list[Callable[[bytes], bytes]] = []
        if self.handshake is not None:
            self.unproved = [self.handshake.challenge, self.handshake.verify]
        self.unread = b""
        self.process_id: int | None = None

    def read(self) -> bool:
        """Read what is there, and answer the handshake; return whether it lives.

        Raises:
          AuthenticationError: It does not prove that it knows the secret.
        """
        try:
            received = self.sock.recv(_MAX_LINE)
            self.unread += received
            while received and self.unproved and len(self.unread) >= MESSAGE_BYTES:
                message = self.unread[:MESSAGE_BYTES]
                self.unread = self.unread[MESSAGE_BYTES:]
                # So few bytes are sent at once, or the other end does not read.
                self.sock.send(self.unproved.pop(0)(message))
        except BlockingIOError:
            return True
        except AuthenticationError:  # one of Python's `OSError`, too
            raise
        except OSError:
            return False
        return bool(received) and len(self.unread) <= _MAX_LINE


class _Server:
    def __init__(
        self, listener: socket.socket, members: Members, secret: Secret | None
    ) -> None:
        self._listener = listener
        self._members = members
        self._secret = secret
        self._address = join_address(*listener.getsockname()[:2])
        self._num_unproved = 0
        self._last_unproved = ""
        self._refusal: str | None = None
        # Used by the one thread that calls `serve`, which also closes it.
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def _connections(self) -> list[_Connection]:
        """All connections, the oldest first."""
        return [key.data for key in self._selector.get_map().values() if key.data]

    @property
    def _unidentified(self) -> list[_Connection]:
        """Connections through which no process has arrived, the oldest first."""
        return [each for each in self._connections if each.process_id is None]

    def serve(self) -> list[str]:
        """Wait for all processes, then answer all of them."""
        with self._selector:
            try:
                self._gather()
            finally:
                # Before the others may go: JAX listens on the same port next.
                self._listener.close()
                self._answer_all()
        if self._refusal:
            raise DistributedError(self._refusal)
        if not self._members.is_complete:
            raise DistributedTimeoutError(self._describe_missing())
        return self._hosts()

    def _hosts(self) -> list[str]:
        return [self._members.hosts[p] for p in range(self._members.num_processes)]

    def _gather(self) -> None:
        while not (self._members.is_complete or self._refusal):
            left_s = self._members.deadline_s - time.monotonic()
            if left_s <= 0:
                return
            ready = [key.data for key, _ in self._selector.select(min(left_s, 1.0))]
            for connection in filter(None, ready):
                self._read(connection)
            if None in ready:  # the listener; after the others: it may drop one of them
                self._accept()
            for connection in self._unidentified:
                if time.monotonic() > connection.expires_s:
                    self._drop(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, address = self._listener.accept()
            unidentified = self._unidentified
            # With a place for each missing process: those that belong here may all
            # come at once, and none of them drops another.
            if len(unidentified) >= _MAX_UNIDENTIFIED + len(self._members.missing):
                self._drop(_first_to_go(unidentified))
            sock.setblocking(False)
            connection = _Connection(sock, address[0], self._secret)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            lives = connection.read()
        except AuthenticationError:
            self._refuse(connection)
            return
        line, ended, _ = connection.unread.partition(b"\n")
        if not lives:
            self._drop(connection)
        elif self._secret is None and is_hello(connection.unread):
            self._refusal = (
                f"`{FILE_VARIABLE}` must name the run's secret in every process, got "
                f"none in process 0 and one at {connection.host}. Give all the same."
            )
        elif ended and not connection.unproved and connection.process_id is None:
            self._enter(connection, parse_hello(line))

    def _refuse(self, connection: _Connection) -> None:
        assert connection.handshake is not None, "only a handshake fails so"
        self._num_unproved += 1
        self._last_unproved = connection.host
        with contextlib.suppress(OSError):
            connection.sock.send(connection.handshake.refusal)
        self._drop(connection)

    def _enter(self, connection: _Connection, hello: Hello | None) -> None:
        if hello is None:
            self._drop(connection)
            return
        entered = self._members.arrive(
            hello, now_s=time.monotonic(), clock_s=time.time()
        )
        if isinstance(entered, str):
            self._refusal = entered
        else:
            self._members = entered
            connection.process_id = hello.process_id

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.process_id is not None:
            self._members = self._members.leave(connection.process_id)

    def _answer_all(self) -> None:
        if self._refusal:
            verdict = {"refused": self._refusal}
        elif self._members.is_complete:
            verdict = {"go": self._hosts()}
        else:
            verdict = {"missing": self._describe_missing()}
        line = json.dumps(verdict).encode() + b"\n"
        for connection in self._connections:
            with contextlib.suppress(OSError), connection.sock as sock:
                # Nothing to a connection that has proved nothing: it could also delay
                # the start by not reading.
                if not connection.unproved:
                    sock.settimeout(VERDICT_S)
                    sock.sendall(line)

    def _describe_missing(self) -> str:
        members = self._members
        here = ", ".join(
            f"{p} (on {host})" for p, host in sorted(members.hosts.items())
        )
        unproved = (
            f" Connections without this run's secret: {self._num_unproved}, the last "
            f"from {self._last_unproved}."
        )
        return (
            f"All processes must come to {self._address} in time, but "
            f"{describe_missing(members.missing, members.num_processes)} did not; here "
            f"are {here}.{unproved if self._num_unproved else ''} See whether they "
            "started, and reach that address."
        )


def _first_to_go(unidentified: list[_Connection]) -> _Connection:
    """Return the oldest that has proved least, of the host with most connections."""
    crowd = collections.Counter(each.host for each in unidentified)
    return max(unidentified, key=lambda each: (len(each.unproved), crowd[each.host]))

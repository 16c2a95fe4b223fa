"""Wait for all processes of a group before JAX starts; name those that are missing.

JAX's own start has a bound too, but ends in an abort that names nobody (after twice its
time, in 0.10 and 0.12). So the processes meet first, on the coordinator's port, over
TCP. If the run has a secret both ends prove that they know it, as connections of `rpc`
do. Then each process sends one line of JSON, and process 0 answers all of them with
one: go, or the error. The wait ends for all with the first process whose time is up.
Then JAX gets the port.

Lines hold a few short fields and no secret: they are not encrypted. Process 0 listens
on the one address of the coordinator's name, never on all interfaces.
"""

import dataclasses
import json
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from replicator.distributed.clusters import Cluster
from replicator.distributed.meeting.members import Hello
from replicator.distributed.meeting.server import BINDING, VERDICT_S, serve
from replicator.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    ReplicatorError,
)
from replicator.rpc.security.authentication import (
    MESSAGE_BYTES,
    ClientHandshake,
    is_refusal,
)
from replicator.rpc.security.secret import FILE_VARIABLE, Secret

_MAX_VERDICT = 1 << 20
_CONNECT_S = 5.0
_RETRY_S = 0.05

_T = TypeVar("_T")


def wait_for_all(
    cluster: Cluster,
    *,
    bind_host: str | None,
    timeout_s: float,
    secret: Secret | None = None,
    has_tls: bool = False,
) -> list[str]:
    """Wait until all processes of the group have arrived.

    Args:
      cluster: The group, and the number of this process.
      bind_host: Host that process 0 listens on; the coordinator's by default.
      timeout_s: Longest wait in seconds.
      secret: Secret of the run, which all prove to know; None for no proof.
      has_tls: Whether this process is going to start JAX with a certificate.

    Returns:
      The host name of each process.

    Raises:
      DistributedTimeoutError: Processes are missing after `timeout_s`; names them.
      DistributedError: The processes do not fit each other, or process 0 cannot listen.
      AuthenticationError: Process 0 has another secret, or this process none.
    """
    if cluster.process_id == 0:
        return serve(
            cluster,
            address=resolve(bind_host or cluster.host),
            timeout_s=timeout_s,
            secret=secret,
            has_tls=has_tls,
        )
    deadline_s = time.monotonic() + timeout_s
    return _Client(cluster, timeout_s, deadline_s, secret, has_tls).wait_for_all()


def resolve(host: str) -> str:
    """Return the address of a host's name, as this host resolves it.

    Raises:
      DistributedError: The name is unknown.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DistributedError(
            f"`coordinator` must name a host, got {host!r}: {error.strerror}. Use an "
            "address, or see to it that the name resolves."
        ) from error
    # IPv4 first: the resolver's order may differ between hosts.
    preferred = [entry for entry in found if entry[0] == socket.AF_INET] or found
    return str(preferred[0][4][0])


@dataclasses.dataclass(frozen=True)
class _Client:
    """Side of every process but 0; attributes as the arguments of `wait_for_all`."""

    cluster: Cluster
    timeout_s: float
    deadline_s: float
    secret: Secret | None
    has_tls: bool

    def wait_for_all(self) -> list[str]:
        """Ask process 0 until it answers, then wait until JAX listens on its port."""
        hosts = self._retry(self._ask)
        # A gRPC connection that is refused retries only after 1 s.
        self._retry(lambda: self._connect().close())
        return hosts

    def _retry(self, attempt: Callable[[], _T]) -> _T:
        problem = "it was never reached"
        while time.monotonic() < self.deadline_s:
            try:
                return attempt()
            except ReplicatorError:  # some of these are of Python's `OSError`, too
                raise
            except OSError as error:
                problem = error.strerror or str(error)
                time.sleep(_RETRY_S)
        raise DistributedTimeoutError(
            f"Process 0 must answer at {self.cluster.coordinator} within "
            f"{self.timeout_s:g} s, but {problem} (asked by process "
            f"{self.cluster.process_id} of {self.cluster.num_processes} on "
            f"{socket.gethostname()}). See whether process 0 started, and whether this "
            "host reaches it."
        )

    def _ask(self) -> list[str]:
        """Return all hosts; raise OSError if process 0 is not there, or went away."""
        with self._connect() as connection:
            if self.secret is not None:
                self._prove(connection, self.secret)
            connection.sendall(self._hello().to_line())
            line = self._read_line(connection)
        match _parse(line):
            case {"go": list(hosts)}:
                return [str(host) for host in hosts]
            case {"missing": str(message)}:
                raise DistributedTimeoutError(message)
            case {"refused": str(message)}:
                raise DistributedError(message)
        raise OSError("another program answers there")

    def _connect(self) -> socket.socket:
        left_s = self.deadline_s - time.monotonic()
        connection = socket.create_connection(
            (self.cluster.host, self.cluster.port),
            timeout=max(0.01, min(left_s, _CONNECT_S)),
        )
        # Where nobody listens, TCP may connect a port of this host to itself.
        if connection.getsockname() == connection.getpeername():
            connection.close()
            raise OSError("nobody listens there")
        return connection

    def _hello(self) -> Hello:
        return Hello(
            process_id=self.cluster.process_id,
            num_processes=self.cluster.num_processes,
            host=socket.gethostname(),
            patience_s=max(0.0, self.deadline_s - time.monotonic()),
            clock_s=time.time(),
            has_tls=self.has_tls,
        )

    def _prove(self, connection: socket.socket, secret: Secret) -> None:
        peer = f"Process 0 at {self.cluster.coordinator}"
        handshake = ClientHandshake(secret, binding=BINDING, peer=peer)
        connection.sendall(handshake.hello())
        connection.sendall(handshake.answer(self._read_message(connection)))
        handshake.finish(self._read_message(connection))

    def _read_message(self, connection: socket.socket) -> bytes:
        received = b""
        while len(received) < MESSAGE_BYTES:
            received += self._read(connection, MESSAGE_BYTES - len(received))
        if received.startswith(b'{"refused"'):
            raise self._secrets_differ("one", "process 0 has none")
        if not received.startswith(b"rpc-"):
            raise OSError("what answers there does not prove this run's secret")
        return received

    def _read_line(self, connection: socket.socket) -> bytes:
        received = b""
        while not received.endswith(b"\n") and len(received) < _MAX_VERDICT:
            received += self._read(connection, 1 << 16)
            if self.secret is None and is_refusal(received):
                raise self._secrets_differ("none", "process 0 asks for it")
        return received

    def _secrets_differ(self, found: str, elsewhere: str) -> AuthenticationError:
        return AuthenticationError(
            f"`{FILE_VARIABLE}` must name the run's secret in every process, got "
            f"{found} in process {self.cluster.process_id}; {elsewhere}. Give all the "
            "same."
        )

    def _read(self, connection: socket.socket, most: int) -> bytes:
        left_s = self.deadline_s + VERDICT_S - time.monotonic()
        connection.settimeout(max(0.01, left_s))
        try:
            received = connection.recv(most)
        except TimeoutError as error:
            raise OSError("it was reached, but does not answer") from error
        if not received:
            raise OSError("it was reached, but went away")
        return received


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None

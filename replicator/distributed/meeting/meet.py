"""Let all processes of a group meet before JAX starts, or say who did not come.

JAX's own start has a bound too, but ends in an abort that names nobody (after twice its
time, in 0.10 and 0.12). So the processes meet first, on the coordinator's port, over
TCP. Where the run has a secret both ends prove that they know it, as connections of
`rpc` do. Then each sends one line of JSON, and process 0 answers all of them with one:
go, or why not. The first that loses patience ends the wait for all. Then JAX gets the
port.

Lines are data of a few short fields, and no secret: they are not encrypted.
Listening is on the one address that the coordinator's name stands for, never on all
interfaces.
"""

import json
import socket
import time

from replicator.distributed.clusters import Cluster
from replicator.distributed.meeting.roster import Hello
from replicator.distributed.meeting.server import BINDING, VERDICT_S, serve
from replicator.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
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


def meet(
    cluster: Cluster,
    *,
    bind_host: str | None,
    timeout_s: float,
    secret: Secret | None = None,
    has_tls: bool = False,
) -> list[str]:
    """Wait until every process of the group has come here.

    Args:
      cluster: The group, and which process this is.
      bind_host: Where process 0 listens; by default the coordinator's host.
      timeout_s: How long to wait.
      secret: What all prove to each other that they know; None to prove nothing.
      has_tls: Whether this process is to start JAX with certificates.

    Returns:
      The host name of each process.

    Raises:
      DistributedTimeoutError: Somebody did not come in time; says who.
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
    return _Guest(cluster, timeout_s, secret, has_tls=has_tls).meet()


def resolve(host: str) -> str:
    """Return the address that a host's name stands for here.

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


class _Guest:
    """The side of every process but 0."""

    def __init__(
        self,
        cluster: Cluster,
        timeout_s: float,
        secret: Secret | None,
        *,
        has_tls: bool,
    ) -> None:
        self._cluster = cluster
        self._secret = secret
        self._has_tls = has_tls
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        # What went wrong last: the reason that an error gives.
        self._trouble = "it was never reached"

    def meet(self) -> list[str]:
        """Ask process 0 until it answers, then wait for JAX to take its port."""
        hosts = None
        while hosts is None:
            self._check_time()
            hosts = self._ask_once()
        while not self._port_answers():
            self._check_time()
        return hosts

    def _check_time(self) -> None:
        if time.monotonic() < self._deadline_s:
            return
        raise DistributedTimeoutError(
            f"Process 0 must answer at {self._cluster.coordinator} within "
            f"{self._timeout_s:g} s, but {self._trouble} (asked by process "
            f"{self._cluster.process_id} of {self._cluster.num_processes} on "
            f"{socket.gethostname()}). See whether process 0 started, and whether this "
            "host reaches it."
        )

    def _ask_once(self) -> list[str] | None:
        """Return all hosts; None if process 0 was not there, or went away."""
        try:
            with self._connect() as connection:
                if self._secret is not None:
                    self._prove(connection, self._secret)
                connection.sendall(self._hello().to_line())
                line = self._read_line(connection)
        except AuthenticationError:  # one of Python's errors of the system, too
            raise
        except OSError as error:
            self._trouble = error.strerror or str(error)
            time.sleep(_RETRY_S)
            return None
        return self._act_on(line)

    def _connect(self) -> socket.socket:
        left_s = self._deadline_s - time.monotonic()
        connection = socket.create_connection(
            (self._cluster.host, self._cluster.port),
            timeout=max(0.01, min(left_s, _CONNECT_S)),
        )
        # Where nobody listens, TCP may connect a port of this host to itself.
        if connection.getsockname() == connection.getpeername():
            connection.close()
            raise OSError("nobody listens there")
        return connection

    def _hello(self) -> Hello:
        return Hello(
            process_id=self._cluster.process_id,
            num_processes=self._cluster.num_processes,
            host=socket.gethostname(),
            patience_s=max(0.0, self._deadline_s - time.monotonic()),
            clock_s=time.time(),
            has_tls=self._has_tls,
        )

    def _prove(self, connection: socket.socket, secret: Secret) -> None:
        peer = f"Process 0 at {self._cluster.coordinator}"
        handshake = ClientHandshake(secret, binding=BINDING, peer=peer)
        connection.sendall(handshake.hello())
        connection.sendall(handshake.answer(self._read_message(connection)))
        handshake.finish(self._read_message(connection))

    def _read_message(self, connection: socket.socket) -> bytes:
        received = b""
        while len(received) < MESSAGE_BYTES:
            received += self._read(connection, MESSAGE_BYTES - len(received))
        if received.startswith(b'{"refused"'):
            raise AuthenticationError(
                f"`{FILE_VARIABLE}` must name the run's secret in every process, got "
                f"one in process {self._cluster.process_id}; process 0 has none. Give "
                "all the same."
            )
        if not received.startswith(b"rpc-"):
            raise OSError("what answers there does not prove this run's secret")
        return received

    def _read_line(self, connection: socket.socket) -> bytes:
        received = b""
        while not received.endswith(b"\n") and len(received) < _MAX_VERDICT:
            received += self._read(connection, 1 << 16)
            if self._secret is None and is_refusal(received):
                raise AuthenticationError(
                    f"`{FILE_VARIABLE}` must name the run's secret in every process, "
                    f"got none in process {self._cluster.process_id}; process 0 asks "
                    "for it. Give all the same."
                )
        return received

    def _read(self, connection: socket.socket, most: int) -> bytes:
        left_s = self._deadline_s + VERDICT_S - time.monotonic()
        connection.settimeout(max(0.01, left_s))
        try:
            received = connection.recv(most)
        except TimeoutError as error:
            raise OSError("it was reached, but says nothing") from error
        if not received:
            raise OSError("it was reached, but went away")
        return received

    def _act_on(self, line: bytes) -> list[str] | None:
        match _parse(line):
            case {"go": list(hosts)}:
                return [str(host) for host in hosts]
            case {"missing": str(message)}:
                raise DistributedTimeoutError(message)
            case {"refused": str(message)}:
                raise DistributedError(message)
        self._trouble = "another program answers there"
        time.sleep(_RETRY_S)
        return None

    def _port_answers(self) -> bool:
        """Return whether JAX's service listens: a refused gRPC retries only in 1 s."""
        try:
            self._connect().close()
        except OSError as error:
            self._trouble = error.strerror or str(error)
            time.sleep(_RETRY_S)
            return False
        return True


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None

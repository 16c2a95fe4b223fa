"""Connections between hosts: one long-lived gRPC stream for each, of chunks of bytes.

gRPC is used for what it is good at: a stream over HTTP/2 with flow control and TLS that
notices dead peers, and a health service that others know how to ask. A message is ours,
above it. So there are no protobufs of ours, no limit of 2 GiB, and no thread of gRPC's
pool is held by a connection: one of our own reads its stream, and one writes it.

Nothing is trusted before the handshake. A stranger costs a chunk of memory, for 2 s at
most (less while others wait); handshakes are few at a time, and counted.
"""

import contextlib
import functools
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2

from replicator.base.host.plain_text import plain
from replicator.errors import ConnectionLostError
from replicator.rpc.security.authentication import (
    HANDSHAKE_TIMEOUT_S,
    ClientHandshake,
    ServerHandshake,
)
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls, check_client
from replicator.rpc.transports.addresses import GrpcAddress
from replicator.rpc.transports.between_hosts.chunk_handshake import (
    admit_client,
    prove_to_server,
)
from replicator.rpc.transports.between_hosts.chunk_queues import (
    ClosedError,
    Incoming,
    Outgoing,
)
from replicator.rpc.transports.between_hosts.chunk_threads import (
    start_reader,
    start_writer,
)
from replicator.rpc.transports.between_hosts.chunked_connection import ChunkedConnection
from replicator.rpc.transports.between_hosts.grpc_options import (
    CLIENT_OPTIONS,
    MAX_CONNECTIONS,
    SERVER_OPTIONS,
)
from replicator.rpc.transports.network_rules import (
    check_free,
    in_use,
    loopback,
    permitted_place,
    readable,
    unreachable,
)
from replicator.rpc.transports.payloads import Encoding

_SERVICE = "replicator.rpc.Connections"
_HEALTH = "grpc.health.v1.Health"
_NAMES = "x509_subject_alternative_name"
_DRAIN_S = 600.0
_LAST_MESSAGES_S = 2.0
_REFUSAL_S = 0.1
_STOP_S = 5.0


def connect_grpc(
    address: str,
    *,
    secret: Secret,
    encoding: Encoding,
    timeout_s: float,
    tls: Tls | None = None,
    insecure: bool = False,
) -> ChunkedConnection:
    """Connect to a server and prove to each other that both belong to the program.

    Args:
      address: `grpc://host:port`.
      secret: Secret of the program.
      encoding: Encoding of values.
      timeout_s: Seconds that the server may take to answer.
      tls: Files of a client; needed for hosts other than this one.
      insecure: Whether to do without TLS for those, too.

    Raises:
      ArgumentError: The address is not one of gRPC, or needs `tls`.
      AuthenticationError: The server did not prove the secret, or refused ours.
      ConnectionLostError: There is no server.
    """
    place = permitted_place(address, has_tls=tls is not None, insecure=insecure)
    channel = _open_channel(place, tls)
    # gRPC's own thread takes from `outgoing`; one of ours reads into `incoming`.
    outgoing, incoming = Outgoing(), Incoming()
    call = channel.stream_stream(f"/{_SERVICE}/Connect")(iter(outgoing.take, None))
    start_reader(_chunks_of(call), incoming, outgoing)

    def cut_off() -> None:
        call.cancel()
        channel.close()

    peer = f"the server at {address}"
    handshake = ClientHandshake(secret, binding=_binding(place, tls), peer=peer)
    try:
        prove_to_server(handshake, incoming, outgoing, peer=peer, timeout_s=timeout_s)
    except BaseException as failure:
        outgoing.abandon()
        incoming.stop()
        cut_off()
        if isinstance(failure, ClosedError):
            raise unreachable(address, incoming.failure) from None
        raise
    return ChunkedConnection(
        peer,
        incoming=incoming,
        outgoing=outgoing,
        encoding=encoding,
        cut_off=cut_off,
        release=channel.close,
    )


class GrpcListener:
    """Listener for streams; see `protocols.Listener`."""

    def __init__(
        self,
        address: str,
        *,
        secret: Secret,
        encoding: Encoding,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> None:
        """Listen for clients that know the secret.

        Args:
          address: `grpc://host:port`; port 0 takes a free one.
          secret: Secret of the program.
          encoding: Encoding of values.
          tls: Files of a server; needed for addresses that other hosts can reach.
          insecure: Whether to do without TLS for those, too.

        Raises:
          ArgumentError: The address is not one of gRPC, or not of this host, or needs
            `tls`.
          AddressInUseError: Another process listens there.
        """
        place = permitted_place(address, has_tls=tls is not None, insecure=insecure)
        self._secret = secret
        self._encoding = encoding
        self._tls = tls
        # Guards `_streams` and `_is_open`. gRPC's locks may be taken inside of it, but
        # gRPC calls `_arrive` and `_leave` with none of its own.
        self._lock = threading.Lock()
        self._streams = 0
        self._is_open = True
        # Filled by gRPC's threads, emptied by `accept` and `close`; None is the end.
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._server = grpc.server(
            ThreadPoolExecutor(2, thread_name_prefix="rpc-grpc-connect"),
            handlers=_methods(self._arrive),
            options=SERVER_OPTIONS,
        )
        self._place = GrpcAddress(place.host, _bind(self._server, place, tls))
        # From here on gRPC's threads call `_arrive`.
        self._server.start()

    @property
    def address(self) -> str:
        """Return the address that a client gives to `connect`."""
        return str(self._place)

    def accept(self) -> Callable[[], ChunkedConnection]:
        """Wait for a peer; see `protocols.Listener`."""
        # With no lock held; `close` puts the end there.
        arrival = self._arrivals.get()
        if arrival is None:
            self._arrivals.put(None)  # for the next call
            raise ConnectionLostError(f"The listener at {self.address} was closed.")
        return functools.partial(self._meet, arrival)

    def close(self) -> None:
        """Stop listening; connections that there are go on, for `_DRAIN_S` at most."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            # A stream that has just ended may have its last messages on the way.
            grace_s = _DRAIN_S if self._streams else _LAST_MESSAGES_S
        # Outside of the lock: to cut a stream off calls `_leave`, which takes it.
        with contextlib.suppress(queue.Empty):
            while arrival := self._arrivals.get_nowait():
                arrival.cut_off()
        self._arrivals.put(None)
        # gRPC leaves a thread behind that waits as long as there are connections, and a
        # process cannot end before it does, unless a daemon thread started it.
        stop = threading.Thread(target=self._server.stop, args=(grace_s,), daemon=True)
        stop.start()
        stop.join(_STOP_S)

    def _arrive(self, arrival: "_Arrival") -> None:
        """Count a new stream, and let it wait; runs in a thread of gRPC."""
        with self._lock:
            if not self._is_open or self._streams >= MAX_CONNECTIONS:
                text = f"no more than {MAX_CONNECTIONS} connections"
                arrival.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            if not arrival.context.add_callback(self._leave):
                return  # it is gone
            # `_leave` waits for the lock, so it does not count before this.
            self._streams += 1
        self._arrivals.put(arrival)

    def _leave(self) -> None:
        # In a thread of gRPC, when a stream is over, however it ended.
        with self._lock:
            self._streams -= 1

    def _meet(self, arrival: "_Arrival") -> ChunkedConnection:
        """Let a peer prove itself; return the connection to it."""
        peer = f"the client at {readable(arrival.context.peer())}"
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        incoming, outgoing = Incoming(), Outgoing()
        handshake = ServerHandshake(
            self._secret, binding=_binding(self._place, self._tls), peer=peer
        )
        try:
            # First: TLS lets in every certificate of the authority, a server's too.
            names: Any = arrival.context.auth_context().get(_NAMES, ())
            check_client(names, peer=peer)
            # Two threads of ours: gRPC's pool of two would be taken by two strangers.
            start_reader(_chunks_of(arrival.requests), incoming, outgoing)
            start_writer(outgoing, arrival.send)
            admit_client(
                *(handshake, incoming, outgoing),
                peer=peer,
                deadline=deadline,
                do_others_wait=lambda: not self._arrivals.empty(),
            )
        except BaseException as failure:
            incoming.stop()
            outgoing.finish()
            # A refusal may leave before the stream is cut; a stranger who does not read
            # has until the end of its handshake.
            left_s = max(deadline - time.monotonic(), _REFUSAL_S)
            if not handshake.refusal or not outgoing.wait_drained(left_s):
                arrival.cut_off()
            if isinstance(failure, ClosedError):
                raise ConnectionLostError(f"{peer} left at the handshake.") from None
            raise
        return ChunkedConnection(
            peer,
            incoming=incoming,
            outgoing=outgoing,
            encoding=self._encoding,
            cut_off=arrival.cut_off,
        )


class _Arrival(NamedTuple):
    """A new stream of a client that nobody knows yet."""

    requests: Iterator[bytes]
    context: grpc.ServicerContext
    send: Callable[[bytes | None], None]

    def cut_off(self) -> None:
        self.context.cancel()


class _Connect:
    """Handler that passes streams on, and keeps no thread of gRPC while they last."""

    # Of grpcio since 1.16; its own health service stands on it, too.
    experimental_non_blocking = True

    def __init__(self, arrive: Callable[[_Arrival], None]) -> None:
        self._arrive = arrive

    def __call__(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        send: Callable[[bytes | None], None],
    ) -> None:
        self._arrive(_Arrival(requests, context, send))


class _Health:
    """Health check, answered in a thread that nothing else can keep busy.

    `Watch` is not offered: strangers could make it hold memory for each of them.
    """

    def __init__(self) -> None:
        self.experimental_thread_pool = ThreadPoolExecutor(
            1, thread_name_prefix="rpc-grpc-health"
        )

    def __call__(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service:
            context.abort(grpc.StatusCode.NOT_FOUND, "ask for the service ''")
        return health_pb2.HealthCheckResponse(status="SERVING")


def _methods(arrive: Callable[[_Arrival], None]) -> list[grpc.GenericRpcHandler]:
    """Return the two methods that gRPC sees; all others it refuses itself."""
    connect = grpc.stream_stream_rpc_method_handler(_Connect(arrive))
    check = grpc.unary_unary_rpc_method_handler(
        _Health(),
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    return [
        grpc.method_handlers_generic_handler(_SERVICE, {"Connect": connect}),
        grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
    ]


def _binding(place: GrpcAddress, tls: Tls | None) -> str:
    """Return the place for which a proof is valid.

    Without TLS the address, on loopback, and the port: a process that listens at
    another cannot relay a client's proof to a server of the same program.
    """
    if tls is not None:
        return "grpc-tls"
    return f"grpc:{loopback(place.host)}:{place.port}"


def _open_channel(place: GrpcAddress, tls: Tls | None) -> grpc.Channel:
    target = str(place).removeprefix("grpc://")
    if tls is None:
        return grpc.insecure_channel(target, options=CLIENT_OPTIONS)
    _check_dates(tls)
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.read_key(), tls.certificate.read_bytes()
    )
    return grpc.secure_channel(target, credentials, options=CLIENT_OPTIONS)


def _bind(server: grpc.Server, place: GrpcAddress, tls: Tls | None) -> int:
    """Bind to the address; return the port."""
    check_free(place.host, place.port, address=str(place))
    target = str(place).removeprefix("grpc://")
    try:
        if tls is None:
            return server.add_insecure_port(target)
        _check_dates(tls)
        pair = (tls.read_key(), tls.certificate.read_bytes())
        credentials = grpc.ssl_server_credentials(
            [pair], root_certificates=tls.ca.read_bytes(), require_client_auth=True
        )
        return server.add_secure_port(target, credentials)
    except RuntimeError as failure:
        raise in_use(place.port, address=str(place)) from failure


def _check_dates(tls: Tls) -> None:
    # Without the package that reads certificates TLS refuses them, with less to read.
    if importlib.util.find_spec("cryptography") is not None:
        from replicator.rpc.security.certificates import check_dates

        check_dates(tls.certificate)


def _chunks_of(stream: Iterator[bytes]) -> Iterator[bytes]:
    """Yield from a gRPC stream; raise an error that people can read."""
    try:
        return (yield from stream)
    except grpc.RpcError as failure:
        details = getattr(failure, "details", lambda: "")()
        failure.__traceback__ = None  # it raises itself: it would hold itself, and us
    raise ConnectionLostError(plain(details or "the stream was cut off"))

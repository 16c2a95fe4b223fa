"""Connections between hosts: one long-lived gRPC stream for each, of chunks of bytes.

gRPC is used for what it is good at, a stream over HTTP/2 that sees dead peers, with
flow control and TLS, and for its health service; a message is ours, above it. So there
are no protobufs of ours, no limit of 2 GiB, and no thread of gRPC's pool is held by a
connection: one of our threads reads it and one writes it.

Nothing is believed before the handshake. A stranger costs, for 2 s at most, a chunk of
memory; strangers are let in a few at a time, and connections are counted.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from replicator.errors import (
    AddressInUseError,
    ArgumentError,
    AuthenticationError,
    ConnectionLostError,
)
from replicator.rpc.authentication import (
    HANDSHAKE_TIMEOUT_S,
    MESSAGE_BYTES,
    ClientHandshake,
    ServerHandshake,
)
from replicator.rpc.message_limits import MessageLimits
from replicator.rpc.registry import Registry
from replicator.rpc.secret import Secret
from replicator.rpc.tls import Tls, role_uri
from replicator.rpc.transports.addresses import GrpcAddress, parse
from replicator.rpc.transports.chunk_queues import (
    CHUNK_BYTES,
    WAITING_CHUNKS,
    ClosedError,
    Incoming,
    Outgoing,
)
from replicator.rpc.transports.chunked_connection import ChunkedConnection
from replicator.rpc.transports.network_rules import check_tls, owner_of_port
from replicator.rpc.transports.receive_buffers import ReceiveBuffers

MAX_CONNECTIONS = 256
MAX_STRANGERS = 16
"""Peers whose handshake is under way; the others wait for their turn."""

_SERVICE = "replicator.rpc.Connections"
_CONNECT = f"/{_SERVICE}/Connect"
_HEALTH = "/grpc.health.v1.Health/Check"
_DRAIN_S = 30.0

_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # A stopped peer is noticed in 4 s: 1.5 without a word, then 2.5 for a ping.
    ("grpc.keepalive_time_ms", 1_500),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.http2.ping_timeout_ms", 2_500),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # What arrives is taken as it is: nothing small unfolds into something large.
    ("grpc.per_message_compression", 0),
    ("grpc.per_message_decompression", 0),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_allowed_incoming_connections", 2 * MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 30_000),
    # Our clients' pings are not an attack.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)
_CLIENT_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # the environment does not choose who sees our calls
    ("grpc.enable_retries", 0),  # what is sent twice is the courier's business
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
)


def connect_grpc(
    address: str | GrpcAddress,
    *,
    secret: Secret,
    registry: Registry,
    limits: MessageLimits,
    timeout_s: float,
    tls: Tls | None = None,
    insecure: bool = False,
) -> ChunkedConnection:
    """Connect to a server and prove to each other that both belong to the program.

    Args:
      address: `grpc://host:port`.
      secret: The program's.
      registry: Types of messages besides the plain ones.
      limits: Of messages.
      timeout_s: For all of it.
      tls: Files of a client; needed for hosts other than this one.
      insecure: Do without TLS for those, too.

    Raises:
      ArgumentError: The address is none of gRPC, or needs `tls`.
      AuthenticationError: The server did not prove the secret, or refused ours.
      ConnectionLostError: There is no server.
    """
    place = _grpc_address(address)
    check_tls(place.host, address=str(place), has_tls=tls is not None, insecure=insecure)
    target = str(place).removeprefix("grpc://")
    channel = _make_channel(target, tls)
    outgoing, incoming = Outgoing(), Incoming()
    call = channel.stream_stream(_CONNECT)(iter(outgoing.take, None))

    def cut_off() -> None:
        call.cancel()
        channel.close()

    peer = f"the server at {place}"
    _start("read", place, lambda: _read(call, incoming, outgoing))
    try:
        handshake = ClientHandshake(secret, binding=_binding(place.port, tls), peer=peer)
        deadline = time.monotonic() + timeout_s
        outgoing.put(handshake.hello(), deadline=deadline)
        answer = handshake.answer(_next_of(incoming, deadline, peer=peer))
        outgoing.put(answer, deadline=deadline)
        handshake.finish(_next_of(incoming, deadline, peer=peer))
    except BaseException as failure:
        outgoing.abandon()
        incoming.stop()
        cut_off()
        if isinstance(failure, ClosedError):
            raise _no_connection(place, incoming.failure) from incoming.failure
        raise
    ...

"""Calls between threads, processes and hosts: fast, exact and safe; see README.md.

>>> from replicator import rpc
>>> class Counter:
...     def add(self, n):
...         return n + 1
>>> with rpc.Server(Counter()) as server, rpc.Client(server.address) as counter:
...     counter.add(2)
3
"""

from replicator.rpc.batching.batching import batched_handler
from replicator.rpc.call_statistics import MethodStatistics, ServerStatistics
from replicator.rpc.client.client import Client, Futures, list_methods, statistics
from replicator.rpc.codec.encoded_once import EncodedOnce
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry, register
from replicator.rpc.security.secret import Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.server.methods import idempotent
from replicator.rpc.server.served_call import cancelled, current_call
from replicator.rpc.server.server import Server
from replicator.rpc.unsent_functions import fill

__all__ = [
    "Client",
    "EncodedOnce",
    "Futures",
    "MessageLimits",
    "MethodStatistics",
    "Registry",
    "Secret",
    "Server",
    "ServerStatistics",
    "Tls",
    "batched_handler",
    "cancelled",
    "current_call",
    "fill",
    "idempotent",
    "list_methods",
    "register",
    "statistics",
]

"""Calls between threads, processes and hosts: fast, exact and safe; see README.md.

>>> from replicator import rpc
>>> class Counter:
...     def add(self, n):
...         return n + 1
>>> with rpc.Server(Counter()) as server, rpc.Client(server.address) as counter:
...     counter.add(2)
3
"""

from replicator.rpc.batching import batched_handler
from replicator.rpc.call_statistics import MethodStatistics, ServerStatistics
from replicator.rpc.client import Client, Futures, list_methods, statistics
from replicator.rpc.message_limits import MessageLimits
from replicator.rpc.methods import idempotent
from replicator.rpc.registry import Registry, register
from replicator.rpc.secret import Secret
from replicator.rpc.served_call import cancelled, current_call
from replicator.rpc.server import Server
from replicator.rpc.tls import Tls

__all__ = [
    "Client",
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
    "idempotent",
    "list_methods",
    "register",
    "statistics",
]

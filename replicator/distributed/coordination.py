"""JAX's coordination service, behind a protocol: only this file uses it directly.

`jax.distributed` starts a small server in process 0, and a client of it in each. Both
are private to JAX (`jax._src.distributed.global_state`; the same in 0.10 and 0.12), and
orbax builds on them likewise.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import jax
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge


class CoordinationClient(Protocol):
    """Part of the service that is used here: a store of strings, and barriers."""

    def key_value_set(
        self, key: str, value: str, allow_overwrite: bool = False
    ) -> None:
        """Store `value` under `key`, for all processes to read."""

    def key_value_dir_get(self, key: str) -> Sequence[tuple[str, str]]:
        """Return all keys below `key`, which ends in a slash, and their values."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Wait until every process waits here; raises in all of them if one fails."""


def coordination_client() -> CoordinationClient | None:
    """Return the client of this process; None if it is alone."""
    return cast("CoordinationClient | None", jax_distributed.global_state.client)


def process_index() -> int:
    """Return the number of this process, without starting a backend."""
    return jax_distributed.global_state.process_id


def process_count() -> int:
    """Return the number of processes in the group, without starting a backend."""
    return jax_distributed.global_state.num_processes


def coordinator_address() -> str:
    """Return `host:port` of the service that this process has joined."""
    return str(jax_distributed.global_state.coordinator_address)


def backend_has_started() -> bool:
    """Return whether JAX uses devices already: then it is too late to join others."""
    return xla_bridge.backends_are_initialized()


ServiceError = jax.errors.JaxRuntimeError
"""Error of the client if a wait times out, or the service is gone."""

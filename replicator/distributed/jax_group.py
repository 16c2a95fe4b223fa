"""Settings of JAX in a group, and groups that JAX itself made.

Two processes of several CPU devices each hang over gloo with more than one step in
flight (jax 0.10, 0.12), unless each step is dispatched when the last has ended and the
pool has threads for all. On other platforms none of this matters.
"""

import contextlib
import os
import secrets

import jax

from replicator.base.host.fake_devices import asked_cpu_devices, size_cpu_pool
from replicator.distributed import coordination
from replicator.distributed.clusters import Cluster
from replicator.distributed.launchers.detection import detect
from replicator.distributed.leaving import leave_at_once_after_an_exception
from replicator.distributed.report_progress import VARIABLE
from replicator.errors import DistributedError, TooLateError

_TOKEN = "replicator/group/"


def configure_cpu() -> None:
    """Configure collectives of CPU devices of several processes so that none hangs.

    Raises:
      TooLateError: JAX uses CPU devices already, with settings under which they hang.
    """
    if not coordination.backend_has_started():
        # Those of the other processes meet in collectives, too.
        size_cpu_pool(max(2, asked_cpu_devices()))
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        return
    # This setting, unlike others, is not an attribute of `jax.config` (0.10 to 0.12).
    at_once = jax.config.read("jax_cpu_enable_async_dispatch")  # pyright: ignore
    if jax.default_backend() == "cpu" and jax.local_device_count() > 1 and at_once:
        raise TooLateError(
            "A group on CPUs must run one step at a time, got JAX that already uses "
            f"{jax.local_device_count()} devices here with steps at once. Call "
            "`replicator.distributed.initialize()` right after JAX's own."
        )


def group_token() -> str:
    """Return a text that all processes of this one's group have, and no other group's.

    It is "" for a process that is alone. Who asks first makes it: nobody waits.
    """
    client = coordination.coordination_client()
    if client is None or coordination.process_count() == 1:
        return ""
    with contextlib.suppress(coordination.ServiceError):  # it is there
        client.key_value_set(f"{_TOKEN}token", secrets.token_hex(8))
    ((_, token),) = client.key_value_dir_get(_TOKEN)
    return token


def require_joined() -> None:
    """Check that this process is in the group, if any, that it was started for.

    Raises:
      DistributedError: `replicator launch`, or the environment, made it one of several,
        and it has not joined them: each of them would do the whole work.
      TooLateError: As in `accept_jax_group`.
    """
    count = os.environ.get("REPLICATOR_NUM_PROCESSES", "1")
    # Set by `replicator launch`, or all of them by hand.
    is_named = os.environ.get(VARIABLE) or all(map(os.environ.get, _OF_A_MEMBER))
    if is_named and count != "1" and coordination.process_count() == 1:
        raise DistributedError(
            "The group must be joined by each process that is named to be of it, got "
            f"one of {count} that is alone. Call "
            "`replicator.distributed.initialize()` at the top of the script."
        )
    accept_jax_group()


_OF_A_MEMBER = (
    *("REPLICATOR_COORDINATOR", "REPLICATOR_NUM_PROCESSES", "REPLICATOR_PROCESS_ID"),
)


def accept_jax_group() -> Cluster | None:
    """Return the group that this process is in by JAX's own `initialize`, if it is.

    Raises:
      TooLateError: JAX uses CPU devices already, with settings under which they hang;
        or its group is of one process, where the environment names more.
    """
    if coordination.coordination_client() is None:
        return None
    if coordination.process_count() == 1:
        _refuse_others()
        return None
    configure_cpu()
    leave_at_once_after_an_exception()
    return Cluster(
        kind="jax",
        coordinator=coordination.coordinator_address(),
        num_processes=coordination.process_count(),
        process_id=coordination.process_index(),
    )


def _refuse_others() -> None:
    named = detect(os.environ)
    if named is not None and named.num_processes > 1:
        raise TooLateError(
            "JAX's own `initialize` must make the group that is in the environment, "
            f"got 1 process where {named.kind} names {named.num_processes}. Call "
            "`replicator.distributed.initialize()` in its place."
        )

"""The place of a worker of Ray Train, which sets no variables.

`JaxTrainer` on GPUs and TPUs joins the workers itself, by JAX's own `initialize`: that
group is accepted (`jax_group.py`). On CPUs, and with another trainer, the first worker
sends the others an address through Ray. Rank, size and address are added to the
variables, under names that no variable has by accident.
"""

import importlib
import sys
import threading
from collections.abc import Mapping
from typing import Any

from replicator.distributed.clusters import join_address
from replicator.distributed.processes.ports import free_port
from replicator.errors import DistributedTimeoutError


def with_ray_train(
    environ: Mapping[str, str], *, timeout_s: float
) -> Mapping[str, str]:
    """Return `environ`, in a worker of Ray Train with its rank, size and address.

    All workers must call it, as all of them call `initialize`.

    Args:
      environ: Environment variables.
      timeout_s: How long to wait for the others.

    Raises:
      DistributedTimeoutError: Another worker did not call it in time.
    """
    # In a worker Ray has imported this module; other processes may not have Ray.
    train = sys.modules.get("ray.train")
    place = None if train is None else _place(train)
    if place is None or place[1] == 1:
        return environ
    rank, size = place
    return {
        **environ,
        "ray.train:world_rank": str(rank),
        "ray.train:world_size": str(size),
        "ray.train:coordinator": _share(rank, timeout_s) or "",
    }


def _place(train: Any) -> tuple[int, int] | None:
    """Return this worker's rank and the number of workers; None in other processes."""
    try:
        context = train.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, DeprecationWarning):  # a driver; a trial of Ray Tune
        return None
    return None if rank is None or size is None else (rank, size)


def _share(rank: int, timeout_s: float) -> str | None:
    """Return the address that process 0 chooses; None if this Ray cannot send it."""
    own = None
    if rank == 0:
        host = sys.modules["ray"].util.get_node_ip_address()
        own = join_address(host, free_port(host))
    received: list[str | None] = []

    def ask() -> None:
        try:
            collective = importlib.import_module("ray.train.collective")
            received.append(collective.broadcast_from_rank_zero(own))
        except (ImportError, RuntimeError):  # an older Ray Train
            received.append(None)

    # In a thread, as Ray's own wait has no bound.
    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    waiting.join(timeout_s)
    if not received:
        raise DistributedTimeoutError(
            f"All workers of Ray Train must call `initialize` within {timeout_s:g} s, "
            f"but not all did (asked by worker {rank}). Call it in each of them."
        )
    return received[0]

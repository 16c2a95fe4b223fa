"""Let two clients run unlike collectives on islands of two processes, in one order.

    python -m benchmarks.controller_order

In a round each client calls its dataflow over both islands twice: one's ops sum twice,
the other's sum and gather. A round fails if a value is wrong, or an op fails; one that
hangs, or loses an island, is the last. `failures` counts those of 400 rounds.
`unordered_failures` counts them with the sequence taken out: each message is a call of
its own, and each process executes what its own connection happens to bring first.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Before JAX starts: the pool of XLA's CPU client needs a thread per device.
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec as P

from replicator import controller
from replicator.controller.islands import island_process, started
from replicator.controller.islands.hosted import HostedIsland
from replicator.controller.islands.local import LocalIsland
from replicator.controller.islands.protocol import IslandMessage
from replicator.controller.islands.remote import RemoteIsland
from replicator.errors import IslandLostError, OpFailedError, RpcError

_ROUNDS = flags.DEFINE_integer("rounds", 400, "Rounds of each half.")
_CALLS = 2
_LIMIT_S = 60.0

Body = Callable[[jax.Array], jax.Array]


class _LastRoundError(BaseException):
    """A round after which there is no other; islands are killed, as by Ctrl-C."""


def run(argv: list[str]) -> None:
    """Count failures with the sequence and without, and print both."""
    del argv
    started_s = time.monotonic()
    with_it = _failures()
    started._MODULE = __spec__.name  # whose `main` is below
    RemoteIsland._send_next = _send_each
    result: dict[str, float] = {"failures": with_it, "unordered_failures": _failures()}
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


def _failures() -> int:
    """Return how many rounds failed."""
    count = 0
    with (
        contextlib.suppress(_LastRoundError),
        ThreadPoolExecutor(2) as pool,
        controller.start(
            islands=2, devices=2, processes=2, lost_after_s=_LIMIT_S
        ) as pw,
        pw.client("alice") as alice,
        pw.client("bob") as bob,
    ):
        flows = [_dataflow(alice, _sum_twice), _dataflow(bob, _sum_and_gather)]
        calls = [_values(1.0), _values(1000.0)]
        wanted = [
            [np.asarray(flow(value)) for value in values]
            for flow, values in zip(flows, calls, strict=True)
        ]
        for _ in range(_ROUNDS.value):
            called = pool.map(_called, flows, calls)
            count += 1
            count -= _is_right(list(called), wanted)
    return count


def _values(scale: float) -> list[np.ndarray]:
    return [np.array([1.0, 2.0], np.float32) * scale * 10**n for n in range(_CALLS)]


def _called(
    flow: Callable[..., controller.Future], values: Sequence[np.ndarray]
) -> list[controller.Future]:
    return [flow(value) for value in values]


def _is_right(
    called: Sequence[Sequence[controller.Future]],
    wanted: Sequence[Sequence[np.ndarray]],
) -> bool:
    """Return whether all values of a round are as those that were computed alone."""
    try:
        return all(
            np.array_equal(future.result(_LIMIT_S), value)
            for futures, values in zip(called, wanted, strict=True)
            for future, value in zip(futures, values, strict=True)
        )
    except (TimeoutError, IslandLostError) as error:
        raise _LastRoundError from error
    except OpFailedError:
        return False


def _dataflow(
    client: controller.DataflowClient, body: Body
) -> Callable[..., controller.Future]:
    """Return a dataflow of an op on each island."""
    ops = []
    for name in ("island0", "island1"):
        at = client.slice(2, island=name)
        spread = jax.shard_map(
            body, mesh=at.mesh, in_specs=P("devices"), out_specs=P("devices")
        )
        op = client.fn(
            lambda x, spread=spread: spread(x),
            at,
            in_specs=P("devices"),
            out_specs=P("devices"),
        )
        ops.append(op)
    return client.program(lambda x: ops[1](ops[0](x)))


def _sum_twice(x: jax.Array) -> jax.Array:
    return jax.lax.psum(jax.lax.psum(x, "devices") + x, "devices") + x


def _sum_and_gather(x: jax.Array) -> jax.Array:
    total = jax.lax.psum(x, "devices")
    return jax.lax.all_gather(total + x, "devices").sum(0) + x


# What takes the sequence out: in the controller, and in the process of an island.


def _send_each(self: RemoteIsland, number: int) -> bool:
    """Send what is next in a call of its own, without waiting for the one before."""
    item = self._outbox.get()
    if item is None:
        with contextlib.suppress(RpcError):  # it was killed
            self._client.call("leave", (self._session,))
        return False
    data = self._data(item)
    if len(data) > 1:  # orders that the island does not know, before all that need them
        self._client.call("take", (self._session, number, data))
    else:
        self._client.futures.take(self._session, number, data)
    return True


def main() -> None:
    """Serve an island that executes messages in the order of their arrival."""
    taking, arrived = threading.Lock(), itertools.count()
    take, submit = HostedIsland.take, LocalIsland.submit

    def take_any(self: HostedIsland, number: int, items: Sequence[Any]) -> None:
        with taking:
            self._next = number
            take(self, number, items)

    def submit_any(self: LocalIsland, message: IslandMessage) -> None:
        submit(self, dataclasses.replace(message, number=next(arrived)))

    HostedIsland.take = take_any
    LocalIsland.submit = submit_any
    island_process.main()


if __name__ == "__main__":
    app.run(run)

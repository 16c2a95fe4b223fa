"""Kill or stop islands at random moments, and look at what goes on, and how soon.

    python -m benchmarks.controller_recovery

Three islands of this host: on one a state is trained, on one copies of it are kept, on
one a bystander computes, as a client in a thread of its own. In each round a random one
gets SIGKILL or SIGSTOP at a random moment. Who trains goes back to the newest copy (or
makes a new one), the bystander starts again if it was hit, and only then: else it may
see no error. `failures` counts rounds in which one of them does not end, sees an error
that is not its own, or ends with other bits than undisturbed.

`spare_s` and `cold_s` are the seconds from SIGKILL to the end of the next op on a slice
of that island, where a warm process is kept and where one is started; `stopped_s` those
from SIGSTOP, with a warm one. An island is lost after 4 s of silence here
(`lost_after_s`). Medians of rounds.
"""

import itertools
import json
import os
import random
import select
import signal
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

# Before JAX starts: the pool of XLA's CPU client needs a thread per device.
os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec as P

from experiments.programs.recover import Training, process_id, train
from replicator import controller
from replicator.errors import IslandLostError

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Islands that are killed or stopped.")
_SEED = flags.DEFINE_integer("seed", 0, "Of islands and moments.")
_KINDS = (
    ("spare_s", 1, signal.SIGKILL),
    ("cold_s", 0, signal.SIGKILL),
    ("stopped_s", 1, signal.SIGSTOP),
)
_LOST_AFTER_S = 4.0
_DEADLINE_S = 120.0
_STEPS, _EVERY, _OP_S = 60, 5, 0.005
_MOMENT_S = 0.4  # about what a round takes
_VALUE = np.linspace(0.1, 1.0, 32, dtype=np.float32).reshape(4, 8)


def main(argv: list[str]) -> None:
    """Lose islands, and print what became of the rest."""
    del argv
    started_s = time.monotonic()
    chance, failures = random.Random(_SEED.value), 0
    seconds: dict[str, list[float]] = {key: [] for key, _, _ in _KINDS}
    with _islands(1) as warm, _islands(0) as cold:
        homes = {1: _Homes(warm), 0: _Homes(cold)}
        wanted = homes[1].run(lambda: 0.0)[:2]
        for key, spares, sent in itertools.islice(
            itertools.cycle(_KINDS), _ROUNDS.value
        ):
            there, victim = homes[spares], chance.randrange(3)
            moment_s = chance.uniform(0.0, _MOMENT_S)
            there.wait_for_spares(spares)
            *found, took_s = there.run(
                lambda there=there, victim=victim, sent=sent, moment_s=moment_s: (
                    there.lose(victim, sent, moment_s)
                ),
                victim,
            )
            print(json.dumps({key: took_s, "island": victim, "at_s": moment_s}))
            if found != wanted:
                failures += 1
                print("  FAILED:", found, flush=True)
            else:
                seconds[key].append(took_s)
    result = {
        "failures": failures,
        **{key: round(statistics.median(each), 2) for key, each in seconds.items()},
        "lost_after_s": _LOST_AFTER_S,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(result))


def _islands(spares: int) -> controller.Controller:
    # Islands of several processes: one of these three is to be one.
    return controller.start(
        islands=3, devices=2, spares=spares, lost_after_s=_LOST_AFTER_S
    )


class _Homes:
    """The three slices of a controller, and what runs on them."""

    def __init__(self, pw: controller.Controller) -> None:
        self._pw = pw
        self._slices = [pw.slice(2, island=f"island{n}") for n in range(3)]
        self._whose = [pw.fn(process_id, each) for each in self._slices]
        self._probes = [pw.fn(lambda x: x + 1.0, each) for each in self._slices]
        self._client = pw.client("bystander")
        self._bystander = self._client.fn(_step(self._slices[2]), self._slices[2])

    def wait_for_spares(self, count: int) -> None:
        """Wait until what was taken is replaced."""
        until_s = time.monotonic() + _DEADLINE_S
        while len(self._pw._moves._pool.spares) < count and time.monotonic() < until_s:
            time.sleep(0.05)

    def run(self, disturb: Callable[[], float], victim: int = -1) -> list[Any]:
        """Train, and compute beside it; return the bits of both, or what went wrong.

        Args:
          disturb: Runs beside them; what it returns comes last.
          victim: Number of the slice whose island it may lose.
        """
        whats = [self._train, lambda: self._compute(victim == 2), disturb]
        ended: list[Any] = [f"nothing within {_DEADLINE_S} s"] * len(whats)

        def work(number: int) -> None:
            try:
                ended[number] = whats[number]()
            except Exception as error:
                ended[number] = f"{type(error).__name__}: {error}"

        threads = [
            threading.Thread(target=work, args=(n,), daemon=True)
            for n in range(len(whats))
        ]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + _DEADLINE_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return ended

    def lose(self, victim: int, sent: int, moment_s: float) -> float:
        """Send a signal to an island; return when the next op on its slice ends.

        Args:
          victim: Number of the slice.
          sent: The signal.
          moment_s: Seconds to wait before.
        """
        value = np.ones(2, np.float32)
        self._probes[victim](value).result(_DEADLINE_S)
        island = int(self._whose[victim](np.int32(0)))
        time.sleep(moment_s)
        lost_s = time.perf_counter()
        _signalled(island, sent)
        while True:
            try:
                self._probes[victim](value).result(_DEADLINE_S)
                return round(time.perf_counter() - lost_s, 3)
            except IslandLostError:
                time.sleep(0.001)

    def _train(self) -> list[float]:
        learner, keeper = self._slices[:2]
        step = _step(learner)
        training = Training(
            step=lambda state, batch: {
                "x": step(state["x"]) + batch,
                "step": state["step"] + 1,
            },
            state={"x": _VALUE, "step": np.int32(0)},
            batch=lambda number: np.float32(number % 7),
            steps=_STEPS,
            every=_EVERY,
        )
        state, _ = train(self._pw, training, learner, keeper)
        return np.asarray(state["x"]).tolist()

    def _compute(self, may_fail: bool) -> list[float]:
        while True:
            try:
                value = _VALUE
                for _ in range(_STEPS):
                    value = self._bystander(value)
                return np.asarray(value).tolist()
            except IslandLostError:
                if not may_fail:
                    raise


def _step(on: controller.Slice) -> Callable[[jax.Array], jax.Array]:
    """Return a step that takes a while, with a collective over the slice's devices."""

    def slept(x: np.ndarray) -> np.ndarray:
        time.sleep(_OP_S)
        return np.asarray(x)

    def step(x: jax.Array) -> jax.Array:
        x = jax.pure_callback(slept, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.tanh(x + jax.lax.psum(x.sum(), "devices"))

    rows = P("devices")
    return jax.shard_map(step, mesh=on.mesh, in_specs=rows, out_specs=rows)


def _signalled(process: int, sent: int) -> None:
    """Send a signal to a process; return when it has ended, or is stopped."""
    watched = os.pidfd_open(process)
    signal.pidfd_send_signal(watched, sent)
    if sent == signal.SIGKILL:
        select.select([watched], [], [], _DEADLINE_S)
    else:
        while _state_of(process) != "T":
            time.sleep(0.001)
    os.close(watched)


def _state_of(process: int) -> str:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


if __name__ == "__main__":
    app.run(main)

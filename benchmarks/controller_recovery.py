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
from SIGSTOP, with a warm one; `group_s` and `group_stopped_s` those from a signal to
one process of an island of two. An island is lost after 4 s of silence here
(`lost_after_s`). Medians of rounds.
"""

import dataclasses
import functools
import itertools
import json
import os
import random
import select
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
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
_GROUPS = flags.DEFINE_boolean("groups", True, "Islands of two processes, too.")
_SEED = flags.DEFINE_integer("seed", 0, "Of islands and moments.")
_LOST_AFTER_S = 4.0
_DEADLINE_S = 120.0
_STEPS, _EVERY, _OP_S = 60, 5, 0.005
_MOMENT_S = 0.4  # about what a round takes
_VALUE = np.linspace(0.1, 1.0, 32, dtype=np.float32).reshape(4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Phase:
    """Islands of which some are lost.

    Attributes:
      processes: Number of processes of each.
      spares: Number of islands that are kept warm.
      kinds: In turn, the key of what is measured, and the signal.
    """

    processes: int
    spares: int
    kinds: Sequence[tuple[str, int]]


_PHASES = (
    _Phase(
        processes=1,
        spares=1,
        kinds=(("spare_s", signal.SIGKILL), ("stopped_s", signal.SIGSTOP)),
    ),
    _Phase(processes=1, spares=0, kinds=[("cold_s", signal.SIGKILL)]),
    _Phase(
        processes=2,
        spares=1,
        kinds=(("group_s", signal.SIGKILL), ("group_stopped_s", signal.SIGSTOP)),
    ),
)


def main(argv: list[str]) -> None:
    """Lose islands, and print what became of the rest."""
    del argv
    started_s = time.monotonic()
    chance, failures = random.Random(_SEED.value), 0
    seconds: dict[str, list[float]] = {}
    phases = _PHASES if _GROUPS.value else _PHASES[:-1]
    for phase, count in zip(phases, _shares(phases, _ROUNDS.value), strict=True):
        with controller.start(
            islands=3,
            devices=2,
            processes=phase.processes,
            spares=phase.spares,
            lost_after_s=_LOST_AFTER_S,
        ) as pw:
            there = _Homes(pw)
            wanted = there.undisturbed()
            for key, sent in itertools.islice(itertools.cycle(phase.kinds), count):
                there.wait_for_spares(phase.spares)
                victim, at_s = chance.randrange(3), chance.uniform(0.0, _MOMENT_S)
                process = chance.randrange(phase.processes)
                lose = functools.partial(there.lose, victim, process, sent, at_s)
                *found, took_s = there.run(lose, victim)
                about = {"island": victim, "process": process, "at_s": round(at_s, 3)}
                print(json.dumps({key: took_s, **about}), flush=True)
                if found == wanted and isinstance(took_s, float):
                    seconds.setdefault(key, []).append(took_s)
                else:
                    failures += 1
                    print(f"  FAILED: {found}", flush=True)
    result = {
        "failures": failures,
        **{key: round(statistics.median(each), 2) for key, each in seconds.items()},
        "lost_after_s": _LOST_AFTER_S,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(result))


def _shares(phases: Sequence[_Phase], rounds: int) -> list[int]:
    """Return the rounds of each phase, by how many kinds it has."""
    kinds = sum(len(phase.kinds) for phase in phases)
    later = [max(1, rounds * len(phase.kinds) // kinds) for phase in phases[1:]]
    return [rounds - sum(later), *later]


class _Homes:
    """The three slices of a controller, and what runs on them."""

    def __init__(self, pw: controller.Controller) -> None:
        self._pw = pw
        self._slices = [pw.slice(2, island=f"island{n}") for n in range(3)]
        self._whose = [pw.fn(_on_each(process_id, on), on) for on in self._slices]
        self._probes = [pw.fn(lambda x: x + 1.0, each) for each in self._slices]
        self._client = pw.client("bystander")
        self._bystander = self._client.fn(_step(self._slices[2]), self._slices[2])

    def wait_for_spares(self, count: int) -> None:
        """Wait until what was taken is replaced."""
        until_s = time.monotonic() + _DEADLINE_S
        while len(self._pw._moves._pool.spares) < count and time.monotonic() < until_s:
            time.sleep(0.05)

    def undisturbed(self) -> list[Any]:
        """Return the bits of both where nothing is lost.

        Raises:
          RuntimeError: One of them does not end.
        """
        found = self.run(lambda: 0.0)[:2]
        if not all(isinstance(each, list) for each in found):
            raise RuntimeError(f"undisturbed, too: {found}")
        return found

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

    def lose(self, victim: int, process: int, sent: int, moment_s: float) -> float:
        """Send a signal to an island; return when the next op on its slice ends.

        Args:
          victim: Number of the slice.
          process: Number of the process of its island.
          sent: The signal.
          moment_s: Seconds to wait before.
        """
        value = np.ones(2, np.float32)
        self._probes[victim](value).result(_DEADLINE_S)
        island = int(self._whose[victim](np.zeros(2, np.int32))[process])
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
                "x": step(state["x"] + batch),
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
        # Each bit of what it takes matters in the end.
        return jnp.sin(3.0 * x + jax.lax.psum(x.sum(), "devices"))

    return _on_each(step, on)


def _on_each(
    f: Callable[[jax.Array], jax.Array], on: controller.Slice
) -> Callable[[jax.Array], jax.Array]:
    """Return a function whose rows are those of each device of a slice."""
    rows = P("devices")
    return jax.shard_map(f, mesh=on.mesh, in_specs=rows, out_specs=rows)


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

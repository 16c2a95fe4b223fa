"""Save to and restore from a bucket that disturbs requests: equal bits or an error.

Each round opens a store in a bucket (moto's S3), takes over from the writer before,
saves a state of its own, and restores. A share of all requests, drawn for the round, is
disturbed at random: 400 (a token that has expired), 409, 429, 500, 503, an answer that
is lost, cut, or late and then none, a list of long ago. In some rounds the bucket fails
to the end from some request on. What a store then gives must be the bits of a save, of
the newest that returned or one begun after it; or an error of ours.

`failures` counts what was something else, `named` errors of ours, `disturbed` requests.
"""

import json
import logging
import random
import sys
from collections.abc import Callable

import numpy as np
from absl import app, flags

from benchmarks.runs.faulty_buckets import (
    BUCKET,
    ENVIRONMENT,
    Fault,
    FaultyProxy,
    environment,
    serving_s3,
)
from replicator.base.host.clock import SystemClock
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.pieces import stored_state
from replicator.checkpoint.retention import Retention
from replicator.errors import CheckpointError, CheckpointInUseError

_ROUNDS = flags.DEFINE_integer("rounds", 50, "Saves, each followed by a restore.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the faults.")
_PASSING: tuple[Fault, ...]
_PASSING = "400", "409", "429", "500", "503", "lost", "cut", "silence"
_TIMEOUT_S = 20.0
_OUTAGES = 0.1  # share of rounds that the bucket fails to the end of
_NAMED = (CheckpointError, CheckpointInUseError, TimeoutError)


class Disturbance:
    """Faults of one round, by chance.

    Attributes:
      count: Requests that were disturbed.

    Args:
      rng: Where chance comes from.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._share = rng.uniform(0, 0.3)
        is_outage = rng.random() < _OUTAGES
        self._up = rng.randrange(60) if is_outage else sys.maxsize
        self.count = 0

    def __call__(self, method: str, path: str) -> Fault | None:
        """Return the fault of a request, or None."""
        self._up -= 1
        fault: Fault | None = None
        if self._up < 0:
            fault = "503"
        elif "list-type" in path and self._rng.random() < self._share / 2:
            fault = "stale"
        elif self._rng.random() < self._share:
            fault = self._rng.choice(_PASSING)
        self.count += fault is not None
        return fault


class Rounds:
    """Saves and restores of one directory, and what they gave."""

    def __init__(self) -> None:
        self.failures = self.named = 0
        self.returned = self.begun = 0  # newest steps

    def attempt(self, what: str, action: Callable[[], None]) -> None:
        """Do something that may end by an error of ours alone."""
        try:
            action()
        except _NAMED as error:
            self.named += 1
            print(f"  {what}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        except Exception as error:
            self.fail(f"{what}: {error!r}")

    def fail(self, problem: str) -> None:
        """Count a failure, and print it."""
        self.failures += 1
        print(f"  FAILED: {problem}", flush=True)

    def save(self, store: CheckpointStore) -> None:
        """Save the next step."""
        self.begun += 1
        store.save(Snapshot(step=self.begun, arrays=state_of(self.begun)))
        self.returned = self.begun

    def restore(self, store: CheckpointStore) -> None:
        """Restore the newest, and compare its bits with those of its step."""
        found = store.restore(state_of(0))
        step = 0 if found is None else found.step
        if not self.returned <= step <= self.begun:
            self.fail(f"step {step}, not {self.returned} to {self.begun}")
        elif found is not None and not same_bits(found.arrays, state_of(step)):
            self.fail(f"other bits than those of step {step}")


def state_of(step: int) -> dict[str, np.ndarray]:
    """Return a state of several shards, which differs from step to step."""
    rng = np.random.default_rng(step)
    return {
        "large": rng.standard_normal((1500, 1000), np.float32),
        "small": rng.integers(0, 100, 50),
    }


def same_bits(found: dict, wanted: dict) -> bool:
    """Return whether two states are equal."""
    return all(np.array_equal(found[name], wanted[name]) for name in wanted)


def one_round(rounds: Rounds, proxy: FaultyProxy, disturb: Disturbance) -> None:
    """Open a store as a new process would, restore, save, restore."""
    store = CheckpointStore(
        f"s3://{BUCKET}/run", timeout_s=_TIMEOUT_S, retention=Retention(keep_last=2)
    )
    proxy.disturb = disturb

    def work() -> None:
        with store:
            rounds.attempt("restore", lambda: rounds.restore(store))
            rounds.attempt("save", lambda: rounds.save(store))
            rounds.attempt("restore", lambda: rounds.restore(store))

    rounds.attempt("open", work)
    # What is left behind must be whole, for who reads it in peace.
    proxy.disturb = lambda method, path: None
    reader = CheckpointStore(f"s3://{BUCKET}/run")
    if rounds.returned:
        rounds.restore(reader)


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("replicator").setLevel(logging.CRITICAL)
    stored_state.LIMIT_S = _TIMEOUT_S / 5  # as other requests of such a store
    clock, rng = SystemClock(), random.Random(_SEED.value)
    begun_s, rounds, disturbed, requests = clock.now_s(), Rounds(), 0, 0
    with serving_s3() as proxy:
        proxy.silence_s = 1.0
        with environment(**ENVIRONMENT, AWS_ENDPOINT_URL=proxy.url):
            for number in range(_ROUNDS.value):
                disturb = Disturbance(random.Random(rng.random()))
                one_round(rounds, proxy, disturb)
                disturbed += disturb.count
                print(f"round {number}: {disturb.count} disturbed", flush=True)
            requests = len(proxy.requests)
    result = {
        "failures": rounds.failures,
        "rounds": _ROUNDS.value,
        "named": rounds.named,
        "disturbed": disturbed,
        "requests": requests,
        "seconds": round(clock.now_s() - begun_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

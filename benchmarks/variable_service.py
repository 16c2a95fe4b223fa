"""Compare variables that are encoded once per version with those encoded per actor.

Sixteen actors, each a process, pull 4 MiB of parameters in 20 arrays from one learner
on this host, as fast as they can; after each sixteen pulls there is a new version. Both
ways take turns, at the same server. They do so twice: actors that look at nothing, and
actors that copy what they got, as putting it on a device does.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Sequence

import numpy as np
from absl import app, flags

from benchmarks.rpc.processes import Child, started
from benchmarks.timing import ratio, time_rounds
from benchmarks.variable_peers import ACTORS, BYTES
from replicator.rpc.client.client import Client

_ROUNDS = flags.DEFINE_integer("variable_rounds", 9, "Interleaved blocks of each.")
_PULLS = flags.DEFINE_integer("variable_pulls", 32, "Of each actor in one block.")

_PEERS = "benchmarks.variable_peers"
_WAYS = ("plain", "encoded")


def pull(
    actors: Sequence[Child], processor_s: Callable[[], float], order: str
) -> tuple[float, float]:
    """Have all actors pull; return the processor seconds of learner and of actors."""
    before_s = processor_s()
    for actor in actors:
        actor.tell(order)
    used_s = sum(float(actor.read_line()) for actor in actors)
    return processor_s() - before_s, used_s


def main(argv: list[str]) -> None:
    del argv
    pulls = _PULLS.value * ACTORS
    used: dict[str, list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(started(_PEERS, "learner"))
        address = learner.read_line()
        actors = [
            stack.enter_context(started(_PEERS, "actor", address))
            for _ in range(ACTORS)
        ]
        for actor in actors:
            actor.read_line()
        client = stack.enter_context(Client(address))

        def block(name: str, order: str) -> None:
            used.setdefault(name, []).append(pull(actors, client.processor_s, order))

        blocks = {
            f"{way}{' copied' * copies}": f"pull_{way} {_PULLS.value} {copies}"
            for copies in (0, 1)
            for way in _WAYS
        }
        times_s = time_rounds(
            {n: functools.partial(block, n, order) for n, order in blocks.items()},
            rounds=_ROUNDS.value,
        )
    result = {}
    for kind in ("", " copied"):
        speedup = ratio(times_s[f"plain{kind}"], times_s[f"encoded{kind}"])
        key = f"{kind.strip()}_speedup".lstrip("_")
        print(f"pulls{kind}: encoded once is {speedup} times as fast")
        result[key] = round(speedup.median, 2)
        result[f"{key}_low"] = round(speedup.low, 2)
    for name in blocks:
        rate = pulls / float(np.median(times_s[name]))
        learner_us, actor_us = 1e6 * np.median(used[name][1:], axis=0) / pulls
        key = name.replace(" ", "_")
        result[f"{key}_per_s"] = round(rate)
        result[f"{key}_learner_us"] = round(float(learner_us), 1)
        result[f"{key}_actor_us"] = round(float(actor_us), 1)
        print(f"{name}: {rate:,.0f} pulls/s, {rate * BYTES / 1e9:.1f} GB/s")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

"""Does the filter keep the best, do choices flip where they must, and how fast?

Machines that are not there have sixteen devices; steps are compiled for as many fake
ones, and nothing of them runs. `pruned_best`: of twelve machines those where, for one
of three models, the candidates that were compiled lack the one that the cost model
would choose if all were. `flips`: of eight pairs of cases those where both choices are
right. `seconds`: time of `replicator.choose` for the character-level transformer of
`experiments/char_lm.py`, on eight fake devices, with eight trials.
"""

import functools
import json
import time

import jax
import numpy as np
from absl import app, flags

import replicator
from benchmarks.choose.flips import FEW, LOOKUPS, MANY, flips, is_right
from benchmarks.choose.machines import machines
from benchmarks.choose.searches import Case, exhaustive_best_s, search
from experiments import char_lm
from experiments.language.training import batch_shapes, make_training, unread
from models.transformer import TENSOR_PARALLEL
from replicator.strategies import Machine

_ROUNDING = 1 + 1e-9
_TINY = flags.DEFINE_bool("tiny", False, "One machine, one pair, one trial.")
_ONLY = flags.DEFINE_enum(
    "only", None, ["pruned_best", "flips", "seconds"], "Measure this alone."
)


def loses_best(name: str, machine: Machine) -> bool:
    """Return whether the filter threw the best away, for any model; print it."""
    for model in (FEW, MANY, LOOKUPS):
        case = Case(model=model, machine=machine)
        found = search(case)
        [chosen] = found.all_of("chosen")
        compiled = sum(bool(each.program) for each in found.candidates)
        best_s = exhaustive_best_s(case)
        of = f"{compiled} of {len(found.candidates)} compiled"
        print(f"{name}, {model}: {chosen.name}, {of}", flush=True)
        if chosen.predicted_s > best_s * _ROUNDING:
            print(f"{chosen.predicted_s:.4g} s, and {best_s:.4g} s is there: LOST")
            return True
    return False


def seconds_of_a_choice() -> float:
    """Return the seconds of a whole choice, on eight of the devices."""
    devices = jax.devices()[:8]
    rep = replicator.Replicator(devices=devices, strategy="auto")
    config = char_lm.Config()
    language = unread(functools.partial(char_lm._network, config))
    init_fn, step_fn = make_training(rep, config, language)
    draw = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda each: draw.integers(0, 200, each.shape).astype(each.dtype),
        batch_shapes(config),
    )
    began_s = time.monotonic()
    choice = replicator.choose(
        step_fn,
        init_fn,
        batch,
        replicator=rep,
        tensor_rules=TENSOR_PARALLEL,
        trials=1 if _TINY.value else 8,
    )
    print(choice)
    return time.monotonic() - began_s


def main(argv: list[str]) -> None:
    del argv
    began_s = time.monotonic()
    replicator.fake_devices(16)
    only, most = _ONLY.value, 1 if _TINY.value else None
    found = {}
    if only in (None, "seconds"):  # first, while little else is in memory
        found["seconds"] = round(seconds_of_a_choice(), 1)
    if only in (None, "pruned_best"):
        named = list(machines().items())[:most]
        found["pruned_best"] = sum(loses_best(name, each) for name, each in named)
    if only in (None, "flips"):
        found["flips"] = sum(map(is_right, flips()[:most]))
    print(json.dumps({**found, "whole_seconds": round(time.monotonic() - began_s, 1)}))


if __name__ == "__main__":
    app.run(main)

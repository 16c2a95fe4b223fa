"""Time strategies over slow links, and hold predictions and a choice against that.

Two network namespaces, joined by a link of 100 or 400 Mbit/s, have a process of two
devices each (`worker.py`). In each of six cases, three models over both links, a pair
of processes holds the steps of all candidates and times them in turns, so that what
else runs here slows all of them. The cost model is given the machine as it was measured
there, and the features of the compiled steps; it predicts without a link hidden.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from benchmarks.namespaces import Namespaces
from benchmarks.slow_links.choice import choose
from benchmarks.slow_links.judge import (
    Times,
    fastest,
    is_best,
    ordered_pairs,
    regret,
)
from benchmarks.slow_links.models import MODELS, PLAIN, candidates
from benchmarks.slow_links.pair import Pair
from replicator.strategies import StepTime, predict

_MBIT = flags.DEFINE_multi_integer("mbit", [100, 400], "Speeds of the link.")
_TURNS = flags.DEFINE_integer("turns", 5, "Least turns of each candidate.")
_ONLY = flags.DEFINE_multi_string("only", [], "Models whose name holds this.")

_AGAIN = "data_parallel again"
_MOST_TURNS = 25
_CASE_S = 60.0
"""Seconds in which turns of a case go on after the least."""


class Case(NamedTuple):
    """One model over one link, measured.

    Attributes:
      times_s: By candidate, the seconds of each turn.
      predicted_s: By candidate, the seconds by the model.
      exact: Candidates that a choice may take.
      choice: The candidate that was chosen, by trials of its own.
    """

    times_s: Times
    predicted_s: Mapping[str, float]
    exact: list[str]
    choice: str


def measure(network: Namespaces, model: str, mbit_per_s: int) -> Case:
    """Choose among the candidates of a model, then time all of them in turns."""
    named = candidates(model)
    exact = [name for name, each in named.items() if each.is_exact]
    with Pair(network, model, mbit_per_s) as pair:
        predicted = {
            name: predict(features, pair.machine)
            for name, features in pair.features.items()
        }
        choice = choose(
            {name: named[name].strategy for name in exact}, predicted, pair.seconds
        )
        times_s = time_turns(pair, list(named))
        print(_described(pair, times_s, predicted, choice), flush=True)
    predicted_s = {name: each.high_s for name, each in predicted.items()}
    return Case(times_s, predicted_s, exact, choice)


def time_turns(pair: Pair, names: Sequence[str]) -> Times:
    """Return the seconds of each turn of candidates, and of data parallel once more."""
    times_s: dict[str, list[float]] = {name: [] for name in (*names, _AGAIN)}
    until_s = time.monotonic() + _CASE_S
    for turn in range(_MOST_TURNS):
        if turn >= _TURNS.value and time.monotonic() > until_s:
            break
        for name, times in times_s.items():
            times.append(pair.seconds(PLAIN if name == _AGAIN else name))
    return times_s


def _described(
    pair: Pair, times_s: Times, predicted: Mapping[str, StepTime], choice: str
) -> str:
    lines = [f"  {link}" for link in pair.machine.links]
    assert pair.machine.hardware is not None, "it was calibrated"
    lines.append(f"  {dict(pair.machine.hardware.flops_per_s)}")
    for name in sorted(times_s, key=lambda name: float(np.median(times_s[name]))):
        median_ms, least_ms = 1e3 * np.median(times_s[name]), 1e3 * min(times_s[name])
        line = f"  {name:24} {median_ms:8.1f} ms, at least {least_ms:8.1f}"
        if name in predicted:
            line += f"; predicted {predicted[name]}"
        lines.append(line + (" <- chosen" if name == choice else ""))
    return "\n".join(lines)


def judged(cases: Mapping[tuple[str, int], Case]) -> dict[str, Any]:
    """Return the numbers of all cases together."""
    right, wrong = 0, []
    regrets, against_plain, same, without_trials = [], [], [], 0
    for (model, mbit_per_s), case in cases.items():
        times_s = {n: each for n, each in case.times_s.items() if n != _AGAIN}
        again = regret(case.times_s, _AGAIN, PLAIN)
        same.append(again)
        best = fastest(times_s, case.exact)
        pairs = ordered_pairs(times_s, case.predicted_s)
        right += pairs.right
        wrong += [(model, mbit_per_s, *pair) for pair in pairs.wrong]
        regrets.append(regret(times_s, case.choice, best))
        against_plain.append(regret(times_s, case.choice, PLAIN))
        by_model = min(case.exact, key=case.predicted_s.__getitem__)
        is_right = is_best(times_s, by_model, best, again)
        without_trials += is_right
        print(
            f"{model} at {mbit_per_s} Mbit/s: best {best}, chosen {case.choice} "
            f"({regrets[-1]}; to data parallel {against_plain[-1]}), by the model "
            f"{by_model}{'' if is_right else ' (wrong)'}, A/A {again}"
        )
    for each in wrong:
        print(f"wrong order: {each}")
    return {
        "regret_high": max(each.high for each in regrets),
        "vs_dp_low": max(each.low for each in against_plain),
        "pairs_right": right / (right + len(wrong)),
        "right_without_trials": without_trials,
        "cases": len(cases),
        "aa_low": min(each.low for each in same),
        "aa_high": max(each.high for each in same),
    }


def speedups(cases: Mapping[tuple[str, int], Case]) -> dict[str, float | None]:
    """Return how many times as fast ways of a sum are at 100 Mbit/s."""
    asked = {
        "int8_speedup": ("W 256, batch 64", "int8"),
        "hierarchical_speedup": ("W 256, batch 64", "hierarchical"),
        "rows_speedup": ("embedding", "rows"),
    }
    found: dict[str, float | None] = dict.fromkeys(asked)
    for key, (model, name) in asked.items():
        if (case := cases.get((model, 100))) is not None:
            found[key] = regret(case.times_s, PLAIN, name).median
    return found


def main(argv: list[str]) -> None:
    del argv
    began_s = time.monotonic()
    models = [name for name in MODELS if all(word in name for word in _ONLY.value)]
    cases = {}
    for mbit_per_s in _MBIT.value:
        for model in models:
            with Namespaces(2) as network:
                network.limit(mbit_per_s)
                print(f"{model} at {mbit_per_s} Mbit/s", flush=True)
                cases[model, mbit_per_s] = measure(network, model, mbit_per_s)
    found = {**speedups(cases), **judged(cases)}
    rounded = {k: None if v is None else round(v, 3) for k, v in found.items()}
    print(json.dumps({**rounded, "seconds": round(time.monotonic() - began_s)}))


if __name__ == "__main__":
    app.run(main)

"""Compare steps that end with any 6 of 8 workers with steps that wait for all 8.

`experiments.programs.gradient_coding` takes both kinds in turn: each step of one stands
beside the same step of the other, with the same delays, which workers draw from an
exponential distribution and sit out. Both yield the full gradient; the coded one at
three times the arithmetic, as each worker holds three parts. That is in the times. What
it is alone is measured in this process (`plain_arithmetic_ms` of a worker's one part,
`coded_arithmetic_ms` of its three), and what all of it costs when nobody is made late
by a second run (`ratio_without_delays`: a busy machine makes some late all the same).
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np
from absl import app, flags

from benchmarks.timing import ratio, time_rounds
from experiments.programs.gradient_coding import Descent, descend, gradient, make_parts
from experiments.programs.launch_flag import LAUNCH_TYPE

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Blocks of steps, of each kind.")
_STEPS = flags.DEFINE_integer("steps", 15, "Steps in one block.")
_WORKERS = 8
_STRAGGLERS = 2
_DELAY_MS = 20.0
_EXAMPLES = 32_000  # of 64 numbers: some arithmetic beside the delays


def measure(delay_ms: float) -> Mapping[str, Sequence[float]]:
    """Run the program; return, by kind, the seconds of each block after the first.

    Raises:
      RuntimeError: The two did not come to the same weights.
    """
    found = descend(
        LAUNCH_TYPE.value,
        workers=_WORKERS,
        stragglers=_STRAGGLERS,
        delay_ms=delay_ms,
        descent=Descent(
            examples=_EXAMPLES, steps=(1 + _ROUNDS.value) * _STEPS.value, rate=1e-4
        ),
    )
    weights = found["weights"]
    if not np.allclose(weights["coded"], weights["plain"], rtol=1e-6, atol=1e-9):
        raise RuntimeError(f"the coded descent came to other weights: {weights}")
    return {
        name: np.reshape(seconds, (-1, _STEPS.value)).sum(axis=1)[1:].tolist()
        for name, seconds in found["seconds"].items()
    }


def arithmetic_ms(parts: int) -> float:
    """Return how long one worker works on the gradients of so many parts."""
    descent = Descent(examples=_EXAMPLES)
    weights = np.zeros(descent.features)
    held = make_parts(_WORKERS, descent)[:parts]

    def work() -> None:
        for x, y in held:
            gradient(weights, x, y)

    return 1e3 * float(np.median(time_rounds({"work": work}, rounds=21)["work"]))


def main(argv: list[str]) -> None:
    del argv
    late, punctual = measure(_DELAY_MS), measure(0.0)
    speedup = ratio(late["plain"], late["coded"])
    without = ratio(punctual["coded"], punctual["plain"])
    print(f"waiting for all / for any {_WORKERS - _STRAGGLERS}: {speedup}")
    print(f"coded / plain when nobody is made late: {without}")
    steps_ms = {name: 1e3 * np.median(s) / _STEPS.value for name, s in late.items()}
    result = {
        "speedup": round(speedup.median, 3),
        "speedup_low": round(speedup.low, 3),
        "coded_ms": round(steps_ms["coded"], 2),
        "plain_ms": round(steps_ms["plain"], 2),
        "parts_per_worker": _STRAGGLERS + 1,
        "plain_arithmetic_ms": round(arithmetic_ms(1), 3),
        "coded_arithmetic_ms": round(arithmetic_ms(_STRAGGLERS + 1), 3),
        "ratio_without_delays": round(without.median, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    flags.set_default(LAUNCH_TYPE, "processes")
    app.run(main)

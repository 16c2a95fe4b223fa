"""Compare `import replicator` with the import of what it stands on, jax and optax.

Each import runs in a fresh interpreter, the two in turn, and is timed inside it, so the
start of Python does not count. Both find their bytecode compiled, as an installed
package does: a switch in the environment against writing it does not reach them.

`ratio` is what a user gets. One full run of Python's cyclic collector over what jax has
made, about a tenth of the import, falls into ours or just after theirs by an accident
of object counts; `uncollected_ratio` is taken with the collector off.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags

from benchmarks.timing import estimate, ratio

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Interleaved imports of each.")

_TIMED = """
import gc, time
gc.{collector}()
started = time.perf_counter()
import {modules}
print(time.perf_counter() - started)
"""
_OURS, _THEIRS = "replicator", "jax, optax"


def import_s(modules: str, collector: str) -> float:
    """Time `import <modules>` in a fresh interpreter.

    Args:
      modules: What is imported.
      collector: `"enable"` or `"disable"` the cyclic one.

    Returns:
      Seconds.
    """
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(modules=modules, collector=collector)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def time_imports(*, rounds: int) -> Mapping[tuple[str, str], Sequence[float]]:
    """Time all in turn, by (modules, collector), after each wrote its bytecode once."""
    cases = [(m, c) for c in ("enable", "disable") for m in (_OURS, _THEIRS)]
    turns = [[import_s(*case) for case in cases] for _ in range(rounds + 1)]
    return dict(zip(cases, zip(*turns[1:], strict=True), strict=True))


def main(argv: list[str]) -> None:
    del argv
    times_s = time_imports(rounds=_ROUNDS.value)
    plain = ratio(times_s[_OURS, "enable"], times_s[_THEIRS, "enable"])
    uncollected = ratio(times_s[_OURS, "disable"], times_s[_THEIRS, "disable"])
    import_ms = estimate(times_s[_OURS, "enable"]).median * 1e3
    print(f"import {_OURS} / import {_THEIRS}: {plain}; uncollected {uncollected}")
    result = {
        "ratio": round(plain.median, 3),
        "ratio_low": round(plain.low, 3),
        "ratio_high": round(plain.high, 3),
        "uncollected_ratio": round(uncollected.median, 3),
        "import_ms": round(import_ms),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

"""Run one benchmark with arguments of one's own, and hold it to its bars.

    python -m benchmarks.hold kill_resume --kills=500 --terms=50

Ends with status 1 if a number misses its bar or the benchmark broke, and with 2 if
there is no benchmark of that name.
"""

import sys
from collections.abc import Sequence

from benchmarks.__main__ import run_benchmark
from benchmarks.bars import BENCHMARKS, missed


def hold(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark, name the bars that it misses, and return the exit status."""
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        print(f"`name` must be that of a benchmark, got {name!r}. Use one of {known}.")
        return 2
    found = run_benchmark(name, arguments)
    results = {} if found is None else {name: found}
    short = [bar for bar in missed(results) if bar.benchmark == name]
    for bar in short:
        number = "broke" if found is None else f"{found[bar.key]:g}"
        print(f"missed: {name} {bar.key} {number}, bar {bar.rule} {bar.limit:g}")
    return 1 if short else 0


if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or [""]
    sys.exit(hold(name, arguments))

"""Run every benchmark in a process of its own, one after the other; print a table.

Ends with status 1 if a benchmark broke or a number misses its bar.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.bars import BARS, BENCHMARKS, Results, command_of, missed


def run_benchmark(
    name: str, arguments: Sequence[str] = ()
) -> Mapping[str, float | None] | None:
    """Run one, showing its lines as they come; return its result, None if it broke."""
    command = [sys.executable, "-u", "-m", *command_of(name), *arguments]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # it is a pipe
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    return json.loads(last) if process.returncode == 0 else None


def results_table(results: Results) -> Table:
    """Set every number beside its bar."""
    table = Table("benchmark", "number", "measured", "bar", "")
    short = missed(results)
    for bar in BARS:
        found = results.get(bar.benchmark)
        table.add_row(
            bar.benchmark,
            bar.key,
            "broke" if found is None else _shown(found[bar.key]),
            f"{bar.rule} {bar.limit:g}",
            "missed" if bar in short else "reached",
        )
    return table


def _shown(number: float | None) -> str:
    return "not measured" if number is None else f"{number:g}"


def main() -> None:
    results: dict[str, Mapping[str, float | None]] = {}
    for name in BENCHMARKS:
        print(f"--- {name}", flush=True)
        found = run_benchmark(name)
        if found is not None:
            results[name] = found
    Console().print(results_table(results))
    sys.exit(1 if missed(results) else 0)


if __name__ == "__main__":
    main()

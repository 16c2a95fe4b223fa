"""Count the mistakes of a first hour whose answer does not name them, or is long.

Each mistake of the tables beside this file is a program of at most twelve lines, with
the texts that its message must hold: the argument, the leaf or the line, and a remedy.
They were written before the programs were run. Prints each mistake that is answered
badly, and one JSON object:

- `failures`: messages without one of these texts, or right programs that are refused;
- `long`: those that print a frame which is not the user's, or more than six lines
  beside the user's frames;
- `hangs`: programs that do not end;
- `silent`: programs that end well, print nothing, and may have computed wrong numbers.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

import benchmarks
from benchmarks.first_hour.arguments import ARGUMENTS
from benchmarks.first_hour.batches import BATCHES
from benchmarks.first_hour.datasets import DATASETS
from benchmarks.first_hour.environments import ENVIRONMENTS
from benchmarks.first_hour.judge import Outcome, Verdict, judge
from benchmarks.first_hour.loops import LOOPS
from benchmarks.first_hour.mistake import MOST_LINES, Mistake
from benchmarks.first_hour.modules import MODULES
from benchmarks.first_hour.names import NAMES
from benchmarks.first_hour.optimizers import WRAPS
from benchmarks.first_hour.pool import Program, outcomes
from benchmarks.first_hour.randomness import RANDOMNESS
from benchmarks.first_hour.results import RESULTS
from benchmarks.first_hour.sums import SUMS
from benchmarks.first_hour.traced import TRACED

MISTAKES = (
    *(*ARGUMENTS, *DATASETS, *BATCHES, *NAMES, *RESULTS, *TRACED),
    *(*WRAPS, *SUMS, *RANDOMNESS, *MODULES, *LOOPS, *ENVIRONMENTS),
)
_TIMEOUT_S = 60.0
# Hundreds of small programs are compiled and run once: machine code may be slow.
_FAST_COMPILER = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
_IMPORT = "from benchmarks.first_hour.problem import *"

_ONLY = flags.DEFINE_multi_string("only", [], "Mistakes whose names hold this.")
_JOBS = flags.DEFINE_integer("jobs", 2, "Processes at a time.")
_SHOW = flags.DEFINE_bool("show", False, "Print what each program wrote.")


def chosen() -> list[Mistake]:
    """Return the mistakes that `--only` names; all without it."""
    wanted = _ONLY.value
    return [
        each for each in MISTAKES if not wanted or any(w in each.name for w in wanted)
    ]


def written(folder: Path, mistakes: list[Mistake]) -> Iterator[Program]:
    """Write the programs, and the right ones beside them, into a folder."""
    for number, each in enumerate(mistakes):
        for kind, program in (("train", each.program), ("right", each.right)):
            if program:
                path = folder / f"{number}_{kind}.py"
                first = [] if each.bare else [_IMPORT]
                path.write_text("\n".join([*first, program.strip("\n"), ""]))
                yield Program(path, each.environment)


def verdicts(
    mistakes: list[Mistake], folder: Path
) -> Iterator[tuple[Mistake, Verdict]]:
    """Run all programs, and yield the faults of each answer, in order."""
    programs = list(written(folder, mistakes))
    ends = {
        program.path.stem: end
        for program, end in outcomes(programs, jobs=_JOBS.value, timeout_s=_TIMEOUT_S)
    }
    for number, each in enumerate(mistakes):
        end: Outcome = ends[f"{number}_train"]
        if _SHOW.value:
            print(f"--- {each.name}\n{end.printed}{end.errors}", flush=True)
        yield each, judge(each, end, ends.get(f"{number}_right"))


def _prepare() -> None:
    """Import what the programs need, and set up what their processes inherit."""
    import grain  # noqa: F401 (loaded once, for all that are forked)
    import tensorstore  # noqa: F401
    from flax import nnx  # noqa: F401

    import replicator.compat.pmap
    import replicator.replicator
    import replicator.testing  # noqa: F401

    root = str(Path(benchmarks.__file__).parents[1])
    path = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ["XLA_FLAGS"] = _FAST_COMPILER
    os.environ["REPLICATOR_COMPILATION_CACHE"] = "0"


def main(argv: list[str]) -> None:
    del argv
    started_s = time.monotonic()
    mistakes = chosen()
    _prepare()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        found = list(verdicts(mistakes, Path(folder)))
    for mistake, verdict in found:
        if verdict.detail:
            print(f"{mistake.name}: {verdict.detail}", flush=True)
    faults = [verdict for _, verdict in found]
    result = {
        "failures": sum(each.failed for each in faults),
        "long": sum(each.is_long for each in faults),
        "hangs": sum(each.hung for each in faults),
        "silent": sum(each.silent for each in faults),
        "mistakes": len(mistakes),
        "reported": len({each.report for each in mistakes if each.report}),
        "quiet": sum(each.quiet for each in mistakes),
        "most_lines": max(each.program.count("\n") + 1 for each in mistakes),
        "seconds": round(time.monotonic() - started_s, 1),
    }
    assert result["most_lines"] <= MOST_LINES
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

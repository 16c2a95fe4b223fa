"""Run programs in another process, which may die or hang without taking ours along.

One line in, the name of a program; one line out, what was wrong with it, as JSON. A
process that ends (XLA aborts where replicas wait for each other in vain) or answers too
late is replaced, and its program failed.
"""

import dataclasses
import json
import os
import subprocess
import sys
import threading

import replicator
from benchmarks.truth.law import Oracles, problem
from benchmarks.truth.program import ALL, Program, Setting
from benchmarks.truth.programs import PROGRAMS

_MARK = "truth: "
# Hundreds of programs are compiled and run a few times: machine code may be slow. What
# XLA makes of a program, reductions included, is the same.
_FAST_COMPILER = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a program.

    Attributes:
      settings: How many it was run in.
      wrong: By setting, what was wrong.
    """

    settings: int
    wrong: list[str]


def chosen_settings(program: Program, *, full: bool) -> list[Setting]:
    """Choose where to run a program: everywhere, or where most can go wrong.

    The thrifty choice cuts the batch both ways, in four and otherwise: by the
    program's place in the list, in 32 or not at all along one way.
    """
    if full or len(program.settings) == 1:
        return list(program.settings)
    place = [each.name for each in PROGRAMS].index(program.name)
    both = Setting(2, 2) if Setting(2, 2) in program.settings else program.settings[0]
    others = [each for each in program.settings if each != both]
    most = max(others, key=lambda each: each.replicas * each.microbatches)
    turns = [turn for each in others for turn in (most, each) if each != most]
    return [both, turns[place % len(turns)] if turns else most]


def judge(program: Program, settings: list[Setting]) -> Verdict:
    """Run a program in these settings, in this process."""
    oracles, wrong = Oracles(), []
    for setting in settings:
        found = problem(program, setting, oracles)
        if found is not None:
            wrong.append(f"{setting}: {found}")
    return Verdict(settings=len(settings), wrong=wrong)


def serve() -> None:
    """Answer the lines of standard input, one after the other."""
    replicator.fake_devices(max(each.replicas for each in ALL))
    by_name = {program.name: program for program in PROGRAMS}
    for line in sys.stdin:
        request = json.loads(line)
        program = by_name[request["name"]]
        verdict = judge(program, chosen_settings(program, full=request["full"]))
        print(_MARK + json.dumps(dataclasses.asdict(verdict)), flush=True)


class Worker:
    """A process that runs programs; close it when done.

    Args:
      timeout_s: How long one program may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str, *, full: bool) -> Verdict:
        """Run the program of that name."""
        process = self._process or self._started()
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        late = threading.Timer(self._timeout_s, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps({"name": name, "full": full}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(_MARK):
                    return Verdict(**json.loads(line.removeprefix(_MARK)))
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        self._process = None
        code = process.wait()
        return Verdict(settings=0, wrong=[f"the process ended with {code}"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _started(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.truth", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": _FAST_COMPILER},
        )
        return self._process

"""Run programs in another process, which may die or hang without taking ours along.

Then the program that it ran failed, and the next one gets a new process.
"""

import dataclasses
from typing import Any

import replicator
from benchmarks import worker
from benchmarks.truth.law import Oracles, problem
from benchmarks.truth.program import ALL, Program, Setting
from benchmarks.truth.programs import PROGRAMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a program.

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
    """Judge the programs that standard input names."""
    replicator.fake_devices(max(each.replicas for each in ALL))
    by_name = {program.name: program for program in PROGRAMS}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        program = by_name[request["name"]]
        verdict = judge(program, chosen_settings(program, full=request["full"]))
        return dataclasses.asdict(verdict)

    worker.serve(answer)


class Worker:
    """A process that runs programs; close it when done.

    Args:
      timeout_s: How long one program may take.
    """

    def __init__(self, timeout_s: float) -> None:
        arguments = ["-m", "benchmarks.truth", "--serve"]
        self._worker = worker.Worker(arguments, timeout_s=timeout_s)

    def run(self, name: str, *, full: bool) -> Verdict:
        """Run the program of that name."""
        try:
            return Verdict(**self._worker.ask({"name": name, "full": full}))
        except worker.WorkerEnded as ended:
            return Verdict(settings=0, wrong=[str(ended)])

    def close(self) -> None:
        """End the process."""
        self._worker.close()

"""Run a learner's program, kill one of its workers at a moment, keep what happened."""

import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import replicator.launchpad_bridge as lp
from benchmarks.runs.learner_program import (
    BATCH,
    MIN_SIZE,
    NEW_ROWS,
    STEPS,
    TABLE_FOLDER,
    UNROLL,
    Shape,
    build,
)
from benchmarks.runs.table_save import TableSave, lost_since, read_save
from replicator.base.host.json_lines import read_lines
from replicator.base.types import PyTree
from replicator.checkpoint.commit import list_steps
from replicator.errors import (
    CheckpointError,
    NodeFailedError,
    ReplicatorError,
    RunTimeoutError,
)
from replicator.launchpad_bridge.launchers.forked.fork_server_client import (
    ForkedProcess,
)

_POLL_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A worker to kill, and its program."""

    shape: Shape
    victim: str

    @property
    def name(self) -> str:
        """Return it in words."""
        order = "turns" if self.shape.turns else "free"
        table = "node" if self.shape.own_table else "inside"
        table = "replays" if self.shape.replays else table
        return (
            f"{order}, {self.shape.processes} processes, table {table}, {self.victim}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """The workers to kill, and when.

    Attributes:
      victim: The worker.
      update: A while after this update was done; None: after the kill before, or the
        launch, began.
      after_s: The while.
      signum: By what.
    """

    victim: str
    update: int | None
    after_s: float
    signum: signal.Signals = signal.SIGKILL


@dataclasses.dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of a run.

    Attributes:
      lines: What its learner noted.
      started_s: When it was launched, by the machine's monotonic clock.
      result: What the learner returned; None if it did not end well.
      restarts: By worker, those that were started again.
      actors: What the actors counted.
      killed_s: When the first victim was killed; None if nobody was.
      durable: The newest checkpoint then.
      held: Trajectories that were in the queue when it was killed, or in the replay
        table and not in its last save.
      saves: Of a replay table without turns, before each kill and after the run.
      table: What its table counted, if that was a node.
      problem: Why it did not end.
    """

    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    started_s: float = 0.0
    result: PyTree = None
    restarts: dict[str, int] = dataclasses.field(default_factory=dict)
    actors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    killed_s: float | None = None
    durable: int = 0
    held: int = 0
    saves: list[TableSave] = dataclasses.field(default_factory=list)
    table: dict[str, Any] = dataclasses.field(default_factory=dict)
    problem: str | None = None

    def updates(self, attempt: int) -> list[dict[str, Any]]:
        """Return the lines of one attempt's updates."""
        return [
            line
            for line in self.lines
            if line["what"] == "update" and line["attempt"] == attempt
        ]

    @property
    def first_update_s(self) -> float:
        """From the launch to the first update."""
        return self.updates(0)[0]["time_s"] - self.started_s

    @property
    def was_late(self) -> bool:
        """Whether no update followed the kill: the run, or its victim, was over."""
        last_s = max((line["time_s"] for line in self.lines), default=0.0)
        return self.killed_s is None or self.killed_s >= last_s

    @property
    def resumed_s(self) -> float | None:
        """From the kill to the next update of a learner that was started again."""
        again = self.updates(1)
        if not again or self.killed_s is None:
            return None
        return again[0]["time_s"] - self.killed_s


class KnownProcesses:
    """The launcher `processes`; remembers the newest start of each worker.

    Attributes:
      started: By the worker's name.
    """

    name = "processes"
    shows_output = False

    def __init__(self) -> None:
        self.started: dict[str, ForkedProcess] = {}
        self._processes = lp.Processes(terminal="output_to_files")

    def open(
        self, plan: lp.Plan, report: Callable[[lp.Exited | lp.StopAsked], None]
    ) -> "_KnownWorkers":
        """Get ready, as `processes` does."""
        return _KnownWorkers(self._processes.open(plan, report), self.started)


class _KnownWorkers:
    def __init__(self, workers: Any, started: dict[str, ForkedProcess]) -> None:
        self._workers = workers
        self._started = started

    def start(self, executable: lp.Executable, attempt: int) -> lp.Worker:
        worker = self._workers.start(executable, attempt)
        self._started[executable.name] = worker.process
        return worker

    def close(self) -> None:
        self._workers.close()


def cases() -> list[Case]:
    """Return all cases, programs whose bits are compared among them."""
    found = []
    for turns in (False, True):
        for processes in (1, 2):
            for own_table in (True, False):
                shape = Shape(turns=turns, processes=processes, own_table=own_table)
                others = ["actor/0"] + ["queue"] * own_table
                others += ["inference"] * (own_table and not turns)
                if not turns and not own_table:
                    others = []  # the actor's death is that of the case before
                found += _cases_of(shape, others)
    for processes in (1, 2):
        for turns in (False, True):
            shape = Shape(
                turns=turns, processes=processes, own_table=True, replays=True
            )
            found += _cases_of(shape, ["actor/0", "replay"])
    return found


def _cases_of(shape: Shape, others: Sequence[str]) -> list[Case]:
    both = ["learner/0", "learner/1"]
    learners = ["learner"] if shape.processes == 1 else both
    return [Case(shape=shape, victim=victim) for victim in [*learners, *others]]


def run(
    shape: Shape,
    folder: Path,
    *,
    limit_s: float,
    kills: Sequence[Kill] = (),
) -> Outcome:
    """Run a program to its end; kill workers on the way.

    Args:
      shape: Which program.
      folder: Of its own, empty.
      limit_s: How long it may take.
      kills: Who is killed and when, in order.
    """
    outcome, launcher = Outcome(), KnownProcesses()
    program, table = build(shape, folder)
    outcome.started_s = time.monotonic()
    until_s = outcome.started_s + limit_s
    logs = folder / "logs"
    try:
        with lp.launch(program, launcher, log_dir=logs, stop_grace_s=5.0) as running:
            for kill in kills:
                _wait_moment(kill, folder, outcome, running, until_s)
                pid = _wait_pid(kill.victim, launcher, running, until_s)
                if pid is not None:
                    outcome.saves += _saves(shape, folder)
                    _kill(pid, kill, folder, table, outcome)
            # Who waits for all waits for the learner; then nobody is left to be asked.
            labels = None if shape.turns else ["learner"]
            running.wait(max(0.1, until_s - time.monotonic()), labels=labels)
            with contextlib.suppress(ReplicatorError):
                outcome.table = table.dereference().statistics() if table else {}
        _keep(running, outcome)
        outcome.saves += _saves(shape, folder)
    except (CheckpointError, NodeFailedError, RunTimeoutError) as error:
        outcome.problem = f"{error}"
    outcome.lines = read_lines(folder / "updates")
    return outcome


def _wait_moment(
    kill: Kill, folder: Path, outcome: Outcome, running: lp.Run, until_s: float
) -> None:
    """Wait until somebody is to be killed, or the run is over."""
    if kill.update is None:
        begun_s = outcome.killed_s or outcome.started_s
        time.sleep(max(0.0, begun_s + kill.after_s - time.monotonic()))
        return
    while not running.is_over and time.monotonic() < until_s:
        steps = [line["step"] for line in read_lines(folder / "updates")]
        if max(steps, default=0) >= kill.update:
            time.sleep(kill.after_s)
            return
        time.sleep(_POLL_S)


def _saves(shape: Shape, folder: Path) -> list[TableSave]:
    """Return the last save of a replay table without turns; others have none."""
    is_saved = shape.replays and not shape.turns
    return [read_save(folder / TABLE_FOLDER)] if is_saved else []


def _kill(pid: int, kill: Kill, folder: Path, table: Any, outcome: Outcome) -> None:
    """Kill a worker's process; before the first kill, look what there is to lose."""
    if outcome.killed_s is None:
        if kill.victim in ("queue", "replay") and read_lines(folder / "updates"):
            counts = table.dereference().statistics()
            if kill.victim == "queue":
                outcome.held = counts["waiting"]
            elif outcome.saves and kill.signum == signal.SIGKILL:
                # After SIGTERM it saves once more; a journal of turns lacks nothing.
                saved = outcome.saves[-1].counts.get("inserted", 0)
                outcome.held = counts["inserted"] - saved
        saved = folder / "checkpoints"
        outcome.durable = max(list_steps(saved) if saved.is_dir() else [], default=0)
        outcome.killed_s = time.monotonic()
    with contextlib.suppress(ProcessLookupError):  # its group may just be killed
        os.kill(pid, kill.signum)


def _wait_pid(
    victim: str, launcher: KnownProcesses, running: lp.Run, until_s: float
) -> int | None:
    """Return the process of a worker once it runs; None if it has ended."""
    while time.monotonic() < until_s:
        state = running.workers.get(victim)
        worker = launcher.started.get(victim)
        if state is not None and state.phase == "ended":
            return None
        is_running = state is not None and state.phase == "running"
        if is_running and worker is not None and worker.pid is not None:
            return worker.pid
        time.sleep(_POLL_S)
    raise RunTimeoutError(f"`{victim}` did not start.")


def _keep(running: lp.Run, outcome: Outcome) -> None:
    restarts = {name: state.attempt for name, state in running.workers.items()}
    outcome.restarts = {name: count for name, count in restarts.items() if count}
    outcome.actors = [each for each in running.results_of("actor") if each]
    outcome.result = running.results_of("learner")[0]


def problems(outcome: Outcome, victim: str | None) -> list[str]:
    """List what must not happen to a run, whoever of it was killed."""
    if outcome.problem is not None:
        return [outcome.problem]
    found = []
    done = int(outcome.result["variables"]["updates"])
    if (outcome.result["step"], done) != (STEPS, STEPS):
        found.append(f"{outcome.result['step']} steps and {done} updates at its end")
    was_killed = victim is not None and not outcome.was_late
    if was_killed and not outcome.restarts.get(victim or ""):
        found.append(f"{victim} was not started again")
    last, attempts = 0, sorted({line["attempt"] for line in outcome.lines})
    for attempt in attempts:
        steps = [line["step"] for line in outcome.updates(attempt)]
        if steps != list(range(steps[0], steps[0] + len(steps))):
            found.append(f"attempt {attempt} made the updates {steps}")
        kept = outcome.durable if attempt else 0
        if not kept < steps[0] <= last + 1:
            found.append(
                f"attempt {attempt} began with update {steps[0]}: {last} were done, "
                f"{kept} durable"
            )
        last = steps[-1]
    began = outcome.updates(attempts[-1])[0]["step"]
    found += _played_wrong(outcome, updates=STEPS - began + 1)
    lags = [line["lag"] for line in outcome.lines if line["what"] == "lag"]
    if min(lags) < 0:
        found.append(f"a policy lag of {min(lags)}")
    for before, after in itertools.pairwise(outcome.saves):
        found += lost_since(before, after)
    return found


def _played_wrong(outcome: Outcome, updates: int) -> list[str]:
    """List what a learner that made so many updates at last counted wrongly."""
    played, told = outcome.result["metrics"], outcome.result["statistics"]
    if "priorities" in told and "turns" in told.get("table", {}):
        # Of actors that take turns: some were sent again, the last ones maybe not.
        rows = MIN_SIZE + NEW_ROWS * (STEPS - 1)
        is_right = not told["priorities"]["nonfinite"] and played["inserted"] == rows
    elif "priorities" in told:  # of a replay table: each row's went back, and got there
        right = {"sent": updates * BATCH, "nonfinite": 0, "lost": 0}
        is_right = told["priorities"] == right and played["inserted"] > 0
    else:  # resets are no steps: at most one in three
        most = STEPS * BATCH * UNROLL
        is_right = most / 2 < played["environment_steps"] <= most
    if is_right and played["episodes"]:
        return []
    return [f"played {played}, priorities {told.get('priorities')}"]

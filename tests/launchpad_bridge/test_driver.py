"""The thread that drives a run, over a launcher whose workers end as they are told."""

import dataclasses

import replicator.launchpad_bridge as lp
from replicator.distributed.processes.states import Timeouts
from replicator.launchpad_bridge.driver import RunDriver
from replicator.launchpad_bridge.protocols import Executable, Exited, Plan


@dataclasses.dataclass
class Told:
    """A launcher: `ends` says at once how each (name, attempt) ends; others are killed.

    Attributes:
      ends: By name and attempt.
    """

    ends: dict
    name = "told"

    def open(self, plan, report):
        self.report = report
        return self

    def start(self, executable, attempt):
        end = self.ends.get((executable.name, attempt))
        if end is not None:
            self.report(Exited(name=executable.name, attempt=attempt, **end))
        return ToldWorker(self, executable.name, attempt)

    def close(self):
        pass


@dataclasses.dataclass
class ToldWorker:
    launcher: Told
    name: str
    attempt: int

    def stop(self):
        pass

    def kill(self):
        end = Exited(name=self.name, attempt=self.attempt, outcome="died")
        self.launcher.report(end)


def drive(ends, tmp_path, **timeouts):
    """Run a group of two that may start again once; return its driver at the end."""
    executables = [
        Executable(
            label="g",
            index=index,
            name=f"g/{index}",
            run=int,
            restart=lp.Restart(attempts=1, backoff_s=0.0),
            is_member=True,
        )
        for index in range(2)
    ]
    plan = Plan(
        program="p",
        run_id="told",
        folder=tmp_path,
        logs=tmp_path,
        executables=executables,
    )
    driver = RunDriver(
        plan, Told(ends), timeouts=Timeouts(**timeouts), on_event=lambda: None
    )
    assert driver.open() is None
    driver.join()
    return driver


def raised(text="oh no"):
    return {"outcome": "raised", "error": ValueError(text)}


def returned(result):
    return {"outcome": "returned", "result": result}


def test_who_has_ended_in_time_did_though_it_is_seen_late(tmp_path):
    again = {("g/0", 1): returned(1), ("g/1", 1): returned(2)}
    driver = drive({("g/1", 0): raised(), **again}, tmp_path, kill_grace_s=0.0)
    assert driver.finish.failure is None
    assert driver.results == {"g/0": 1, "g/1": 2, "g": 1}


PREEMPTED = {"outcome": "preempted", "result": 0}


def test_a_preempted_member_starts_again_with_its_group_within_the_budget(tmp_path):
    first = {("g/0", 0): returned(0), ("g/1", 0): PREEMPTED}
    again = {("g/0", 1): returned(1), ("g/1", 1): returned(2)}
    assert drive({**first, **again}, tmp_path).results == {"g/0": 1, "g/1": 2, "g": 1}
    driver = drive({**first, ("g/0", 1): returned(0), ("g/1", 1): PREEMPTED}, tmp_path)
    assert driver.finish.failure.exited.outcome == "preempted"


def test_what_an_attempt_returned_that_was_thrown_away_is_no_result(tmp_path):
    first = {("g/0", 0): returned("old"), ("g/1", 0): raised()}
    driver = drive({**first, ("g/1", 1): raised()}, tmp_path)
    assert driver.finish.failure is not None
    assert driver.results == {}

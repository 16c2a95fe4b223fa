"""Signals ask a run to stop; it stops at one step, saved, and says so by its code."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import optax
import pytest

from replicator.checkpoint import CheckpointStore
from replicator.checkpoint.disk import Disk
from replicator.distributed.notices import OwnNotices
from replicator.errors import Preempted
from replicator.exit_codes import INTERRUPTED, PREEMPTED
from replicator.hooks import Callback, Hook, every
from replicator.options import Follow, Retention
from replicator.testing import faults
from replicator.training.preemption import preemption, stop_agreement
from replicator.training.preemption.preemption import (
    Preemption,
    ReceivedSignals,
    decide,
)
from replicator.training.preemption.stop_agreement import StopAgreement, StopPoint
from tests.fakes import Board, FakeClock
from tests.steps import regression_batch, replicas, trainer

ROOT = Path(__file__).parents[3]


def after(*signals):
    """Return what was decided for each of `(name, time)`."""
    asked, actions = ReceivedSignals(), []
    for name, now_s in signals:
        asked, action = decide(asked, name, now_s)
        actions.append(action)
    return asked, actions


def test_the_first_signal_stops_and_later_ones_change_nothing():
    asked, actions = after(("SIGTERM", 0), ("SIGTERM", 1), ("SIGHUP", 2))
    assert actions == ["stop", "ignore", "ignore"]
    assert asked.signal == "SIGTERM"


def test_a_second_ctrl_c_interrupts():
    assert after(("SIGINT", 0), ("SIGINT", 2))[1] == ["stop", "interrupt"]


def test_one_press_that_arrives_twice_is_one():
    assert after(("SIGINT", 0), ("SIGINT", 0.1))[1] == ["stop", "ignore"]


def test_a_ctrl_c_after_a_sigterm_is_the_first():
    presses = ("SIGTERM", 0), ("SIGINT", 1), ("SIGINT", 2)
    assert after(*presses)[1] == ["stop", "ignore", "interrupt"]


def test_any_storm_stops_once_and_is_interrupted_by_ctrl_c_only():
    pick = random.Random(0)
    names = ["SIGTERM", "SIGHUP", "SIGINT"]
    for _ in range(200):
        storm = [(pick.choice(names), now_s / 3) for now_s in range(20)]
        _, actions = after(*storm)
        assert actions[0] == "stop"
        assert actions.count("stop") == 1
        assert {
            name
            for (name, _), action in zip(storm, actions, strict=True)
            if action == "interrupt"
        } <= {"SIGINT"}


@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGTERM", PREEMPTED), ("SIGHUP", PREEMPTED), ("SIGINT", INTERRUPTED)],
)
def test_the_code_says_who_asked(name, code, caplog):
    with pytest.raises(Preempted) as ended:
        StopPoint(signal=name, step=7).raise_saved()
    assert (ended.value.code, ended.value.signal, ended.value.step) == (code, name, 7)
    assert f"{name}: the run was saved after step 7" in caplog.text


def test_at_a_prompt_ctrl_c_gives_the_prompt_back(monkeypatch):
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt):
        StopPoint(signal="SIGINT", step=7).raise_saved()


def test_preempted_passes_by_handlers_of_errors_and_runs_finally():
    seen = []

    def program():
        try:
            StopPoint(signal="SIGTERM", step=1).raise_saved()
        except Exception:
            seen.append("swallowed")
        finally:
            seen.append("finally")

    with pytest.raises(SystemExit):
        program()
    assert seen == ["finally"]


@pytest.fixture
def default_signals():
    """Start from what a plain program has, whatever runs the tests."""
    plain = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, one) for number, one in plain.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(getattr(signal, name)) for name in preemption.SIGNALS]


def listening(**arguments):
    return Preemption(StopAgreement(OwnNotices()), **arguments)


def test_signals_are_heard_during_a_run_and_given_back_after_it(default_signals):
    before = handlers()
    with listening() as heard:
        assert handlers() != before
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard._asked.signal == "SIGTERM"
    heard.close()
    assert handlers() == before


def test_a_second_ctrl_c_raises_in_the_loop_s_thread(default_signals):
    clock = FakeClock()
    with listening(clock=clock):
        signal.raise_signal(signal.SIGINT)
        clock.advance(2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda *_: None])
def test_a_signal_that_the_program_handles_or_ignores_is_left_alone(theirs):
    before = signal.signal(signal.SIGHUP, theirs)
    try:
        with listening():
            assert signal.getsignal(signal.SIGHUP) is theirs
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_came_during_the_run_stays(default_signals):
    def theirs(*_):
        pass

    with listening():
        signal.signal(signal.SIGTERM, theirs)
    assert signal.getsignal(signal.SIGTERM) is theirs


def test_another_thread_than_the_main_one_leaves_signals_alone():
    before, found = handlers(), []

    def run():
        with listening():
            found.extend(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found == before


FORK = """
import os, select, signal, sys, warnings
warnings.simplefilter("ignore")
from replicator.distributed.notices import OwnNotices
from replicator.training.preemption.preemption import Preemption
from replicator.training.preemption.stop_agreement import StopAgreement
with Preemption(StopAgreement(OwnNotices())):
    ready, written = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(written, b"ready")
        while True:
            select.select([], [], [], 0.1)  # `pause` misses what came just before it
    os.read(ready, 5)
    os.kill(child, getattr(signal, sys.argv[1]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_forked_child_ends_as_its_parent_wants(name):
    done = subprocess.run(
        [sys.executable, "-c", FORK, name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.stdout.strip() == str(-getattr(signal, name)), done.stderr


def train(directory, *, steps=10, hooks=(), checkpoint_every=100, **options):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    return rep.run(
        step_fn,
        [regression_batch(seed=seed) for seed in range(3)],
        init_fn=init_fn,
        steps=steps,
        directory=directory / "told",
        checkpoint_dir=directory / "saved",
        checkpoint_every=checkpoint_every,
        hooks=hooks,
        write_every=1,
        display=False,
        **options,
    )


def terminated(text="terminate at step 4"):
    return faults.Injector(faults.parse(text))


def metrics(directory):
    rows = (directory / "told" / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(row).items() if name != "time"}
        for row in rows
    ]


def test_a_preempted_run_loses_no_step_and_goes_on_bit_for_bit(
    tmp_path, default_signals
):
    before = handlers()
    expected = train(tmp_path / "whole").state
    with pytest.raises(Preempted) as ended:
        train(tmp_path / "run", hooks=[terminated()])
    assert (ended.value.code, ended.value.step) == (PREEMPTED, 4)
    assert CheckpointStore(tmp_path / "run" / "saved").steps() == (4,)
    assert handlers() == before
    resumed = train(tmp_path / "run", hooks=[faults.Injector(())])
    assert resumed.step == 10
    for name, wanted in expected["params"].items():
        np.testing.assert_array_equal(resumed.state["params"][name], wanted)


@pytest.mark.slow
def test_a_run_whose_errors_cannot_be_written_is_saved_all_the_same(
    tmp_path, default_signals
):
    saved, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    try:
        with pytest.raises(Preempted):
            train(tmp_path, hooks=[terminated()])
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(full)
    assert CheckpointStore(tmp_path / "saved").steps() == (4,)


class Names(Hook):
    """Brings a disk that notes which names are given."""

    def __init__(self):
        self.given = []
        self.disk = Disk(
            lambda what, path: what == "rename" and self.given.append(path)
        )


def test_what_was_just_saved_is_not_saved_again_to_leave(tmp_path, default_signals):
    names = Names()
    with pytest.raises(Preempted):
        train(tmp_path, hooks=[names, terminated()], checkpoint_every=4)
    steps = [path.name for path in names.given if path.name.isdigit()]
    assert steps == [f"{4:012d}"]


def test_a_preempted_run_tells_every_step_once(tmp_path, default_signals):
    train(tmp_path / "whole")
    with pytest.raises(Preempted):
        train(tmp_path / "run", hooks=[terminated()])
    train(tmp_path / "run", hooks=[faults.Injector(())])
    losses = [[row["loss"] for row in metrics(tmp_path / d)] for d in ("run", "whole")]
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]


def squares(state, batch):
    return {"loss": (batch["x"] @ state["params"]["w1"].sum(1) - batch["y"]) ** 2}


def long_evaluation(*, asks):
    """A dataset for evaluation that asks the run to stop while it is read."""
    asked = []

    def input_fn(context):
        for number in range(20):
            yield regression_batch(256, seed=number)
            if asks and number == 3 and not asked:
                # Not before the run has begun: its first batch is tried on its own.
                asked.append(os.kill(os.getpid(), signal.SIGTERM))

    return input_fn


def evaluated(directory):
    rows = metrics(directory)
    return [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]


@pytest.mark.parametrize("every_steps", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_run_leaves_an_evaluation_and_makes_it_when_it_goes_on(
    tmp_path, default_signals, every_steps
):
    options = {"eval_fn": squares, "eval_every": every_steps}
    asks = long_evaluation(asks=True)
    with pytest.raises(Preempted) as ended:
        train(tmp_path / "run", eval_dataset=asks, **options)
    assert ended.value.step == min(every_steps, 10)
    assert evaluated(tmp_path / "run") == []
    result = train(tmp_path / "run", eval_dataset=asks, **options)
    whole = long_evaluation(asks=False)
    wanted = train(tmp_path / "whole", eval_dataset=whole, **options)
    assert result.evaluation == wanted.evaluation
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "whole")


@pytest.mark.slow
def test_what_an_evaluation_finds_that_was_left_ranks_its_step(
    tmp_path, default_signals
):
    options = {"eval_fn": squares, "eval_every": 4, "follow": Follow("loss")}
    options["retention"] = Retention(keep_last=1, keep_best=1, metric="eval/loss")
    asks = long_evaluation(asks=True)
    with pytest.raises(Preempted):
        train(tmp_path, eval_dataset=asks, **options)
    best = train(tmp_path, eval_dataset=asks, **options).best.step
    store = CheckpointStore(tmp_path / "saved", retention=options["retention"])
    assert store.best == best


def test_an_evaluation_that_was_left_is_made_once(tmp_path, default_signals):
    options = {"eval_fn": squares, "eval_every": 4}
    with pytest.raises(Preempted):
        train(tmp_path, eval_dataset=long_evaluation(asks=True), **options)
    whole = options | {"eval_dataset": long_evaluation(asks=False)}
    with pytest.raises(RuntimeError, match="cut"):
        train(tmp_path, hooks=[Cuts(at=5)], **whole)
    train(tmp_path, **whole)
    assert [step for step, _ in evaluated(tmp_path)] == [4, 8, 10]


def test_a_last_evaluation_that_is_left_is_not_the_end(tmp_path, default_signals):
    options = {"eval_fn": squares, "eval_every": 100}
    ends = Cuts(at=None)
    with pytest.raises(Preempted) as ended:
        train(
            tmp_path, eval_dataset=long_evaluation(asks=True), hooks=[ends], **options
        )
    assert (ended.value.step, ends.ends) == (10, [])
    for _ in range(2):
        whole = long_evaluation(asks=False)
        train(tmp_path, eval_dataset=whole, hooks=[ends], **options)
    assert (ends.ends, [step for step, _ in evaluated(tmp_path)]) == ([10], [10])


@pytest.mark.slow
def test_a_run_that_leaves_an_evaluation_again_says_after_which_step(
    tmp_path, default_signals
):
    options = {"eval_fn": squares, "eval_every": 4}
    for _ in range(2):
        with pytest.raises(Preempted) as ended:
            train(tmp_path, eval_dataset=long_evaluation(asks=True), **options)
        assert ended.value.step == 4


class Cuts(Hook):
    """Cuts a run short behind a step; notes its end."""

    def __init__(self, at):
        self._at, self.ends = at, []

    def on_state(self, event):
        if event.step == self._at:
            raise RuntimeError("cut")

    def on_end(self, event):
        self.ends.append(event.step)


def test_all_processes_leave_an_evaluation_at_the_same_block(monkeypatch):
    monkeypatch.setattr(stop_agreement, "_LOOK_S", 0.01)
    board, collective = Board(3), Collective(3, ahead=2)
    agreements = [StopAgreement(board.of(process)) for process in range(3)]
    left = {}

    def run(process):
        agreement = agreements[process]
        agreement.start()
        assert agreement.reached(1) is None
        for block in range(100_000):
            if (process, block) == (1, 5):
                agreement.want("SIGTERM")
            collective.step(process)
            if agreement.reached_block() is not None:
                left[process] = block, agreement.reached(2)
                return

    threads = [threading.Thread(target=run, args=(p,)) for p in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for agreement in agreements:
        agreement.close()
    assert len(left) == 3
    assert len(set(left.values())) == 1
    assert left[0][0] > 5
    assert left[0][1] == StopPoint(signal="SIGTERM", step=2)


def test_a_run_with_several_steps_per_call_stops_between_calls(
    tmp_path, default_signals
):
    with pytest.raises(Preempted) as ended:
        train(
            tmp_path,
            steps=20,
            steps_per_call=4,
            hooks=[terminated("terminate at step 6")],
        )
    assert ended.value.step == 8


def test_a_signal_in_the_last_step_ends_the_program_after_the_run(
    tmp_path, default_signals
):
    with pytest.raises(Preempted):
        train(tmp_path, hooks=[terminated("terminate at step 10")])
    assert CheckpointStore(tmp_path / "saved").restore().step == 10
    assert train(tmp_path).step == 10


def test_a_storm_while_it_saves_tears_nothing(tmp_path, default_signals, monkeypatch):
    save = CheckpointStore.save

    def save_in_a_storm(store, snapshot):
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
        save(store, snapshot)

    monkeypatch.setattr(CheckpointStore, "save", save_in_a_storm)
    with pytest.raises(Preempted):
        train(tmp_path, hooks=[terminated()])
    assert CheckpointStore(tmp_path / "saved").restore().step == 4


def test_a_run_that_is_not_saved_leaves_signals_alone():
    before, found = handlers(), []
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    look = Callback(lambda event: found.append(handlers()), every(n_steps=1))
    rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=2,
        hooks=[look],
        display=False,
    )
    assert found == [before, before]


class Collective:
    """Lets no process be more than `ahead` steps before the slowest."""

    def __init__(self, count, ahead):
        self._steps = [0] * count
        self._ahead = ahead
        self._moved = threading.Condition()

    def step(self, process):
        with self._moved:
            self._steps[process] += 1
            self._moved.notify_all()
            assert self._moved.wait_for(
                lambda: self._steps[process] - min(self._steps) < self._ahead, 60
            ), "the processes wait for each other"


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("asked_at", [0, 3])
@pytest.mark.parametrize("fails_once", [(), ("passed",)])
def test_all_processes_stop_at_the_same_step(monkeypatch, ahead, asked_at, fails_once):
    monkeypatch.setattr(stop_agreement, "_LOOK_S", 0.01)
    count = 3
    board, collective = Board(count, fails_once=fails_once), Collective(count, ahead)
    agreements = [StopAgreement(board.of(process)) for process in range(count)]
    stops = {}

    def run(process):
        agreement = agreements[process]
        agreement.start()
        step, stop = 0, None
        while stop is None and step < 100_000:
            if (process, step) == (1, asked_at):
                agreement.want("SIGTERM")
            collective.step(process)
            step += 1
            stop = agreement.reached(step)
        stops[process] = stop

    threads = [threading.Thread(target=run, args=(p,)) for p in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for agreement in agreements:
        agreement.close()
    assert set(stops) == {0, 1, 2}
    assert len(set(stops.values())) == 1
    assert stops[0].signal == "SIGTERM"
    assert stops[0].step > asked_at


def test_a_process_whose_run_is_over_holds_up_none_that_is_asked_later(monkeypatch):
    monkeypatch.setattr(stop_agreement, "_LOOK_S", 0.01)
    board = Board(2)
    over, asked = (StopAgreement(board.of(p), answer_s=600) for p in range(2))
    for agreement in (over, asked):
        agreement.start()
    over.reached(7)
    over.close()
    asked.reached(6)
    asked.want("SIGTERM")
    asked._thread.join(60)
    assert not asked._thread.is_alive()
    assert asked.reached(7) is None
    assert asked.reached(8) == StopPoint(signal="SIGTERM", step=8)
    asked.close()


def test_a_process_that_never_answers_holds_nobody_for_ever(monkeypatch, caplog):
    monkeypatch.setattr(stop_agreement, "_LOOK_S", 0.01)
    board = Board(2)
    agreement = StopAgreement(board.of(0), answer_s=0.2)
    agreement.start()
    agreement.want("SIGTERM")
    agreement._thread.join(60)
    assert agreement.reached(6) == StopPoint(signal="SIGTERM", step=6)
    assert "Processes [1] did not report their step within 0.2 s" in caplog.text
    agreement.close()

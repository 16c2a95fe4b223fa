"""A run goes back to its last good checkpoint, past the batch that led it astray."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from replicator.checkpoint.retention import Retention
from replicator.checkpoint.snapshot import Snapshot
from replicator.checkpoint.store import CheckpointStore
from replicator.engine.compiled_step import CompiledStep, CompileOptions
from replicator.engine.step.state import first_run
from replicator.engine.step.transforms import count_steps, lift
from replicator.errors import NonFiniteError, SpikeError
from replicator.hooks import Hook, MetricsEvent
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position, position_from_json
from replicator.monitoring.events import EventLog, read_events
from replicator.monitoring.progress import Progress
from replicator.training.nonfinite.policy import BadNumber, History, RecoveryPolicy
from replicator.training.nonfinite.rollback import (
    GoingBack,
    Recovery,
    make_recovery,
)
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import LoopPlan
from tests.fakes import FakeClock
from tests.loops import run_loop
from tests.steps import assert_equal_bits, regression_batch, replicas, trainer

STEPS = 9


class Look(Hook):
    """Tells the first metric that is not finite, `late` steps after it."""

    def __init__(self, tell, late):
        self._tell, self._late, self._found = tell, late, None

    def on_metrics(self, event):
        if self._found is None and not np.isfinite(event.metrics["loss"]):
            self._found = event.step
        if self._found is not None and event.step >= self._found + self._late:
            self._tell(
                BadNumber(kind="nonfinite", step=self._found, leaf="loss", found="nan")
            )


class Save(Hook):
    """Saves durably every so many steps, so that tests know what is there."""

    def __init__(self, store, recovery, n_steps):
        self._store, self._recovery, self._n_steps = store, recovery, n_steps

    def on_state(self, event):
        if event.step % self._n_steps == 0:
            meta = {
                "position": event.position.as_json(),
                "bad_numbers": self._recovery.state_dict(),
            }
            self._store.save(Snapshot(step=event.step, arrays=event.state, meta=meta))

    def close(self):
        self._store.close()


class Cut(Exception):
    """What cuts a run short."""


class CutAt(Hook):
    def __init__(self, step):
        self._step = step

    def on_state(self, event):
        if event.step == self._step:
            raise Cut


class Run:
    """A run as `replicator.training.session` wires it, small."""

    def __init__(self, directory, dataset, *, policy=None, n=2):
        rep = replicas(n)
        init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
        self.first = lambda: first_run(init_fn, rep.layout, seed=0).born()
        self.layout = rep.layout
        update = count_steps(lift(step_fn))
        self.step = CompiledStep(update, rep.layout, CompileOptions())
        self.dataset = dataset
        self.directory = directory
        self.recovery = Recovery(
            policy or RecoveryPolicy(on_nonfinite="rollback"),
            journal=EventLog(directory),
        )
        self.restored_at = []

    def store(self):
        return CheckpointStore(
            self.directory / "ckpt", retention=Retention(keep_last=100)
        )

    def go(self, *, late=0, cut_at=None, save_every=2):
        def discard_after(step):
            with self.store() as store:
                store.discard_after(step)

        while True:
            try:
                return self._attempt(late, cut_at, save_every)
            except GoingBack as signal:
                discard_after(signal.before_step - 1)

    def _attempt(self, late, cut_at, save_every):
        store = self.store().open()
        state, position = self.first(), Position()
        found = store.restore(state, shardings=self.layout.state_shardings(state))
        if found is not None:
            state, position = found.arrays, position_from_json(found.meta["position"])
            self.recovery.load_state(found.meta["bad_numbers"])
        start = int(state.step)
        self.restored_at.append(start)
        self.recovery.resume_at(start)
        batches = open_input(
            self.dataset,
            self.layout,
            options=InputOptions(allow_nan=True),
            start=position,
        )
        return run_loop(
            self.step,
            state,
            self.recovery.watch(batches),
            plan=LoopPlan(steps=STEPS, start_step=start),
            report_bad=None,
            hooks=[
                Save(store, self.recovery, save_every),
                Look(self.recovery.handle, late),
                *([CutAt(cut_at)] if cut_at else []),
            ],
        )


def good(seed):
    return regression_batch(8, seed=seed)


def bad(seed):
    batch = good(seed)
    batch["x"][3, 1] = np.nan
    return batch


def dataset(*bad_ones, size=12):
    return [bad(seed) if seed in bad_ones else good(seed) for seed in range(size)]


def control(directory, *bad_ones):
    """Run over the good batches alone."""
    batches = [good(seed) for seed in range(12) if seed not in bad_ones]
    return Run(directory, batches).go().state.user


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_run_comes_out_as_if_the_batch_had_not_been(tmp_path, late):
    run = Run(tmp_path / "run", dataset(4))
    result = run.go(late=late)
    assert_equal_bits(result.state.user, control(tmp_path / "control", 4))
    assert run.restored_at == [0, 4]
    assert run.recovery.history == History(rollbacks=1, back_to=4, left_out=(4,))


def test_a_checkpoint_saved_before_the_bad_step_was_noticed_does_not_count(tmp_path):
    run = Run(tmp_path / "run", dataset(4))
    run.go(late=3)  # steps 6 and 8 were saved with NaN in them
    state = run.store().restore(step=6).arrays
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_where_no_checkpoint_is_left_the_run_begins_anew(tmp_path):
    run = Run(tmp_path / "run", dataset(1))
    result = run.go(save_every=5)
    assert run.restored_at == [0, 0]
    assert_equal_bits(result.state.user, control(tmp_path / "control", 1))


def test_several_bad_batches_are_left_out_one_after_the_other(tmp_path):
    run = Run(tmp_path / "run", dataset(2, 5, 6))
    result = run.go(late=1)
    assert run.recovery.history.left_out == (2, 5, 6)
    assert_equal_bits(result.state.user, control(tmp_path / "control", 2, 5, 6))


@pytest.mark.parametrize("cut_at", [5, 6, 8])
def test_a_run_that_was_cut_short_after_it_went_back_comes_out_the_same(
    tmp_path, cut_at
):
    first = Run(tmp_path / "run", dataset(4))
    with pytest.raises(Cut):
        # The bad step is the 5th: cut while it is done again, or later.
        first.go(late=0, cut_at=cut_at)
    second = Run(tmp_path / "run", dataset(4))
    result = second.go()
    assert_equal_bits(result.state.user, control(tmp_path / "control", 4))


def test_it_gives_up_after_so_many_times(tmp_path):
    policy = RecoveryPolicy(on_nonfinite="rollback", max_rollbacks=2)
    run = Run(tmp_path / "run", dataset(*range(3, 12)), policy=policy)
    with pytest.raises(NonFiniteError, match="at step 4, after 2 rollbacks") as failure:
        run.go()
    assert (failure.value.step, failure.value.leaf) == (4, "loss")


def test_going_back_is_noted_in_the_journal(tmp_path):
    Run(tmp_path / "run", dataset(4)).go()
    events = [e for e in read_events(tmp_path / "run") if e["kind"] == "rolled_back"]
    [event] = events
    assert (event["step"], event["leaf"], event["batch"]) == (5, "loss", 4)


def told(event, **policy):
    Recovery(RecoveryPolicy(**policy)).handle(event)


def shown(step, loss):
    progress = Progress(FakeClock(), steps=None)
    return MetricsEvent(
        step=step,
        advanced=1,
        examples=0,
        progress=progress.update(step=step, examples=0, stall_s=0),
        read_metrics=lambda: {"loss": np.float32(loss)},
    )


def test_a_spike_is_found_at_its_step_and_the_window_goes_on_after_a_resume():
    spikes, policy = Spikes(), RecoveryPolicy(on_spike="raise")
    first, second = (Recovery(policy, spikes=spikes) for _ in range(2))
    for step in range(1, 21):
        first.on_metrics(shown(step, 2.0 + step % 2))
    second.load_state(first.state_dict())
    with pytest.raises(SpikeError, match="at step 21") as failure:
        second.on_metrics(shown(21, 99.0))
    assert failure.value.step == 21


def test_a_spike_that_stops_the_run_is_an_error_of_its_own():
    spike = BadNumber(kind="spike", step=3, leaf="loss", found="9 where 2 is usual")
    with pytest.raises(SpikeError, match="got 9 where 2 is usual at step 3"):
        told(spike, on_spike="raise")


def test_a_spike_can_take_the_run_back():
    spike = BadNumber(kind="spike", step=3, leaf="loss", found="9", call=2)
    with pytest.raises(GoingBack) as signal:
        told(spike, on_spike="rollback")
    assert signal.value.before_step == 3


def test_history_comes_back_from_a_checkpoint_unless_the_run_knows_more():
    recovery = Recovery(RecoveryPolicy())
    old, new = History(left_out=(2,)), History(rollbacks=2, left_out=(2, 5))
    for saved in (new, old):
        recovery.load_state({"history": dataclasses.asdict(saved), "seen": [1.0]})
    assert recovery.history == new
    assert recovery.state_dict() == {"history": dataclasses.asdict(new), "seen": [1.0]}


def test_by_default_an_optimizer_that_skips_by_itself_is_left_alone():
    skipping = replicas(1).wrap_optimizer(optax.sgd(0.1), skip_nonfinite=True)
    plain = replicas(1).wrap_optimizer(optax.sgd(0.1))
    states = [each.init(np.ones(3, np.float32)) for each in (skipping, plain)]
    found = [make_recovery(state).policy.on_nonfinite for state in states]
    assert found == ["ignore", "raise"]
    assert make_recovery(states[0]).ignores


def test_what_a_user_says_makes_the_policy():
    spikes = Spikes(action="rollback")
    recovery = make_recovery({}, on_nonfinite="skip", spikes=spikes)
    assert recovery.policy == RecoveryPolicy(on_nonfinite="skip", on_spike="rollback")
    assert recovery.policy.goes_back

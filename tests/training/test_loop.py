"""The loop: real tiny steps on eight devices, plain batches, a fake clock."""

import dataclasses
import functools
import json
import math
import traceback
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from replicator.base.mesh import replicated, split_over_replicas
from replicator.errors import ArgumentError, BatchError, NonFiniteError
from replicator.hooks import Callback, Hook, StateCallback, WriteMetrics, every
from replicator.monitoring.phases import Phases
from replicator.training.options import LoopPlan
from replicator.writers import JSONL, Async
from tests import loops
from tests.fakes import FakeClock, RecordingWriter

EXAMPLES = 16


def run_loop(step, state, batches, **arguments):
    """Run the loop with a step that takes the arrays of a batch alone."""
    return loops.run_loop(
        lambda state, batch: step(state, batch.value), state, batches, **arguments
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    value: jax.Array
    examples: int = EXAMPLES
    steps: int = 1
    position: object = None


class Batches:
    """Batches of a list; each costs `seconds` of a fake clock, all of it stall."""

    def __init__(self, batches, *, clock=None, seconds=0.0):
        self._batches = iter(batches)
        self._clock = clock
        self._seconds = seconds
        self.stall_s = 0.0
        self.taken = 0
        self.closed = False

    def __next__(self):
        batch = next(self._batches)
        if self._clock is not None:
            self._clock.advance(self._seconds)
            self.stall_s += self._seconds
        self.taken += 1
        return batch

    def close(self):
        self.closed = True


def batch_of(mesh, number):
    values = np.full((EXAMPLES,), number, np.float32)
    return Batch(jax.device_put(values, split_over_replicas(mesh)))


def batches_of(mesh, *numbers):
    return Batches([batch_of(mesh, number) for number in numbers])


def stacked_batches(mesh, *rows):
    sharding = split_over_replicas(mesh, axis=1)
    return Batches(
        Batch(
            jax.device_put(
                np.repeat(np.asarray(row, np.float32)[:, None], EXAMPLES, 1), sharding
            ),
            examples=EXAMPLES * len(row),
            steps=len(row),
        )
        for row in rows
    )


@pytest.fixture
def state(mesh):
    return {"sum": jax.device_put(np.float32(0.0), replicated(mesh))}


@pytest.fixture
def step(mesh):
    """Return a step whose state is the sum of the batches' means."""

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P()
    )
    def per_replica(state, batch):
        loss = jax.lax.pmean(batch.mean(), "replica")
        return {"sum": state["sum"] + loss}, {
            "loss": loss,
            "parts": {"twice": 2 * loss},
        }

    return jax.jit(per_replica, donate_argnums=0)


@pytest.fixture
def scanned_step(mesh):
    """Return a step that makes as many updates as its batch has rows."""

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "replica")), out_specs=P()
    )
    def per_replica(state, batches):
        def update(state, batch):
            loss = jax.lax.pmean(batch.mean(), "replica")
            return {"sum": state["sum"] + loss}, {"loss": loss}

        return jax.lax.scan(update, state, batches)

    return jax.jit(per_replica, donate_argnums=0)


class Recorder(Hook):
    """Writes down what it is told, and closes."""

    def __init__(self, log=None):
        self.log = [] if log is None else log

    def on_state(self, event):
        self.log.append(("state", event.step))

    def on_metrics(self, event):
        self.log.append(("metrics", event.step))

    def on_end(self, event):
        self.log.append(("end", event.step))

    def close(self):
        self.log.append(("close", None))


def test_a_run_returns_state_counts_and_the_last_metrics(step, state, mesh):
    batches = batches_of(mesh, 1, 2, 3, 4)
    result = run_loop(step, state, batches, plan=LoopPlan(steps=3))
    assert float(result.state["sum"]) == 6.0
    assert (result.step, result.examples) == (3, 3 * EXAMPLES)
    assert result.metrics == {"loss": 3.0, "parts": {"twice": 6.0}}
    assert type(result.metrics["loss"]) is float
    assert (batches.taken, batches.closed) == (3, True)


def test_the_next_step_is_dispatched_before_metrics_are_shown(step, state, mesh):
    log = []

    def logged_step(state, batch):
        log.append(("dispatch", None))
        return step(state, batch)

    hooks, batches = [Recorder(log)], batches_of(mesh, 1, 2)
    run_loop(logged_step, state, batches, plan=LoopPlan(steps=2), hooks=hooks)
    assert log == [
        ("dispatch", None),
        ("state", 1),
        ("dispatch", None),
        ("metrics", 1),
        ("state", 2),
        ("metrics", 2),
        ("end", 2),
        ("close", None),
    ]


def test_hooks_see_the_metrics_and_the_state_of_their_step(step, state, mesh):
    losses, sums = {}, {}
    hooks = [
        Callback(
            lambda event: losses.update({event.step: float(event.metrics["loss"])}),
            every(n_steps=2),
        ),
        StateCallback(
            lambda event: sums.update({event.step: float(event.state["sum"])}),
            every(n_steps=3),
        ),
    ]
    batches = batches_of(mesh, *range(1, 7))
    run_loop(step, state, batches, plan=LoopPlan(steps=6), hooks=hooks)
    assert losses == {2: 2.0, 4: 4.0, 6: 6.0}
    assert sums == {3: 6.0, 6: 21.0}


def test_a_state_that_went_into_the_next_step_cannot_be_read(step, state, mesh):
    events = []
    hooks = [StateCallback(events.append, every(n_steps=1))]
    run_loop(step, state, batches_of(mesh, 1, 2), plan=LoopPlan(steps=2), hooks=hooks)
    with pytest.raises(ArgumentError, match=r"`event\.state` must be read before"):
        _ = events[0].state
    assert float(events[1].state["sum"]) == 3.0


def test_an_event_that_is_kept_does_not_keep_the_state(step, state, mesh):
    kept, gone = [], []

    def keep(event):
        kept.append(event)
        gone.append(weakref.ref(event.state["sum"]))

    hooks = [StateCallback(keep, every(n_steps=1))]
    run_loop(step, state, batches_of(mesh, 1, 2), plan=LoopPlan(steps=2), hooks=hooks)
    assert gone[0]() is None


def test_a_call_of_several_steps_shows_each_step_in_order(scanned_step, state, mesh):
    seen, recorder = [], Recorder()
    each = Callback(
        lambda event: seen.append((event.step, event.metrics["loss"], event.examples)),
        every(n_steps=1),
    )
    batches = stacked_batches(mesh, [1, 2, 3], [4, 5, 6])
    plan = LoopPlan(steps=6, steps_per_call=3)
    result = run_loop(scanned_step, state, batches, plan=plan, hooks=[each, recorder])
    assert seen == [(i, float(i), i * EXAMPLES) for i in range(1, 7)]
    assert [step for kind, step in recorder.log if kind == "state"] == [3, 6]
    assert result.metrics == {"loss": 6.0}


def test_every_few_steps_is_exact_within_calls_of_several(scanned_step, state, mesh):
    writer = RecordingWriter()
    hooks = [WriteMetrics(writer, every(n_steps=2))]
    batches = stacked_batches(mesh, [1, 2, 3], [4, 5, 6])
    plan = LoopPlan(steps=6, steps_per_call=3)
    run_loop(scanned_step, state, batches, plan=plan, hooks=hooks)
    assert [(step, row["loss"]) for step, row in writer.rows] == [
        (2, 2),
        (4, 4),
        (6, 6),
    ]


def test_a_resumed_run_counts_on(step, state, mesh):
    writer = RecordingWriter()
    hooks = [WriteMetrics(writer, every(n_steps=5))]
    plan = LoopPlan(steps=10, start_step=7)
    result = run_loop(step, state, batches_of(mesh, 1, 2, 3, 4), plan=plan, hooks=hooks)
    assert (result.step, result.examples, writer.steps) == (10, 3 * EXAMPLES, [10])


def test_without_steps_a_run_ends_with_its_input(step, state, mesh):
    recorder, batches = Recorder(), batches_of(mesh, 1, 2, 3)
    plan = LoopPlan(steps=None)
    result = run_loop(step, state, batches, plan=plan, hooks=[recorder])
    assert (result.step, float(result.state["sum"])) == (3, 6.0)
    assert recorder.log[-3:] == [("metrics", 3), ("end", 3), ("close", None)]


@pytest.mark.parametrize("start_step", [5, 7])
def test_a_run_that_is_done_already_takes_no_batch(step, state, mesh, start_step):
    batches = batches_of(mesh, 1)
    plan = LoopPlan(steps=5, start_step=start_step)
    result = run_loop(step, state, batches, plan=plan)
    assert (result.step, result.metrics, batches.taken) == (start_step, None, 0)


def test_input_that_ends_early_is_an_error(step, state, mesh):
    recorder = Recorder()
    batches = batches_of(mesh, 1, 2, 3)
    with pytest.raises(ArgumentError) as caught:
        run_loop(step, state, batches, plan=LoopPlan(steps=10), hooks=[recorder])
    assert str(caught.value) == (
        "`dataset` must last for 10 steps, got its end after step 3. "
        "Repeat it, or pass `steps=None` to run until it ends."
    )
    assert recorder.log[-2:] == [("metrics", 3), ("close", None)]


def test_a_batch_that_does_not_fit_into_the_rest_is_an_error(scanned_step, state, mesh):
    batches = stacked_batches(mesh, [1, 2], [3], [4, 5])
    plan = LoopPlan(steps=4, steps_per_call=2)
    with pytest.raises(BatchError, match="got one of 2 steps with 1 left"):
        run_loop(scanned_step, state, batches, plan=plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"steps": 10, "steps_per_call": 4},
            "`steps` must be a multiple of `steps_per_call`, got 10 for 4. "
            "Use 8 or 12.",
        ),
        (
            {"steps": 3, "steps_per_call": 4},
            "`steps` must be a multiple of `steps_per_call`, got 3 for 4. Use 4.",
        ),
        (
            {"steps": 12, "steps_per_call": 4, "start_step": 6},
            "`steps` must be a multiple of `steps_per_call` from step 6 on, "
            "got 12 for 4. Use 10 or 14.",
        ),
        (
            {"steps": -1},
            "`steps` must be at least 0, got -1. "
            "Pass `steps=None` to run until the input ends.",
        ),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ArgumentError) as caught:
        LoopPlan(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("n_steps", [1, 3, 1000], ids=["read", "between", "never read"])
def test_the_first_metric_that_is_not_finite_is_named(step, state, mesh, n_steps):
    writer = RecordingWriter()
    hooks = [WriteMetrics(writer, every(n_steps=n_steps))]
    batches = batches_of(mesh, 1, math.inf, math.nan, 4, 5)
    with pytest.raises(NonFiniteError) as caught:
        run_loop(step, state, batches, plan=LoopPlan(steps=5), hooks=hooks)
    assert str(caught.value) == (
        "`loss` must be finite, got inf at step 2. Look at the batch and the learning "
        'rate, or pass `on_nonfinite="ignore"`.'
    )
    assert writer.calls[-1] == "close"


def test_the_step_is_named_within_a_call_of_several(scanned_step, state, mesh):
    batches = stacked_batches(mesh, [1, 2, 3], [4, math.nan, math.nan])
    plan = LoopPlan(steps=6, steps_per_call=3)
    with pytest.raises(
        NonFiniteError, match="`loss` must be finite, got nan at step 5"
    ):
        run_loop(scanned_step, state, batches, plan=plan)


def test_a_long_run_whose_metrics_nobody_reads_stops_before_its_end(step, state, mesh):
    batches = batches_of(mesh, math.nan, *[1] * 99)
    with pytest.raises(NonFiniteError, match="at step 1"):
        run_loop(step, state, batches, plan=LoopPlan(steps=100))
    assert batches.taken <= 65


class TimeOfAll:
    """The time that several processes have agreed on; told anew at each fifth step."""

    def at(self, step, now_s):
        return float(step // 5)


@pytest.mark.parametrize("n_steps", [1, 3, 1000], ids=["read", "between", "never read"])
def test_a_process_that_reads_metrics_finds_no_bad_number_before_the_others(
    step, state, mesh, n_steps
):
    batches = batches_of(mesh, *[1] * 6, math.nan, *[1] * 30)
    with pytest.raises(NonFiniteError, match="at step 7"):
        run_loop(
            step,
            state,
            batches,
            plan=LoopPlan(steps=37),
            hooks=[WriteMetrics(RecordingWriter(), every(n_steps=n_steps))],
            agreed_time=TimeOfAll(),
        )
    # Step 10 is the first with a new time; its metrics are shown one call late.
    assert batches.taken == 11


def test_a_vector_with_one_number_that_is_not_finite_is_named(state, mesh):
    def step(state, batch):
        return state, {"per_replica": batch.reshape(8, -1)[:, 0]}

    bad = np.ones(EXAMPLES, np.float32)
    bad[6] = -np.inf
    batches = Batches([Batch(jax.device_put(bad, split_over_replicas(mesh)))])
    with pytest.raises(NonFiniteError, match="`per_replica` must be finite, got -inf"):
        run_loop(jax.jit(step), state, batches, plan=LoopPlan(steps=1))


def test_what_is_not_finite_can_be_ignored(step, state, mesh):
    batches = batches_of(mesh, math.nan, 1)
    result = run_loop(step, state, batches, plan=LoopPlan(steps=2), report_bad=None)
    assert (result.step, result.metrics["loss"]) == (2, 1.0)


class Boom(Exception):
    pass


def raise_boom(*_):
    raise Boom


def failing_input(mesh):
    yield batch_of(mesh, 1)
    raise_boom()


@pytest.mark.parametrize("source", ["step", "input", "hook"])
def test_an_error_keeps_its_traceback_and_everything_is_closed(
    source, step, state, mesh
):
    batches = Batches(failing_input(mesh)) if source == "input" else batches_of(mesh, 1)
    hooks = [recorder := Recorder()]
    if source == "hook":
        hooks.append(StateCallback(raise_boom, every(n_steps=1)))
    with pytest.raises(Boom) as caught:
        run_loop(
            raise_boom if source == "step" else step,
            state,
            batches,
            plan=LoopPlan(steps=2),
            hooks=hooks,
        )
    assert traceback.extract_tb(caught.tb)[-1].name == "raise_boom"
    assert recorder.log[-1] == ("close", None)
    assert ("end", 1) not in recorder.log
    assert batches.closed


def test_an_interrupt_closes_everything_and_goes_on(step, state, mesh):
    def interrupt(_):
        raise KeyboardInterrupt

    batches, recorder = batches_of(mesh, 1, 2, 3), Recorder()
    hooks = [recorder, Callback(interrupt, every(n_steps=1))]
    with pytest.raises(KeyboardInterrupt):
        run_loop(step, state, batches, plan=LoopPlan(steps=3), hooks=hooks)
    assert recorder.log[-1] == ("close", None)
    assert batches.closed


class Unclosable(Hook):
    def close(self):
        raise Boom("will not close")


def test_what_fails_while_closing_is_raised_when_all_is_closed(step, state, mesh):
    batches, recorder = batches_of(mesh, 1), Recorder()
    hooks = [Unclosable(), recorder]
    with pytest.raises(Boom, match="will not close"):
        run_loop(step, state, batches, plan=LoopPlan(steps=1), hooks=hooks)
    assert recorder.log[-2:] == [("end", 1), ("close", None)]
    assert batches.closed


def test_what_fails_while_closing_does_not_hide_the_error_before_it(state, mesh):
    def bad_step(state, batch):
        raise ValueError("the cause")

    batches = batches_of(mesh, 1)
    with pytest.raises(ValueError, match="the cause") as caught:
        run_loop(bad_step, state, batches, plan=LoopPlan(steps=1), hooks=[Unclosable()])
    assert caught.value.__notes__ == ["Closing failed, too: Boom('will not close')"]


def test_a_run_makes_no_implicit_transfer(step, state, mesh):
    writer = RecordingWriter()
    hooks = [WriteMetrics(writer, every(n_steps=1000))]
    batches = batches_of(mesh, *range(70))
    with jax.transfer_guard("disallow"):
        run_loop(step, state, batches, plan=LoopPlan(steps=70), hooks=hooks)
    assert writer.steps == [70]


def test_a_step_of_plain_numbers_runs_too():
    def plain_step(state, batch):
        return state + batch, {"loss": float(batch)}

    batches = Batches([Batch(value) for value in (1, 2, 3)])
    result = run_loop(plain_step, 0, batches, plan=LoopPlan(steps=3))
    assert (result.state, result.metrics) == (6, {"loss": 3.0})


def test_a_step_without_metrics_runs_too(state, mesh):
    @functools.partial(jax.jit, donate_argnums=0)
    def silent(state, batch):
        return {"sum": state["sum"] + batch.mean()}, {}

    result = run_loop(silent, state, batches_of(mesh, 1, 2), plan=LoopPlan(steps=2))
    assert (float(result.state["sum"]), result.metrics) == (3.0, {})


def test_rates_come_from_the_clock(step, state, mesh):
    clock = FakeClock()

    def timed_step(state, batch):
        clock.advance(0.375)
        return step(state, batch)

    numbers = [batch_of(mesh, 1) for _ in range(9)]
    batches = Batches(numbers, clock=clock, seconds=0.125)
    plan = LoopPlan(steps=9)
    progress = run_loop(
        timed_step, state, batches, plan=plan, phases=Phases(clock)
    ).progress
    assert (progress.compile_s, progress.elapsed_s) == (0.375, 4.5)
    assert (progress.steps_per_s, progress.examples_per_s) == (2.0, 2.0 * EXAMPLES)
    assert (progress.input_stall_share, progress.eta_s) == (0.25, 0.0)


class Loss(float):
    """A metric that devices compute, or have computed."""

    under_way = True

    def is_ready(self):
        return not self.under_way


@pytest.mark.parametrize(("under_way", "waited_s"), [(True, 0.5), (False, 1.5)])
def test_input_that_devices_do_not_wait_for_is_no_loss(
    monkeypatch, under_way, waited_s
):
    monkeypatch.setattr(Loss, "under_way", under_way)
    clock = FakeClock()
    batches = Batches([Batch(value) for value in (1, 2, 3)], clock=clock, seconds=0.5)
    phases = Phases(clock)
    run_loop(
        lambda state, batch: (state + batch, {"loss": Loss(batch)}),
        0,
        batches,
        plan=LoopPlan(steps=3),
        phases=phases,
    )
    assert phases.seconds()["input"] == waited_s  # there is nothing before the first
    assert sum(phases.seconds().values()) == 1.5


def test_a_run_leaves_a_file_of_its_numbers(step, state, mesh, tmp_path):
    path = tmp_path / "metrics.jsonl"
    hooks = [WriteMetrics(Async(JSONL(path)), every(n_steps=2))]
    batches = batches_of(mesh, *range(1, 6))
    run_loop(step, state, batches, plan=LoopPlan(steps=5), hooks=hooks)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [
        (2, 2.0),
        (4, 4.0),
        (5, 5.0),
    ]
    assert [row["parts/twice"] for row in rows] == [4.0, 8.0, 10.0]


def test_a_run_of_one_step_has_no_rate(step, state, mesh):
    progress = run_loop(
        step, state, batches_of(mesh, 1), plan=LoopPlan(steps=1)
    ).progress
    assert progress.steps_per_s is None
    assert progress.elapsed_s >= progress.compile_s > 0


def test_the_time_at_the_end_includes_what_hooks_took(step, state, mesh):
    clock = FakeClock()
    hooks = [Callback(lambda event: clock.advance(1.0), every(n_steps=1))]
    batches = batches_of(mesh, 1, 2, 3)
    result = run_loop(
        step, state, batches, plan=LoopPlan(steps=3), hooks=hooks, phases=Phases(clock)
    )
    assert result.progress.elapsed_s == 3.0

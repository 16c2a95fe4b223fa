"""`run(on_nonfinite=...)` and `run(spikes=...)`, as a user has them (row 10)."""

import jax
import numpy as np
import optax
import pytest

from replicator.checkpoint import CheckpointStore
from replicator.checkpoint.copies.keeper import VARIABLE, serve_keeper
from replicator.errors import ArgumentError, NonFiniteError, SpikeError
from replicator.hooks import Hook, StateCallback, every
from replicator.inputs.options import InputOptions
from replicator.monitoring.events import read_events
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import Retention
from tests.steps import assert_equal_bits, regression_batch, replicas, trainer

STEPS = 8
BAD = 4


def good(seed):
    return regression_batch(seed=seed)


def dataset(*bad, number=np.nan, example=5):
    batches = [good(seed) for seed in range(10)]
    for place in bad:
        batches[place]["x"][example, 1] = number
    return batches


def run(batches, *, n=8, rep=None, steps=STEPS, **options):
    rep = rep or replicas(n)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
    return rep.run(
        step_fn,
        batches,
        init_fn=init_fn,
        steps=steps,
        display=False,
        inputs=InputOptions(allow_nan=True),
        **options,
    )


def control(*bad, steps=STEPS - 1, **options):
    """Train on the good batches alone."""
    batches = [batch for place, batch in enumerate(dataset()) if place not in bad]
    return run(batches, steps=steps, **options).state


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_skip_leaves_the_update_out(number, tmp_path):
    result = run(dataset(BAD, number=number), on_nonfinite="skip", directory=tmp_path)
    assert_equal_bits(result.state, control(BAD, on_nonfinite="skip"))
    assert result.metrics["skipped_updates"] == 1
    [event] = [e for e in read_events(tmp_path) if e["kind"] == "skipped"]
    assert (event["step"], event["leaf"]) == (BAD + 1, "gradient_norm")


@pytest.mark.parametrize("options", [{"steps_per_call": 2}, {"accumulate": 2}])
def test_skip_holds_with_scans_and_microbatches(options):
    result = run(dataset(BAD), on_nonfinite="skip", **options)
    assert result.metrics["skipped_updates"] == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state))


def test_skip_counts_on_after_a_resume(tmp_path):
    run(dataset(1), on_nonfinite="skip", steps=3, checkpoint_dir=tmp_path / "c")
    result = run(dataset(1, 4), on_nonfinite="skip", checkpoint_dir=tmp_path / "c")
    assert result.metrics["skipped_updates"] == 2


def test_a_run_that_died_of_a_nan_can_be_resumed_with_skip(tmp_path):
    where = {"checkpoint_dir": tmp_path / "bad", "checkpoint_every": BAD}
    with pytest.raises(NonFiniteError, match="at step 5"):
        run(dataset(BAD), **where)
    result = run(dataset(BAD), on_nonfinite="skip", **where)
    # To the checkpoint by the program without a skip: XLA may round otherwise in both.
    where = {"checkpoint_dir": tmp_path / "good", "checkpoint_every": BAD}
    run(dataset(), steps=BAD, **where)
    assert_equal_bits(result.state, control(BAD, on_nonfinite="skip", **where))


@pytest.mark.parametrize("when", [1, 2, 3, 100])
def test_rollback_comes_out_as_if_the_batch_had_not_been(tmp_path, when):
    result = run(
        dataset(BAD),
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path / "c",
        checkpoint_every=when,
        directory=tmp_path / "run",
    )
    assert_equal_bits(result.state, control(BAD, steps=STEPS))
    [event] = [e for e in read_events(tmp_path / "run") if e["kind"] == "rolled_back"]
    assert (event["step"], event["batch"]) == (BAD + 1, BAD)


def test_rollback_goes_to_the_newest_copy_in_memory(tmp_path, monkeypatch):
    (tmp_path / "launcher").mkdir(mode=0o700)
    with serve_keeper(tmp_path / "launcher") as variables:
        monkeypatch.setenv(VARIABLE, variables[VARIABLE])
        result = run(
            dataset(BAD),
            on_nonfinite="rollback",
            checkpoint_dir=tmp_path / "c",
            memory_copy_every=2,
            directory=tmp_path / "run",
        )
    assert_equal_bits(result.state, control(BAD, steps=STEPS))
    [event] = [e for e in read_events(tmp_path / "run") if e["kind"] == "resumed"]
    assert event["source"] == "memory"
    assert event["step"] in (2, BAD)  # left out while the one before is on its way


def test_what_is_compiled_is_told_once_by_each_process_of_a_run(tmp_path):
    where = {
        "directory": tmp_path / "run",
        "checkpoint_dir": tmp_path / "c",
        "checkpoint_every": 2,
    }
    run(dataset(BAD), on_nonfinite="rollback", steps=BAD + 1, **where)
    run(dataset(BAD), on_nonfinite="rollback", **where)  # goes on
    kinds = [event["kind"] for event in read_events(tmp_path / "run")]
    assert kinds.count("rolled_back") == 1
    assert kinds.count("compiled") == 2


def test_rollback_holds_with_several_steps_a_call(tmp_path):
    result = run(
        dataset(BAD),
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path / "c",
        checkpoint_every=2,
        steps_per_call=2,
    )
    assert_equal_bits(
        result.state, control(BAD, BAD + 1, steps=STEPS, steps_per_call=2)
    )


class Cut(Exception):
    pass


def cut(event):
    raise Cut


@pytest.mark.parametrize("at", [5, 6, 7])
def test_a_run_cut_short_after_it_went_back_comes_out_the_same(tmp_path, at):
    options = {
        "on_nonfinite": "rollback",
        "checkpoint_dir": tmp_path / "c",
        "checkpoint_every": 2,
    }
    with pytest.raises(Cut):
        run(dataset(2), hooks=[StateCallback(cut, every(n_steps=at))], **options)
    result = run(dataset(2), **options)
    assert_equal_bits(result.state, control(2, steps=STEPS))


def test_no_checkpoint_holds_a_bad_number(tmp_path):
    from replicator.checkpoint.store import CheckpointStore

    with pytest.raises(NonFiniteError, match="at step 5"):
        run(dataset(BAD), checkpoint_dir=tmp_path / "c", checkpoint_every=1)
    store = CheckpointStore(tmp_path / "c")
    assert max(store.steps()) <= BAD
    for step in store.steps():
        leaves = jax.tree.leaves(store.restore(step=step).arrays)
        assert all(np.isfinite(leaf).all() for leaf in leaves)


class Closing(Hook):
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_a_users_hook_is_closed_once_however_often_the_run_goes_back(tmp_path):
    hook = Closing()
    run(
        dataset(2, 5),
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path,
        checkpoint_every=2,
        hooks=[hook],
    )
    assert hook.closed == 1


class Adding(Hook):
    """Adds up steps; its state is saved."""

    def __init__(self):
        self.seen = []

    def on_state(self, event):
        self.seen.append(event.step)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = list(state["seen"])


def test_hooks_begin_anew_where_the_run_goes_back_to_its_beginning(tmp_path):
    hook = Adding()
    run(
        dataset(2),
        on_nonfinite="rollback",
        checkpoint_dir=tmp_path,
        checkpoint_every=5,
        hooks=[hook],
    )
    assert hook.seen == list(range(1, STEPS + 1))


def test_rollback_needs_checkpoints():
    with pytest.raises(
        ArgumentError, match="`checkpoint_dir` must be given to go back"
    ):
        run(dataset(), on_nonfinite="rollback")


def test_rollback_needs_an_input_that_can_be_read_again(tmp_path):
    with pytest.raises(ArgumentError, match="must be one that can be read again"):
        run(iter(dataset()), on_nonfinite="rollback", checkpoint_dir=tmp_path)


def leaping(*, at, action="log", **options):
    batches = [good(seed) for seed in range(20)]
    batches[at]["y"] = batches[at]["y"] + 100
    return run(batches, steps=20, spikes=Spikes(action=action), **options)


def test_a_spike_ends_the_run_if_it_is_to():
    with pytest.raises(
        SpikeError, match=r"`loss` must stay in its range, got .* at step 15"
    ):
        leaping(at=14, action="raise")


def test_a_spike_at_a_saved_step_takes_the_run_back_by_one_checkpoint(tmp_path):
    leaping(
        at=14,  # the batch of step 15, which is to be saved
        action="rollback",
        checkpoint_dir=tmp_path / "c",
        checkpoint_every=5,
        retention=Retention(keep_last=1),
        directory=tmp_path / "run",
    )
    events = read_events(tmp_path / "run")
    [start] = [each["step"] for each in events if each["kind"] == "resumed"]
    assert start in (5, 10)  # the latter, unless the disk was slow
    assert CheckpointStore(tmp_path / "c").steps() == (20,)


def test_a_spike_is_logged_and_the_run_goes_on(caplog):
    assert leaping(at=14).step == 20
    assert "Step 15, spike: `loss` was" in caplog.text

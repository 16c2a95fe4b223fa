"""`run` refuses bad arguments before anything is half done, and takes odd good ones."""

import json
import os
from collections import OrderedDict

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.checkpoint import CheckpointStore
from replicator.errors import ArgumentError, CheckpointInUseError
from replicator.hooks import Hook
from replicator.inputs import InputOptions
from replicator.monitoring.events import read_events
from replicator.training.options import Retention
from tests.steps import regression_batch, replicas, trainer
from tests.steps import run_plainly as run


class Counting(Hook):
    """Counts its calls; its state is JSON until a step."""

    def __init__(self, *, bad_from=100):
        self.steps = self.closed = 0
        self._bad_from = bad_from

    def on_state(self, event):
        self.steps += 1

    def close(self):
        self.closed += 1

    def state_dict(self):
        return {"mean": float("nan") if self.steps >= self._bad_from else 1.0}


@pytest.mark.parametrize(
    "bad",
    [
        {"hooks": [print]},
        {"steps": 2.5},
        {"profile": range(5, 5)},
        {"profile": "5-7"},
        {"hooks": [Counting(bad_from=0)]},
        {"checkpoint_every": 0},
        {"eval_every": 2},
        {"step_timeout": 0},
        {"step_timeout": "60"},
        {"retention": 3},
        {"follow": "loss"},
        {"spikes": "loss"},
        {"inputs": {}},
        {"seed": 0.5},
    ],
    ids=lambda wrong: str(wrong).split(" object at ")[0],
)
def test_what_is_refused_leaves_nothing_behind(tmp_path, bad):
    hook = Counting()
    options = {"hooks": [hook], "checkpoint_dir": tmp_path / "run" / "saved"} | bad
    with pytest.raises(ArgumentError, match=f"`{next(iter(bad))}`|`Counting|`eval_fn"):
        run(directory=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert hook.closed == 0


def test_a_hook_in_two_places_is_called_in_both_and_closed_once():
    hook, other = Counting(), Counting()
    run(hooks=[hook, other, hook])
    assert (hook.steps, hook.closed) == (8, 1)
    assert (other.steps, other.closed) == (4, 1)


def test_steps_may_be_a_number_of_numpy(tmp_path):
    found = run(np.int64(4), directory=tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    assert (found.step, record["arguments"]["steps"]) == (4, 4)


def test_hooks_may_come_from_a_generator():
    hook = Counting()
    run(hooks=(each for each in [hook]))
    assert (hook.steps, hook.closed) == (4, 1)


def test_a_hook_whose_state_goes_bad_later_is_named_and_what_was_saved_stays(tmp_path):
    hook = Counting(bad_from=3)
    with pytest.raises(ArgumentError, match=r"`Counting.state_dict` must return plain"):
        run(hooks=[hook], checkpoint_dir=tmp_path, checkpoint_every=2)
    assert hook.closed == 1
    assert CheckpointStore(tmp_path).steps() == (2,)


def test_leaves_whose_names_meet_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(ArgumentError, match="got two at `user/1`"):
        replicas(1).run(
            lambda state, batch: pytest.fail("a step was made"),
            [regression_batch()],
            init_fn=lambda key: OrderedDict({1: jnp.zeros(()), "1": jnp.zeros(3)}),
            steps=1,
            checkpoint_dir=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_state_larger_than_the_disk_is_refused_before_it_is_made(tmp_path):
    with pytest.raises(ArgumentError, match=r"with room .* for a state of 1.02e\+03 T"):
        replicas(1).run(
            lambda state, batch: pytest.fail("a step was made"),
            [regression_batch()],
            init_fn=lambda key: jnp.zeros(1 << 48),
            steps=1,
            checkpoint_dir=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


class RunsAnother(Hook):
    """Runs a second run inside of a first one."""

    def __init__(self, **options):
        self._options = options
        self.refused = None

    def on_end(self, event):
        with pytest.raises(CheckpointInUseError) as caught:
            run(**self._options)
        self.refused = str(caught.value)


def test_a_second_run_in_a_directory_is_refused_and_told_who_is_there(tmp_path):
    hook = RunsAnother(directory=tmp_path)
    run(directory=tmp_path, hooks=[hook])
    assert f"process {os.getpid()} on " in hook.refused
    kinds = [event["kind"] for event in read_events(tmp_path)]
    assert (kinds.count("started"), kinds.count("ended")) == (1, 1)
    run(directory=tmp_path)  # one after the other is fine


@pytest.mark.parametrize("name", ["eval", "progress", "memory"])
@pytest.mark.parametrize("nested", [True, False])
def test_a_metric_of_a_step_takes_no_name_of_the_runs(name, nested):
    metrics = {name: {"loss": 1.0}} if nested else {f"{name}/loss": 1.0}
    options = {"init_fn": lambda key: {"w": jnp.zeros(2)}, "display": False}
    with replicas(1).session(steps=1, **options) as session:
        message = f"`metrics` must leave names under `{name}/` to the run, got `{name}/"
        with pytest.raises(ArgumentError, match=message):
            session.after(metrics)
        session.after({name: 1.0})


def test_numpys_integers_are_integers_everywhere(tmp_path):
    two = np.int64(2)
    found = run(
        steps=two,
        seed=two,
        accumulate=two,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=two,
        directory=tmp_path / "records",
        write_every=two,
        inputs=InputOptions(prefetch=two),
        retention=Retention(keep_last=two),
        eval_fn=lambda state, batch: {"x": batch["y"]},
        eval_dataset=[regression_batch()],
        eval_every=two,
    )
    record = json.loads((tmp_path / "records" / "run.json").read_text())
    assert (found.step, record["arguments"]["accumulate"], record["seed"]) == (2, 2, 2)


def test_a_profile_behind_the_last_step_is_told(tmp_path, caplog):
    run(steps=2, directory=tmp_path, profile=range(5, 7))
    assert "No step of `profile=range(5, 7)` is traced: the last step is 2." in (
        caplog.messages
    )


def test_a_run_that_finds_itself_finished_says_so_without_a_display(tmp_path, caplog):
    for _ in range(2):
        run(steps=2, checkpoint_dir=tmp_path)
    assert f"nothing left to do: {tmp_path} holds step 2 of 2" in caplog.messages


def test_a_working_folder_that_is_gone_does_not_end_a_run(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(steps=2, directory=tmp_path / "records").step == 2
    with pytest.raises(ArgumentError, match="absolute where the working folder is gon"):
        run(steps=2, directory="records")


@pytest.mark.parametrize(
    "batch", [(np.ones((8, 4), np.float32), np.ones(8, np.float32))]
)
def test_a_tuple_where_the_step_reads_a_dict_is_named(batch):
    rep = replicas(1)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    with pytest.raises(TypeError) as found:
        rep.run(step_fn, [batch], init_fn=init_fn, steps=1, display=False)
    held = (
        "The batch of one replica is a `tuple` and holds `0` float32[8,4], `1` float32"
    )
    assert any(held in note for note in found.value.__notes__)

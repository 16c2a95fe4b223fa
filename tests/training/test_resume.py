"""A run that was cut short goes on as if it had not been: bit for bit."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
import replicator.training.checkpoint_hook
from replicator.errors import BatchError
from replicator.hooks import Hook, StateCallback, StepEvent, every
from replicator.inputs.position import position_from_json
from replicator.monitoring.progress import ProgressNumbers
from replicator.monitoring.run_record import describe_dataset
from replicator.training.best_metric import BestSoFar, Follow
from replicator.training.evaluate_hook import EvaluateEvery
from tests.steps import apply, mlp_loss, regression_batch, replicas, trainer

STEPS = 12


class Cut(Exception):
    """What cuts a run short."""


def noisy_trainer(optimizer):
    """Draw from the step's key, and count what each replica saw."""
    init_fn, _ = trainer(optimizer)

    def own_init(key):
        seen = replicator.PerReplica(jnp.zeros(()), on_resize="sum")
        return init_fn(key) | {"seen": seen}

    def step_fn(state, batch, key):
        noise = 0.01 * jax.random.normal(key, (4,))
        noisy = batch | {"x": batch["x"] + replicator.assume_replicated(noise)[None]}
        grads = jax.grad(mlp_loss)(state["params"], noisy)
        seen = replicator.PerReplica(state["seen"].value + batch["y"].sum(), "sum")
        return apply(optimizer, state, grads) | {"seen": seen}, {}

    return own_init, step_fn


def dataset():
    return [regression_batch(seed=seed) for seed in range(5)]


def run(tmp_path, *, cut_at=None, n=4, rep=None, **options):
    rep = rep or replicas(n)
    init_fn, step_fn = noisy_trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))

    def cut(event):
        raise Cut(event.step)

    hooks = [] if cut_at is None else [StateCallback(cut, every(n_steps=cut_at))]
    return rep.run(
        step_fn,
        dataset(),
        init_fn=init_fn,
        steps=STEPS,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=2,
        hooks=hooks,
        display=False,
        **options,
    )


def assert_same_bits(found, expected):
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


CUTS = {
    "soon": (3, {"write_every": 1}),
    "among microbatches": (7, {"accumulate": 2, "write_every": 1}),
    "between calls": (8, {"steps_per_call": 4, "write_every": 1}),
    "at the end": (STEPS, {"write_every": 5}),
}


@pytest.fixture(scope="module", params=CUTS.values(), ids=CUTS)
def cut_run(request, tmp_path_factory):
    """A run that was cut and went on, and one that was not: results and records."""
    cut_at, options = request.param
    whole, cut = [tmp_path_factory.mktemp(name) for name in ("whole", "cut")]
    expected = run(whole, directory=whole / "records", **options)
    with pytest.raises(Cut):
        run(cut, directory=cut / "records", cut_at=cut_at, **options)
    found = run(cut, directory=cut / "records", **options)
    return (found, cut / "records"), (expected, whole / "records")


@pytest.mark.filterwarnings("ignore::replicator.SharedRandomKeyWarning")
def test_a_cut_run_ends_with_the_bits_of_one_that_was_not(cut_run):
    (found, _), (expected, _) = cut_run
    assert found.step == STEPS
    assert_same_bits(found.state, expected.state)


@pytest.mark.filterwarnings("ignore::replicator.SharedRandomKeyWarning")
def test_metrics_of_a_cut_run_are_those_of_one_that_was_not(cut_run):
    (_, found), (_, expected) = cut_run
    assert numbers(found) == numbers(expected)


@pytest.mark.filterwarnings("ignore::replicator.SharedRandomKeyWarning")
def test_metrics_of_a_cut_run_hold_each_step_once(cut_run):
    (_, records), _ = cut_run
    lines = (records / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS


def measured(directory, steps=4, **options):
    """Train, and evaluate at the end."""
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def reporting(state, batch):
        after, metrics = step_fn(state, batch)
        largest = replicator.Max(batch["x"].max(0))
        told = {"count": replicator.Sum(jnp.int32(1)), "x": largest}
        return after, {"loss": metrics["loss"], "inner": told}

    def eval_fn(state, batch):
        x = batch["x"] * batch["mask"][:, None]
        hidden = x @ state["params"]["w1"]
        return {"first": hidden[:, 0], "table": replicator.Sum(x.T @ x)}

    return rep.run(
        reporting,
        dataset(),
        init_fn=init_fn,
        steps=steps,
        eval_fn=eval_fn,
        eval_dataset=dataset(),
        eval_every=3,
        follow=Follow(metric="first"),
        checkpoint_dir=directory,
        display=False,
        **options,
    )


def assert_same_words(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert list(map(type, jax.tree.leaves(found))) == list(
        map(type, jax.tree.leaves(expected))
    )
    assert_same_bits(found, expected)


@pytest.mark.parametrize("options", [{}, {"steps_per_call": 2}], ids=str)
def test_a_finished_run_is_not_run_again_and_returns_what_it_ended_with(
    tmp_path, options
):
    expected = measured(tmp_path, **options)
    again = measured(tmp_path, **options)
    assert (again.step, again.examples) == (4, 0)
    assert_same_bits(again.state, expected.state)
    assert expected.metrics["inner"]["count"] == 2
    assert expected.evaluation["table"].shape == (4, 4)
    assert_same_words(again.metrics, expected.metrics)
    assert_same_words(again.evaluation, expected.evaluation)
    assert again.best == expected.best


def test_a_finished_run_that_goes_on_returns_its_new_end(tmp_path):
    before = measured(tmp_path)
    found = measured(tmp_path, steps=5)
    assert found.step == 5
    assert found.metrics["loss"] != before.metrics["loss"]
    assert found.evaluation["first"] != before.evaluation["first"]


def test_a_run_that_goes_on_says_so_and_one_that_is_done_too(tmp_path, capsys):
    rep = replicas(1)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    told = []
    for steps in (2, 3, 3):
        rep.run(
            step_fn,
            dataset(),
            init_fn=init_fn,
            steps=steps,
            checkpoint_dir=tmp_path,
        )
        told.append(capsys.readouterr().err.splitlines())
    assert told[0][0].startswith("compiled in ")
    assert told[1][0] == f"goes on after step 2, from {tmp_path}"
    assert told[2] == [f"nothing left to do: {tmp_path} holds step 3 of 3"]


@pytest.mark.filterwarnings("ignore::replicator.SharedRandomKeyWarning")
def test_another_number_of_replicas_goes_on_from_the_same_values(tmp_path):
    with pytest.raises(Cut):
        run(tmp_path, cut_at=6, n=4)
    found = run(tmp_path, n=2)
    expected = run(tmp_path / "whole", n=4)
    for one, other in zip(
        jax.tree.leaves(found.state["params"]),
        jax.tree.leaves(expected.state["params"]),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        np.sum(found.state["seen"].value),
        np.sum(expected.state["seen"].value),
        rtol=1e-5,
    )


OF_THE_PROCESS = ("progress/", "goodput/", "memory/", "compile/", "program/")


def numbers(records):
    """Return what was written for each step, but for times and rates."""
    lines = (records / "metrics.jsonl").read_text().splitlines()
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if name != "time_s" and not name.startswith(OF_THE_PROCESS)
        }
        for line in lines
    ]


LOSSES = [3.0, 2.0, 1.0, 4.0, 4.0, 4.0]


def evaluated(tmp_path, *, cut_at=None, patience=2):
    """Evaluate every second step; the third evaluation is the best."""
    rep, seen = replicas(2), []
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def counting(state, batch):
        after, metrics = step_fn(state, batch)
        return after | {"steps": state["steps"] + 1}, metrics

    def evaluate(state):
        seen.append(int(state["steps"]))
        return {"loss": LOSSES[seen[-1] // 2 - 1]}

    def cut(event):
        if event.step == cut_at:
            raise Cut(event.step)

    follow = Follow(metric="loss", patience=patience)
    hook = EvaluateEvery(evaluate, every(n_steps=2), follow=follow)
    result = rep.run(
        counting,
        dataset(),
        init_fn=lambda key: init_fn(key) | {"steps": jnp.zeros((), jnp.int32)},
        steps=STEPS,
        checkpoint_dir=tmp_path,
        checkpoint_every=1,
        hooks=[StateCallback(cut, every(n_steps=1)), hook],
        display=False,
    )
    return result.step, hook, seen


@pytest.mark.parametrize("cut_at", [5, 8])
def test_patience_and_the_best_so_far_go_on(tmp_path, cut_at):
    with pytest.raises(Cut):
        evaluated(tmp_path, cut_at=cut_at)
    step, hook, seen = evaluated(tmp_path)
    assert step == 10
    assert hook.best == BestSoFar(step=6, value=1.0, waited=2)
    assert seen == [2, 4, 6, 8, 10][-len(seen) :]


def test_a_run_that_was_stopped_early_does_not_go_on(tmp_path):
    evaluated(tmp_path)
    step, hook, seen = evaluated(tmp_path)
    assert (step, seen) == (10, [])
    assert hook.should_stop


@pytest.mark.parametrize("patience", [3, None])
def test_a_run_that_was_stopped_goes_on_with_more_patience(tmp_path, patience):
    evaluated(tmp_path)
    assert evaluated(tmp_path, patience=patience)[0] == STEPS


def test_a_schedule_by_the_clock_goes_on_waiting():
    def at(step, time_s):
        progress = ProgressNumbers(step=step, steps=None, time_s=time_s)
        return StepEvent(step=step, advanced=1, examples=0, progress=progress)

    before = every(seconds=10.0).trigger()
    assert [before.pulled(at(1, 100.0)), before.pulled(at(2, 106.0))] == [False, False]
    after = every(seconds=10.0).trigger()
    after.load_state(json.loads(json.dumps(before.state_dict())))
    found = [after.pulled(at(3, 5.0)), after.pulled(at(4, 8.9)), after.pulled(at(5, 9))]
    assert found == [False, False, True]


@pytest.mark.filterwarnings("ignore::replicator.SharedRandomKeyWarning")
def test_a_second_run_on_the_same_directory_is_refused(tmp_path):
    def start_another(event):
        run(tmp_path)

    rep = replicas(2)
    init_fn, step_fn = noisy_trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    with pytest.raises(replicator.errors.CheckpointInUseError):
        rep.run(
            step_fn,
            dataset(),
            init_fn=init_fn,
            steps=2,
            checkpoint_dir=tmp_path / "checkpoints",
            hooks=[StateCallback(start_another, every(n_steps=1))],
            display=False,
        )


def test_a_position_of_a_checkpoint_reads_back(tmp_path):
    from replicator.checkpoint import CheckpointStore

    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    rep.run(
        step_fn,
        dataset(),
        init_fn=init_fn,
        steps=7,
        checkpoint_dir=tmp_path,
        display=False,
    )
    found = CheckpointStore(tmp_path).restore()
    position = position_from_json(found.meta["position"])
    assert (position.batches, position.epoch, position.epoch_batches) == (7, 1, 2)


_TRAIN = """
import sys, replicator
replicator.fake_devices(4)
import jax, numpy as np, optax
from replicator.hooks import StateCallback, every
sys.path.insert(0, {root!r})
from tests.steps import trainer, regression_batch

rep = replicator.Replicator(compilation_cache=False)
init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
tell = StateCallback(lambda event: print(event.step, flush=True), every(n_steps=1))
result = rep.run(
    step_fn, [regression_batch(seed=seed) for seed in range(5)], init_fn=init_fn,
    steps=400, checkpoint_dir={directory!r}, checkpoint_every=5, hooks=[tell],
    display=False, directory={directory!r} + "-records", write_every=1,
)
np.save({result!r}, np.concatenate([
    np.asarray(leaf).ravel() for leaf in jax.tree.leaves(result.state)
]))
"""


def train(directory, result, *, kill_at=None):
    """Train in a process of its own; SIGKILL it when it tells of step `kill_at`."""
    root = os.getcwd()
    code = _TRAIN.format(root=root, directory=str(directory), result=str(result))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if kill_at is not None and int(line) >= kill_at:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    return process.wait(timeout=120)


@pytest.mark.slow
def test_a_killed_process_ends_with_the_bits_of_one_that_was_not(tmp_path):
    assert train(tmp_path / "whole", tmp_path / "whole.npy") == 0
    for kill_at in (1, 60, 200, 301, 399):
        code = train(tmp_path / "killed", tmp_path / "killed.npy", kill_at=kill_at)
        assert code == -signal.SIGKILL
    assert train(tmp_path / "killed", tmp_path / "killed.npy") == 0
    np.testing.assert_array_equal(
        np.load(tmp_path / "killed.npy"), np.load(tmp_path / "whole.npy")
    )
    found = [numbers(tmp_path / f"{name}-records") for name in ("killed", "whole")]
    assert found[0] == found[1]


class Forgetful(Hook):
    """Cannot take its own state back."""

    def state_dict(self):
        return {"seen": 1}

    def load_state(self, state):
        raise KeyError("unseen")


def test_what_fails_before_the_loop_leaves_the_directory_to_the_next_run(tmp_path):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def train_until(steps, **options):
        return rep.run(
            step_fn,
            dataset(),
            init_fn=init_fn,
            steps=steps,
            checkpoint_dir=tmp_path / "checkpoints",
            directory=tmp_path / "records",
            display=False,
            **options,
        )

    train_until(2, hooks=[Forgetful()])
    with pytest.raises(KeyError, match="unseen"):
        train_until(3, hooks=[Forgetful()])
    assert train_until(4).step == 4


def test_without_steps_a_run_ends_with_its_dataset():
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    found = rep.run(step_fn, dataset(), init_fn=init_fn, steps=None, display=False)
    assert found.step == len(dataset())


def test_an_evaluation_at_the_step_that_a_run_goes_on_from_stays_written(tmp_path):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def cut(event):
        raise Cut

    def train_until(steps, cut_at=None):
        return rep.run(
            step_fn,
            dataset(),
            init_fn=init_fn,
            steps=steps,
            eval_fn=lambda state, batch: {"x": batch["x"][:, 0]},
            eval_dataset=dataset(),
            eval_every=2,
            checkpoint_dir=tmp_path / "checkpoints",
            checkpoint_every=2,
            directory=tmp_path / "records",
            hooks=[StateCallback(cut, every(n_steps=cut_at))] if cut_at else [],
            display=False,
        )

    with pytest.raises(Cut):
        train_until(6, cut_at=5)
    found = train_until(6)
    lines = (tmp_path / "records" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "eval/x" in row] == [2, 4, 6]
    assert found.evaluation["examples"] == sum(len(each["x"]) for each in dataset())


def saved_and_gone_on(directory, *, steps=2, batches=5, **options):
    rep = replicas(1)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    data = [regression_batch(seed=seed) for seed in range(batches)]
    rep.run(
        step_fn,
        data,
        init_fn=init_fn,
        steps=steps,
        checkpoint_dir=directory,
        display=False,
        **options,
    )


def told_here(caplog):
    """Return what this thread logged: those of other tests may log, too."""
    name = threading.current_thread().name
    return [each.getMessage() for each in caplog.records if each.threadName == name]


def test_a_run_says_so_where_it_goes_on_with_another_seed_or_dataset(tmp_path, caplog):
    saved_and_gone_on(tmp_path)
    saved_and_gone_on(tmp_path, steps=3)
    assert told_here(caplog) == ["The run goes on with another `steps` 3 (it was 2)."]
    for steps in (4, 5):  # the seed that the keys come from is not forgotten
        caplog.clear()
        saved_and_gone_on(tmp_path, steps=steps, seed=1)
        said, _ = told_here(caplog)
        assert "`seed` is 1, and was 0 when the run was saved" in said
    caplog.clear()
    saved_and_gone_on(tmp_path, steps=6, batches=7)
    said, _ = told_here(caplog)
    assert "`dataset` is list of 7, and was list of 5 when" in said


def unread():
    raise AssertionError("the dataset was read")
    yield


def test_a_dataset_is_described_without_being_read():
    assert describe_dataset(unread()) == "unread"
    assert describe_dataset(unread) == "unread"
    assert describe_dataset([1, 2]) == "list of 2"
    assert describe_dataset(iter([1, 2])) == "list_iterator"


@pytest.mark.parametrize("known", [True, False])
def test_a_run_says_so_where_its_random_streams_are_others(
    tmp_path, caplog, monkeypatch, known
):
    with monkeypatch.context() as patched:
        if not known:
            patched.setattr(replicator.training.checkpoint_hook, "RANDOM_STREAMS", 1)
        run(tmp_path, cut_at=None)
    caplog.clear()
    run(tmp_path)
    told = [each.getMessage() for each in caplog.records if "random" in each.message]
    assert len(told) == (0 if known else 1)
    if told:
        assert told[0].startswith("The checkpoint of step 12 is from another version")


class Reshuffled:
    """An iterable whose every pass begins with another batch; the fifth is bad."""

    def __init__(self):
        self._passes = 0

    def __iter__(self):
        self._passes += 1
        for number in range(9):
            batch = regression_batch(seed=self._passes + number)
            yield batch | {"x": batch["x"] * (np.inf if number == 4 else 1.0)}


def test_a_run_does_not_go_back_to_other_examples(tmp_path):
    rep = replicas(1)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def train_until(steps):
        rep.run(
            step_fn,
            Reshuffled(),
            init_fn=init_fn,
            steps=steps,
            on_nonfinite="rollback",
            checkpoint_dir=tmp_path,
            display=False,
        )

    train_until(2)
    with pytest.raises(BatchError, match="got another batch 0 of pass 0"):
        train_until(9)

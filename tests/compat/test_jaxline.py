"""jaxline experiments are trained, saved, resumed bit for bit, and evaluated."""

import functools
import json
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.compat import jax as old_jax
from replicator.compat.jaxline import base_config, evaluate, experiment, train, utils
from replicator.errors import (
    ArgumentError,
    CheckpointMismatchError,
    Preempted,
)
from replicator.hooks import StateCallback, every

OPTIMIZER = optax.adam(0.1)


@pytest.fixture(autouse=True)
def jax_as_it_comes():
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.partial(old_jax.pmap, axis_name="i", donate_argnums=(0, 1))
def update(w, opt, global_step, rng):
    target = jax.random.normal(rng, (3,)) + jnp.float32(global_step)
    loss, grads = jax.value_and_grad(lambda w: jnp.sum((w["w"] - target) ** 2))(w)
    updates, opt = OPTIMIZER.update(jax.lax.pmean(grads, "i"), opt)
    return optax.apply_updates(w, updates), opt, jax.lax.pmean(loss, "i")


class Fit(experiment.AbstractExperiment):
    """Follows a number that depends on the step and its keys; made at step 0."""

    CHECKPOINT_ATTRS = {"_w": "w", "_opt": "opt"}  # noqa: RUF012
    NON_BROADCAST_CHECKPOINT_ATTRS = {"_seen": "seen"}  # noqa: RUF012

    def __init__(self, mode, init_rng):
        super().__init__(mode=mode, init_rng=init_rng)
        self.mode, self._init_rng = mode, init_rng
        self._w = self._opt = None
        self._seen = {
            "steps": [],
            "note": "ä",
            "best": float("inf"),
            "sum": np.zeros(2),
        }
        self._update = update

    def step(self, *, global_step, rng, writer):
        if self._w is None:
            w = {"w": jax.random.normal(self._init_rng, (3,))}
            self._w, self._opt = utils.bcast_local_devices((w, OPTIMIZER.init(w)))
        self._w, self._opt, loss = self._update(self._w, self._opt, global_step, rng)
        self._seen["steps"].append(int(utils.get_first(global_step)))
        self._seen["sum"] += 1
        writer.write_scalars(global_step[0], {"own": self._seen["steps"][-1]})
        return {"loss": utils.get_first(loss)}

    def evaluate(self, *, global_step, rng, writer):
        assert self.mode == "eval"
        keys = {tuple(key) for key in np.asarray(rng).tolist()}
        return {
            "norm": jnp.linalg.norm(utils.get_first(self._w)["w"]),
            "keys": len(keys),
        }


def config(directory=None, **fields):
    return types.SimpleNamespace(
        **{
            "training_steps": 12,
            "interval_type": "steps",
            "save_checkpoint_interval": 4,
            "log_train_data_interval": 1,
            "checkpoint_dir": directory,
            **fields,
        }
    )


def run(directory=None, *, cls=Fit, hooks=(), **fields):
    return train(cls, config(directory, **fields), hooks=hooks, display=False)


def bits(result):
    state = (result.state._w, result.state._opt)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def at_step(step, action):
    def act(event):
        if event.step == step:
            action()

    return StateCallback(act, every(n_steps=1))


def crash():
    raise ConnectionError("the power went")


def rows(directory):
    lines = (directory / "train" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_that_crashed_goes_on_bit_for_bit(tmp_path):
    whole = run(tmp_path / "whole")
    cut = tmp_path / "cut"
    with pytest.raises(ConnectionError):
        run(cut, hooks=[at_step(10, crash)])
    resumed = run(cut)
    assert bits(resumed) == bits(whole)
    assert resumed.state._seen["steps"] == list(range(12))
    assert resumed.state._seen["note"] == "ä"
    assert resumed.state._seen["best"] == float("inf")
    assert resumed.state._seen["sum"].tolist() == [12, 12]


def test_each_step_is_written_once_by_a_run_that_was_cut(tmp_path):
    with pytest.raises(ConnectionError):
        run(tmp_path, hooks=[at_step(10, crash)])
    run(tmp_path)
    losses = [row["step"] for row in rows(tmp_path) if "loss" in row]
    assert losses == list(range(1, 13))


def test_a_signal_saves_the_step_and_the_run_goes_on_from_it(tmp_path):
    whole = run()
    with pytest.raises(Preempted):
        run(tmp_path, hooks=[at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert bits(run(tmp_path)) == bits(whole)


def test_a_run_that_is_done_does_nothing_more(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path)
    assert again.state._seen["steps"] == list(range(12))
    assert bits(again) == bits(first)


def test_the_keys_of_steps_are_those_of_jaxline():
    seen = []

    class Listener(Fit):
        def step(self, *, rng, **unused):
            seen.append(np.asarray(rng))
            return {}

    run(cls=Listener, training_steps=2)
    chain, _ = jax.random.split(jax.random.PRNGKey(42))
    for own in seen:
        key, chain = jax.random.split(chain)
        key = jax.random.fold_in(key, 0)
        expected = [jax.random.fold_in(key, device) for device in range(8)]
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize(
    ("mode", "different"),
    [("same_host_same_device", 1), ("same_host_unique_device", 8)],
)
def test_keys_differ_in_what_the_mode_says(tmp_path, mode, different):
    run(tmp_path)
    found = evaluate(Fit, config(tmp_path, random_mode_eval=mode))
    assert found["keys"] == different


def test_evaluation_sees_what_was_saved_last_and_writes_it(tmp_path):
    trained = run(tmp_path)
    found = evaluate(Fit, config(tmp_path))
    expected = np.linalg.norm(utils.get_first(trained.state._w)["w"])
    np.testing.assert_allclose(found["norm"], expected, rtol=1e-6)
    row = json.loads((tmp_path / "eval" / "metrics.jsonl").read_text())
    assert (row["step"], row["keys"]) == (12, 1)


def test_an_experiment_writes_numbers_of_its_own(tmp_path):
    run(tmp_path)
    assert [row["own"] for row in rows(tmp_path) if "own" in row] == list(range(12))


def test_an_experiment_may_say_itself_when_it_is_done():
    class Short(Fit):
        def should_run_step(self, global_step, config):
            return global_step < 3

    assert run(cls=Short).step == 3


def test_the_first_state_is_saved_if_asked_for(tmp_path):
    with pytest.raises(ConnectionError):
        run(
            tmp_path,
            hooks=[at_step(2, crash)],
            save_initial_train_checkpoint=True,
        )
    assert [p.name for p in (tmp_path / "checkpoints").glob("0*")] == ["0" * 12]


def test_a_container_of_another_library_is_made_by_the_experiment(tmp_path):
    from flax import core

    class Frozen(Fit):
        CHECKPOINT_ATTRS = {"_frozen": "frozen"}  # noqa: RUF012

        def __init__(self, mode, init_rng, made=True):
            super().__init__(mode, init_rng)
            state = core.freeze({"a": {"b": np.arange(2.0)}})
            self._frozen = utils.bcast_local_devices(state) if made else None

        def step(self, **unused):
            self._frozen = old_jax.tree_map(lambda x: x + 1, self._frozen)

    run(tmp_path, cls=Frozen)
    found = run(tmp_path, cls=Frozen).state._frozen
    assert isinstance(found, core.FrozenDict)
    np.testing.assert_array_equal(found["a"]["b"][0], [12, 13])
    with pytest.raises(CheckpointMismatchError, match=r"`_frozen` must be the `flax"):
        run(tmp_path, cls=Frozen, experiment_kwargs={"made": False})


REFUSED = {
    "an attribute that is not there": (
        lambda d: run(d, cls=type("Bad", (Fit,), {"CHECKPOINT_ATTRS": {"_x": "x"}})),
        ArgumentError,
        r"got `_x`, which it lacks\. Set it in `__init__`",
    ),
    "what is no array": (
        lambda d: run(
            d,
            cls=type(
                "Bad", (Fit,), {"NON_BROADCAST_CHECKPOINT_ATTRS": {"_update": "f"}}
            ),
        ),
        ArgumentError,
        r"`arrays` must hold arrays only, got function",
    ),
    "an unknown mode of keys": (
        lambda d: run(d, random_mode_train="unique"),
        ArgumentError,
        r"`mode` must be one of .* got 'unique'",
    ),
    "an unknown interval": (
        lambda d: run(d, interval_type="minutes"),
        ArgumentError,
        r"`interval_type` must be 'secs' or 'steps', got 'minutes'",
    ),
    "growth ratios": (
        lambda d: run(d, periodic_action_growth_ratios=[1, 2]),
        ArgumentError,
        r"`periodic_action_growth_ratios` must be None",
    ),
    "no experiment": (
        lambda d: run(d, cls=dict),
        ArgumentError,
        r"`experiment_class` must be a subclass of `AbstractExperiment`",
    ),
    "a loop of its own": (
        lambda d: run(d, cls=type("Own", (Fit,), {"train_loop": lambda self: None})),
        ArgumentError,
        r"`experiment_class` must not define `train_loop`, got Own",
    ),
    "evaluating nothing": (
        lambda d: evaluate(Fit, config(d)),
        ArgumentError,
        r"`directory` must hold a checkpoint, got .* Train first",
    ),
    "the best checkpoint": (
        lambda d: evaluate(Fit, config(d, best_model_eval_metric="loss")),
        ArgumentError,
        r"`best_model_eval_metric` must be empty, got 'loss'",
    ),
    "keys of its own for each device": (
        lambda d: run(
            cls=type(
                "Own",
                (Fit,),
                {
                    "initialize_train_step_rng": lambda self, rng: jax.random.split(
                        rng, 8
                    )
                },
            )
        ),
        ArgumentError,
        r"`initialize_train_step_rng` must return the same key",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_experiment_cannot_have_is_refused_by_name(tmp_path, case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call(tmp_path)


def test_a_checkpoint_of_another_experiment_is_refused(tmp_path):
    run(tmp_path)
    other = type("Other", (Fit,), {"CHECKPOINT_ATTRS": {"_w": "weights"}})
    with pytest.raises(CheckpointMismatchError, match="got `weights`, of "):
        run(tmp_path, cls=other)


def test_the_base_config_has_all_that_is_obeyed():
    pytest.importorskip("ml_collections")
    found = base_config.get_base_config()
    assert {*base_config.DEFAULTS} <= {*found.keys()}
    found.checkpoint_dir = "of/another/type"  # as old configs do

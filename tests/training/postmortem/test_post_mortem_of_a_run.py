"""A run that dies of a step leaves a bundle; `replicator replay` finds the line."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import replicator
from replicator.cli.main import main
from replicator.errors import BatchError, NonFiniteError
from replicator.training.postmortem.bundle import read_bundle
from tests.steps import regression_batch, replicas, trainer
from tests.training.postmortem.crashing import root_loss

BAD = 4


def dataset(bad=BAD):
    batches = [regression_batch(seed=seed) for seed in range(8)]
    for batch in batches:
        batch["x"] = np.abs(batch["x"])
    batches[bad]["x"][5, 2] = -3.0
    return batches


def checking(optimizer):
    init_fn, step_fn = trainer(optimizer)

    def step(state, batch):
        checkify.check(batch["x"].min() > -1, "too small")
        return step_fn(state, batch)

    return init_fn, step


def die(tmp_path, *, make=None, batches=None, **options):
    rep = replicas(4)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, step_fn = make(optimizer) if make else trainer(optimizer, root_loss)
    rep.run(
        step_fn,
        batches or dataset(),
        init_fn=init_fn,
        steps=8,
        display=False,
        directory=tmp_path / "run",
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"steps_per_call": 2}, {"checkpoint_every": 3}],
    ids=str,
)
def test_a_nan_leaves_a_bundle_that_says_the_line(tmp_path, capsys, options):
    if "checkpoint_every" in options:
        options |= {"checkpoint_dir": tmp_path / "c"}
    with pytest.raises(NonFiniteError, match="at step 5") as failure:
        die(tmp_path, **options)
    path = tmp_path / "run" / "postmortem" / "5"
    assert str(path) in failure.value.__notes__[0]
    assert main(["replay", str(path)]) == 0
    told = capsys.readouterr().out
    assert "first NaN: `sqrt` at " in told
    assert " in root_loss" in told


def test_a_checkify_error_leaves_one_with_the_replica(tmp_path):
    with pytest.raises(checkify.JaxRuntimeError, match="replica 1: too small"):
        die(tmp_path, make=checking, checks=checkify.user_checks)
    bundle = read_bundle(tmp_path / "run" / "postmortem" / "5")
    assert bundle.error["message"].startswith("replica 1: too small")
    np.testing.assert_array_equal(bundle.batch["x"], dataset()[BAD]["x"])
    assert int(bundle.state["step"]) == BAD


def test_the_number_of_a_step_is_that_of_the_step_when_it_is_replayed(tmp_path, capsys):
    def numbered(optimizer):
        init_fn, step_fn = trainer(optimizer)

        def step(state, batch):
            after, metrics = step_fn(state, batch)
            sign = jnp.where(replicator.step_number() == BAD, -1.0, 1.0)
            return after, {"loss": metrics["loss"] * jnp.sqrt(sign)}

        return init_fn, step

    with pytest.raises(NonFiniteError, match=f"at step {BAD + 1}"):
        die(tmp_path, make=numbered)
    main(["replay", str(tmp_path / "run" / "postmortem" / str(BAD + 1))])
    assert "first NaN: `sqrt` at " in capsys.readouterr().out


def test_an_iterator_leaves_what_is_known(tmp_path):
    with pytest.raises(NonFiniteError):
        die(tmp_path, batches=iter(dataset()))
    bundle = read_bundle(tmp_path / "run" / "postmortem" / "5")
    assert bundle.state is None
    assert "must be finite" in bundle.error["message"]


def test_a_bad_batch_leaves_none(tmp_path):
    batches = [regression_batch(), {"x": jnp.ones((16, 4))}]
    with pytest.raises(BatchError):
        die(tmp_path, batches=batches)
    assert not (tmp_path / "run" / "postmortem").exists()

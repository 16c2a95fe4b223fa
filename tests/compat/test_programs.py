"""Two programs as they were written for old JAX run with at most five lines changed.

They learn what one device learns from whole batches: law 1's trajectory, in float64.
"""

import difflib
import importlib.util
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax.training import train_state

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 50
MOST_CHANGED_LINES = 5


@pytest.fixture(autouse=True)
def jax_as_it_comes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def load(name):
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def assert_law_1(found, expected):
    found, expected = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (found, expected)
    )
    assert found.dtype == np.float64
    assert np.linalg.norm(found - expected) <= 1e-9 * np.linalg.norm(expected)


def minimize(loss_fn, params, optimizer, batches):
    """Train as one device does, on whole batches."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return params, losses


@pytest.mark.parametrize("name", ["pmap", "flax_loop"])
def test_at_most_five_lines_of_an_old_program_change(name):
    old, new = (
        (PROGRAMS / f"{age}_{name}.py").read_text().splitlines()
        for age in ("old", "new")
    )
    changed = [line[0] for line in difflib.ndiff(old, new) if line[0] in "+-"]
    assert 1 <= max(changed.count("-"), changed.count("+")) <= MOST_CHANGED_LINES


def test_this_jax_lacks_what_the_old_programs_use():
    assert not hasattr(jax, "device_put_replicated")
    assert not hasattr(jax, "tree_map")


def test_the_pmap_program_learns_what_one_device_learns():
    with jax.enable_x64(True):
        program = load("new_pmap")
        params, history = program.train(STEPS)
        alone, losses = minimize(
            lambda params, batch: program.loss_fn(params, batch)[0],
            program.init_params(jax.random.PRNGKey(0)),
            program.optimizer,
            program.dataset(STEPS),
        )
        assert_law_1(params, alone)
    np.testing.assert_allclose(history, losses, rtol=1e-9)
    assert history[-1] < 0.1 * history[0]


@pytest.mark.slow
def test_the_flax_program_learns_what_one_device_learns():
    with jax.enable_x64(True):
        program = load("new_flax_loop")
        params, history, accuracy = program.train(STEPS)
        state = program.create_train_state(jax.random.PRNGKey(0))
        assert isinstance(state, train_state.TrainState)

        def loss_fn(params, batch):
            logits = state.apply_fn({"params": params}, batch["image"], train=False)
            return program.cross_entropy(logits, batch["label"])

        batches = program.batches(STEPS)
        alone, losses = minimize(loss_fn, state.params, state.tx, batches)
        assert_law_1(params, alone)
    np.testing.assert_allclose(history, losses, rtol=1e-9)
    assert history[-1] < 0.1 * history[0]
    assert accuracy == 1.0

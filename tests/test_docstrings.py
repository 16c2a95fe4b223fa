"""Examples in docstrings run, and each call that is not obvious has one."""

import doctest
import inspect
import io
import pathlib
import sys

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
import replicator.launchpad_bridge as lp
import replicator.nnx
from replicator import checkpoint, distributed, hooks, rpc, strategies, testing, writers
from tests.test_readme import init_params, line_of, loss_fn

MODULES = [
    *(replicator, replicator.nnx, lp, rpc, checkpoint),
    *(distributed, hooks, strategies, testing, writers),
]


def public_objects():
    """List what users call: the names that a module exports, whatever their home."""
    found = {}
    for module in MODULES:
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and name[0] != "_"
        ]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{module.__name__}.{name}"] = value
    return found


def examples_of(name, value):
    finder = doctest.DocTestFinder()
    return [each for each in finder.find(value, name, module=False) if each.examples]


PUBLIC = public_objects()
# Some are shown where a whole file begins.
HOMES = {value.__module__: sys.modules[value.__module__] for value in PUBLIC.values()}
EXAMPLES = {
    each.name: (each, home)
    for name, value in PUBLIC.items()
    for home in [sys.modules[value.__module__]]
    for each in examples_of(name, value)
}
EXAMPLES |= {
    name: (test, home)
    for name, home in HOMES.items()
    if ">>>" in (home.__doc__ or "")
    for test in [
        doctest.DocTestParser().get_doctest(home.__doc__, {}, name, home.__file__, 0)
    ]
}


class Learner:
    def __init__(self, seed=0):
        self.seed = seed

    def step(self):
        return self.seed


@pytest.fixture
def names():
    rep = replicator.Replicator()
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))

    def init_fn(key):
        params = init_params(key)
        return {"params": params, "opt": optimizer.init(params)}

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss}

    def eval_fn(params, batch):
        return {"loss": (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2}

    return {
        **{"jax": jax, "jnp": jnp, "np": np, "optax": optax, "nnx": flax.nnx},
        **{"replicator": replicator, "rpc": rpc, "lp": lp, "hooks": hooks},
        **{"rep": rep, "optimizer": optimizer, "init_fn": init_fn, "step_fn": step_fn},
        **{"eval_fn": eval_fn},
        **{"critic_step_fn": step_fn, "generator_step_fn": step_fn},
        **{"init_params": init_params, "loss_fn": loss_fn, "key": jax.random.key(0)},
        **{"dataset": [line_of(32)] * 3, "batch": line_of(32)},
        **{"program": lp.Program("example"), "Learner": Learner, "pathlib": pathlib},
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of(name, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test, home = EXAMPLES[name]
    test.globs = {**vars(home), **vars(replicator), **names}
    told = io.StringIO()
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    # A reader has JAX as it comes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed = runner.run(test, out=told.write).failed
    assert not failed, told.getvalue()


# `run` is `Replicator.run`; of the rest the name and its first line say it all, or
# another one's example shows it; many are Launchpad's, for its own programs.
OBVIOUS = {
    "replicator.hooks.checked_hooks",
    "replicator.launchpad_bridge.batched_handler",
    "replicator.launchpad_bridge.bind_addresses",
    "replicator.launchpad_bridge.extract_handles",
    "replicator.launchpad_bridge.maybe_dereference",
    "replicator.launchpad_bridge.run_worker",
    "replicator.launchpad_bridge.stop",
    "replicator.launchpad_bridge.unregister_stop_handler",
    "replicator.launchpad_bridge.wait_for_stop",
}


def test_each_function_shows_an_example_or_needs_none():
    lacking = {
        name
        for name, value in PUBLIC.items()
        if inspect.isfunction(value) and name not in EXAMPLES
    }
    assert sorted(lacking) == sorted(OBVIOUS)

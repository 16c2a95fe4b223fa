import jax
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from tests.engine.reduction.problems import (  # noqa: E402 (flax may be missing)
    SUMMING,
    batch_of,
    replicator_with,
)


@pytest.mark.slow
def test_an_optimizer_of_nnx_owes_in_its_variables():
    rep = replicator_with({"compress": "int8"}, n=2)
    tx = rep.wrap_optimizer(SUMMING)

    def init_fn(key):
        model = nnx.Linear(24, 8, rngs=nnx.Rngs(0))
        return {"model": model, "opt": nnx.Optimizer(model, tx, wrt=nnx.Param)}

    def loss_of(model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    def step_fn(state, batch):
        model, opt = state["model"], state["opt"]
        grads = nnx.grad(loss_of)(model, batch)
        opt.update(model, grads)
        return {"model": model, "opt": opt}, {}

    step, state = rep.compile(step_fn), rep.init(init_fn)
    true = jax.device_get(nnx.grad(loss_of)(state["model"], batch_of()))
    for _ in range(2):
        state, _ = step(state, batch_of())
    rules = state["opt"].opt_state.synchroniser
    assert rules.paths == ("params/bias", "params/kernel")
    owed = np.asarray(jax.tree.leaves(rules.owed.value["params/kernel"])[0])
    assert np.any(owed)
    got = jax.tree.leaves(state["opt"].opt_state.inner[0])[1]
    np.testing.assert_allclose(
        got + owed.sum(axis=0), 2 * true["kernel"][...], atol=2e-2
    )

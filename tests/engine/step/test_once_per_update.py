"""Under accumulation what reads no batch moves once per update; what drifts is refused.

Each state is compared, leaf by leaf, with that of one microbatch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import replicator
from replicator import all_reduce, wrap_optimizer
from replicator.errors import ArgumentError
from tests.steps import (
    FEATURES,
    adam,
    apply,
    assert_close,
    init_mlp,
    lenient,
    mlp,
    mlp_loss,
    regression_batch,
    replicas,
    trainer,
)


def after(init_fn, step_fn, *, n=2, k=1, steps=3, key=None):
    """Return the state after some updates from one batch, on the host."""
    rep = replicas(n)
    step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
    for turn in range(steps):
        own = None if key is None else jax.random.fold_in(key, turn)
        state, _ = step(state, regression_batch(), own)
    return jax.device_get(state)


def assert_same_for_microbatches(init_fn, step_fn, **options):
    assert_close(
        after(init_fn, step_fn, k=4, **options), after(init_fn, step_fn, **options)
    )


def with_more(more, move, tx=None):
    """Train an MLP whose state holds `more`; `move(state, after, batch)` moves it."""
    optimizer = wrap_optimizer(tx or optax.sgd(0.1))
    base_init, _ = trainer(optimizer)

    def init_fn(key):
        return base_init(key) | more

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        moved = apply(optimizer, state, grads)
        return moved | move(state, moved, batch), {}

    return init_fn, step_fn


def refusal(init_fn, step_fn, **options):
    with pytest.raises(ArgumentError) as caught:
        after(init_fn, step_fn, k=4, **options)
    return str(caught.value)


def test_a_counter_counts_updates():
    counting = with_more(
        {"count": jnp.zeros((), jnp.int32)},
        lambda state, moved, batch: {"count": state["count"] + 1},
    )
    assert after(*counting, k=4)["count"] == 3


def test_a_target_network_follows_old_parameters_once():
    def follow(state, moved, batch):
        return {"target": 0.9 * state["target"] + 0.1 * state["params"]["w2"]}

    assert_same_for_microbatches(*with_more({"target": jnp.zeros(8)}, follow))


def test_a_target_network_follows_new_parameters_once():
    def follow(state, moved, batch):
        return {"target": 0.9 * state["target"] + 0.1 * moved["params"]["w2"]}

    assert_same_for_microbatches(*with_more({"target": jnp.zeros(8)}, follow))


def test_a_copy_taken_every_other_update_is_that_of_one_batch():
    def copy(state, moved, batch):
        count = state["count"] + 1
        due = count % 2 == 0
        return {
            "count": count,
            "copy": jnp.where(due, moved["params"]["w2"], state["copy"]),
        }

    more = {"count": jnp.zeros((), jnp.int32), "copy": jnp.zeros(8)}
    assert_same_for_microbatches(*with_more(more, copy))


def test_vectors_of_a_spectral_norm_move_once():
    optimizer = wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        params = init_mlp(key)
        return {"params": params, "opt": optimizer.init(params), "u": jnp.ones(8)}

    def step_fn(state, batch):
        w = state["params"]["w1"]
        v = w @ state["u"]
        u = w.T @ (v / jnp.linalg.norm(v))
        u = u / jnp.linalg.norm(u)

        def loss_fn(params):
            sigma = jnp.linalg.norm(params["w1"] @ jax.lax.stop_gradient(u))
            return mlp_loss({**params, "w1": params["w1"] / sigma}, batch)

        return apply(optimizer, state, jax.grad(loss_fn)(state["params"])) | {
            "u": u
        }, {}

    assert_same_for_microbatches(init_fn, step_fn)


def test_a_leaf_made_of_the_key_alone_moves_once():
    optimizer = wrap_optimizer(optax.sgd(0.1))
    base_init, _ = trainer(optimizer)

    def step_fn(state, batch, key):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        noise = 0.5 * state["noise"] + jax.random.normal(key)
        return apply(optimizer, state, grads) | {"noise": noise}, {}

    assert_same_for_microbatches(
        lambda key: base_init(key) | {"noise": jnp.zeros(())},
        step_fn,
        key=jax.random.key(3),
    )


def test_what_reads_old_statistics_reads_those_before_the_update():
    def move(state, moved, batch):
        mean = all_reduce(batch["x"].mean())
        return {"mean": 0.5 * state["mean"] + 0.5 * mean, "before": state["mean"]}

    init_fn, step_fn = with_more({"mean": jnp.ones(()), "before": jnp.zeros(())}, move)
    first = after(init_fn, step_fn, k=4, steps=1)
    assert first["before"] == 1
    second = after(init_fn, step_fn, k=4, steps=2)
    assert second["before"] == first["mean"]


def test_a_train_state_of_flax_counts_updates():
    optimizer = wrap_optimizer(adam())

    def init_fn(key):
        return TrainState.create(apply_fn=mlp, params=init_mlp(key), tx=optimizer)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {}

    assert_same_for_microbatches(init_fn, step_fn)


class Regressor(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))[:, 0]


@pytest.mark.parametrize("by", ["weight", "count", None])
@pytest.mark.parametrize("n", [1, 4])
def test_an_optimizer_of_nnx_accumulates(by, n):
    tx = wrap_optimizer(adam(0.01))

    def init_fn(key):
        model = Regressor(nnx.Rngs(key))
        return {"model": model, "opt": nnx.Optimizer(model, tx, wrt=nnx.Param)}

    def step_fn(state, batch):
        def loss_fn(model):
            errors = (model(batch["x"]) - batch["y"]) ** 2
            return errors.sum() if by == "count" else errors.mean()

        grads = nnx.grad(loss_fn)(state["model"])
        share = {} if by is None else {by: len(batch["x"])}
        state["opt"].update(state["model"], grads, **share)
        return state, {}

    assert_same_for_microbatches(init_fn, step_fn, n=n)


def test_an_optimizer_of_nnx_runs_and_reports_its_norm():
    tx = wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        model = Regressor(nnx.Rngs(key))
        return {"model": model, "opt": nnx.Optimizer(model, tx, wrt=nnx.Param)}

    def step_fn(state, batch):
        def loss_fn(model):
            return ((model(batch["x"]) - batch["y"]) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(state["model"])
        state["opt"].update(state["model"], grads)
        return state, {"loss": loss, "by_hand": optax.tree.norm(all_reduce(grads))}

    result = replicas(2).run(
        step_fn, [regression_batch()], init_fn=init_fn, steps=2, display=False
    )
    norm = result.metrics["gradient_norm"]
    np.testing.assert_allclose(norm, result.metrics["by_hand"], rtol=1e-5)


@pytest.mark.parametrize("behind", ["schedule", "momentum"])
def test_a_stateful_transformation_behind_the_wrap_sees_updates(behind):
    later = {
        "schedule": optax.scale_by_schedule(lambda count: 1.0 / (1.0 + count)),
        "momentum": optax.trace(0.9),
    }[behind]
    optimizer = lenient(optax.chain(wrap_optimizer(optax.sgd(0.1)), later))
    assert_same_for_microbatches(*trainer(optimizer))


@pytest.mark.parametrize("written", ["once", "twice"])
def test_a_counter_that_weighs_statistics_counts_microbatches(written):
    def move(state, moved, batch):
        count = state["count"] + 1
        mean = all_reduce(batch["x"].mean())
        weighs = count if written == "once" else state["count"] + 1
        rate = 1 / weighs.astype(jnp.float32)
        return {"count": count, "mean": state["mean"] + (mean - state["mean"]) * rate}

    more = {"count": jnp.zeros((), jnp.int32), "mean": jnp.zeros(())}
    init_fn, step_fn = with_more(more, move)
    found = after(init_fn, step_fn, k=4, steps=1)
    assert found["count"] == 4
    np.testing.assert_allclose(found["mean"], regression_batch()["x"].mean(), rtol=1e-5)


def test_a_counter_of_examples_counts_all_of_them():
    def move(state, moved, batch):
        here = len(batch["x"]) * replicator.num_replicas()
        return {"seen": state["seen"] + here, "given": state["given"] + 16}

    more = {"seen": jnp.zeros((), jnp.int32), "given": jnp.zeros((), jnp.int32)}
    for k in (1, 4):
        found = after(*with_more(more, move), k=k, steps=3)
        assert (found["seen"], found["given"]) == (48, 48)


@pytest.mark.parametrize("every", [2, 4])
def test_an_average_in_a_loop_of_ones_own_moves_once_per_update(every):
    rep, average = replicas(2), replicator.ema(0.5)
    optimizer = wrap_optimizer(optax.sgd(0.1), accumulate=every)
    base_init, _ = trainer(optimizer)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        moved = apply(optimizer, state, grads)
        mean = average.update(moved["params"], state["mean"])
        return moved | {"mean": mean, "last": replicator.is_last_microbatch()}, {}

    step = rep.compile(step_fn)
    state = rep.init(
        lambda key: base_init(key) | {"mean": init_mlp(key), "last": jnp.asarray(False)}
    )
    lasts = []
    for _ in range(2 * every):
        before = jax.device_get(state["mean"])
        state, _ = step(state, regression_batch())
        lasts.append(bool(state["last"]))
        stayed = np.array_equal(before["w1"], state["mean"]["w1"])
        assert stayed is not lasts[-1]
    assert lasts == 2 * ([False] * (every - 1) + [True])


def test_a_plain_optimizer_beside_a_wrapped_one_is_refused():
    tx = adam()

    def tune(state, moved, batch):
        grad = all_reduce(jax.grad(lambda a: (a * batch["y"]).mean())(state["alpha"]))
        updates, opt = tx.update(grad, state["alpha_opt"])
        return {"alpha": state["alpha"] + updates, "alpha_opt": opt}

    alpha = jnp.ones(())
    tuning = with_more({"alpha": alpha, "alpha_opt": tx.init(alpha)}, tune)
    assert refusal(*tuning) == (
        "`accumulate` must be 1 where `alpha` of the returned state is moved by "
        "gradients outside of a wrapped optimizer, got more. Wrap the one that moves "
        "it: `rep.wrap_optimizer(tx, name=...)`."
    )


def test_the_state_of_a_plain_optimizer_that_reads_the_batch_is_refused():
    tx = adam()

    def tune(state, moved, batch):
        _, opt = tx.update(all_reduce(batch["y"].mean()), state["other"])
        return {"other": opt}

    tuning = with_more({"other": tx.init(jnp.ones(()))}, tune)
    assert "`other/0" in refusal(*tuning)


def test_a_parameter_moved_by_hand_is_refused():
    def descend(state, moved, batch):
        grad = jax.grad(lambda a: ((a - batch["y"]) ** 2).mean())(state["alpha"])
        return {"alpha": state["alpha"] - 0.1 * all_reduce(grad)}

    assert "`alpha`" in refusal(*with_more({"alpha": jnp.ones(())}, descend))


def test_a_plain_optimizer_beside_a_wrapped_one_runs_without_microbatches():
    tx = optax.sgd(0.5)

    def tune(state, moved, batch):
        grad = all_reduce(jax.grad(lambda a: (a * batch["y"]).mean())(state["alpha"]))
        return {"alpha": state["alpha"] + tx.update(grad, tx.init(grad))[0]}

    found = after(*with_more({"alpha": jnp.ones(())}, tune), steps=1)
    expected = 1 - 0.5 * regression_batch()["y"].mean()
    np.testing.assert_allclose(found["alpha"], expected, rtol=1e-5)


def test_old_checkpoints_with_a_gradient_norm_are_read(tmp_path):
    optimizer = wrap_optimizer(optax.sgd(0.1, momentum=0.9))
    state = {"opt": optimizer.init(jnp.ones(3))}
    inner = {"0": {"trace": np.full(3, 2.0, np.float32)}}
    old = {"opt": {"inner": inner, "gradient_norm": np.float32(7)}}
    with replicator.checkpoint.CheckpointStore(tmp_path) as store:
        store.save(replicator.checkpoint.Snapshot(step=1, arrays=old, meta={}))
        found = store.restore(state)
    assert found.arrays["opt"].inner[0].trace.tolist() == [2, 2, 2]

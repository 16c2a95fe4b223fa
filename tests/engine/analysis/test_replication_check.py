"""Law 2: a step whose replicas may drift apart is refused, and told where."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback

import replicator
from replicator import PerReplica
from replicator.errors import ReplicationError
from tests.steps import (
    FEATURES,
    adam,
    dropout_trainer,
    gan_trainer,
    image_batch,
    init_mlp,
    lenient,
    mlp_loss,
    norm_trainer,
    regression_batch,
    replicas,
    trainer,
)

X = np.ones((8, 2), np.float32)


def prove(step_fn, state, batch=None, key=None, **options):
    """Trace and prove `step_fn` on eight replicas; compile nothing."""
    rep = replicas(8)
    state = rep.init(state) if callable(state) else jax.tree.map(jnp.asarray, state)
    return rep.compile(step_fn, **options).lower(state, batch or {"x": X}, key)


def prove_value(value_fn, shape=()):
    """Prove the step whose state becomes `value_fn(x, w)`; x varies, w does not."""

    def step_fn(state, batch):
        return {"w": value_fn(batch["x"].sum(), state["w"])}, {}

    return prove(step_fn, {"w": jnp.ones(shape)})


def refusal(*arguments, **options):
    with pytest.raises(ReplicationError) as found:
        prove(*arguments, **options)
    return str(found.value)


def refused_value(value_fn, shape=()):
    with pytest.raises(ReplicationError) as found:
        prove_value(value_fn, shape)
    return str(found.value)


def reduced(x):
    return lax.psum(x, "replica")


# ---------------------------------------------------------------------- acceptance


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_mlp_with_adamw_is_proved(accumulate):
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(lenient(optax.adamw(0.1))))
    prove(step_fn, init_fn, regression_batch(), accumulate=accumulate)


def test_a_conv_net_with_batch_norm_is_proved():
    rep = replicas(8)
    init_fn, step_fn = norm_trainer(
        rep.wrap_optimizer(adam()), lambda x: lax.pmean(x, "replica")
    )
    prove(step_fn, init_fn, image_batch())


def test_a_loss_summed_by_scan_is_proved():
    rep = replicas(8)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def loss_fn(params, batch):
        def add(total, example):
            return total + mlp_loss(
                params, jax.tree.map(lambda x: x[None], example)
            ), None

        return lax.scan(add, jnp.zeros(()), batch)[0] / len(batch["y"])

    init_fn, step_fn = trainer(optimizer, loss_fn)
    prove(step_fn, init_fn, regression_batch())


def test_a_reversed_scan_of_returns_is_proved():
    # The shape of V-trace: values corrected backwards in time, with clipped ratios.
    rep = replicas(8)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def loss_fn(params, batch):
        values = batch["x"] @ params
        ratios = jnp.minimum(1.0, jnp.exp(batch["y"]))

        def back(acc, step):
            delta, ratio = step
            acc = delta + 0.9 * ratio * acc
            return acc, acc

        _, errors = lax.scan(
            back, jnp.zeros(()), (batch["y"] - values, ratios), reverse=True
        )
        return ((lax.stop_gradient(errors + values) - values) ** 2).mean()

    init_fn, step_fn = trainer(optimizer, loss_fn, lambda key: jnp.ones(FEATURES))
    prove(step_fn, init_fn, regression_batch(32))


def test_dropout_by_replica_is_proved():
    rep = replicas(8)

    def keys(key, n):
        return jax.random.split(replicator.replica_key(key), n)

    init_fn, step_fn = dropout_trainer(rep.wrap_optimizer(adam()), keys=keys)
    prove(step_fn, init_fn, regression_batch(), jax.random.key(0))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skip_on_a_reduced_flag_is_proved(accumulate):
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam(), skip_nonfinite=True))
    prove(step_fn, init_fn, regression_batch(), accumulate=accumulate)


def test_a_skip_written_by_hand_is_proved():
    rep = replicas(8)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, step_fn = trainer(optimizer)

    def careful(state, batch):
        after, metrics = step_fn(state, batch)
        good = lax.pmin(jnp.isfinite(batch["y"]).all().astype(jnp.int32), "replica")
        return lax.cond(good > 0, lambda: after, lambda: state), metrics

    prove(careful, init_fn, regression_batch())


def test_multi_steps_inside_is_proved():
    rep = replicas(8)
    inner = lenient(optax.MultiSteps(optax.sgd(0.1), 4))
    init_fn, step_fn = trainer(rep.wrap_optimizer(inner))
    prove(step_fn, init_fn, regression_batch())


def test_an_own_accumulating_optimizer_is_proved():
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam(), accumulate=4))
    prove(step_fn, init_fn, regression_batch())


def test_clipping_by_global_norm_is_proved():
    rep = replicas(8)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    init_fn, step_fn = trainer(rep.wrap_optimizer(tx))
    prove(step_fn, init_fn, regression_batch())


def test_many_steps_a_call_are_proved():
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 3), regression_batch())
    prove(step_fn, init_fn, stacked, steps_per_call=3)


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


@jax.custom_jvp
def kept(x):
    return x


kept.defjvp(lambda primals, tangents: (kept(*primals), tangents[0]))


@pytest.mark.parametrize(
    "through",
    [halved, kept, jax.checkpoint(jnp.tanh), jax.jit(jnp.tanh), jax.vmap(jnp.tanh)],
    ids=["custom_vjp", "custom_jvp", "remat", "jit", "vmap"],
)
def test_gradients_through_calls_are_proved_when_reduced(through):
    def loss(w, x):
        return (through(w * jnp.ones((2,))) * x).sum()

    prove_value(lambda x, w: w - reduced(jax.grad(loss)(w, x)))
    assert "`w` may differ" in refused_value(lambda x, w: w - jax.grad(loss)(w, x))


ACCEPTED = {
    "psum": lambda x, w: reduced(x),
    "pmean": lambda x, w: lax.pmean(x, "replica"),
    "pmax": lambda x, w: lax.pmax(x, "replica"),
    "pmin": lambda x, w: lax.pmin(x, "replica"),
    "all_gather": lambda x, w: lax.all_gather(x, "replica").sum(),
    "while on a reduced count": lambda x, w: lax.while_loop(
        lambda c: c < reduced(x), lambda c: c * 2, w
    ),
    "cond on a reduced flag": lambda x, w: lax.cond(
        reduced(x) > 0, lambda: w, lambda: 2 * w
    ),
    "a collective in one branch": lambda x, w: lax.cond(
        w > 0, lambda: reduced(x), lambda: w
    ),
    "fori_loop that reduces": lambda x, w: lax.fori_loop(
        0, 3, lambda _, c: c + reduced(x), w
    ),
    "broadcast": lambda x, w: replicator.broadcast(x),
    "ordered sum": lambda x, w: replicator.all_reduce(x, "sum", reduction="ordered"),
    "weighted mean": lambda x, w: replicator.all_reduce(x, weight=x),
    "product": lambda x, w: replicator.all_reduce(x, "product"),
    "map_reduce": lambda x, w: replicator.map_reduce(
        lambda item: item * w, [jnp.ones(())] * 3
    ),
    "replica id summed": lambda x, w: reduced(replicator.replica_id().astype(float)),
    "shape of what varies": lambda x, w: w * x.ndim,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_agrees_is_proved(name):
    prove_value(ACCEPTED[name])


def test_a_psum_of_a_tree_is_proved():
    def step_fn(state, batch):
        a, b = lax.psum((batch["x"].sum(), batch["x"].max()), "replica")
        return {"a": a, "b": b}, {}

    prove(step_fn, {"a": jnp.ones(()), "b": jnp.ones(())})


# -------------------------------------------------------------------------- refusal


def ring(x):
    """Sum around a ring: equal on all replicas by arithmetic, not by structure."""
    total = x
    for _ in range(7):
        x = lax.ppermute(x, "replica", [(i, (i + 1) % 8) for i in range(8)])
        total = total + x
    return total


def solved(x, w):
    factor = lax.axis_index("replica").astype(jnp.float32) + 1
    return lax.custom_linear_solve(
        lambda v: v * factor, w, lambda matvec, b: b / factor, symmetric=True
    )


def called_back(x, w):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float32), x)


def with_impure_callback(x, w):
    return io_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32))


def read_after_write(read):
    """Return a function that reads, by `read`, a mutable array that holds x."""

    def value_fn(x, w):
        ref = jax.new_ref(w)
        ref[...] = x
        return read(ref, w)

    return value_fn


def ragged(x, w):
    ones = jnp.ones(8, jnp.int32)
    starts = jnp.arange(8, dtype=jnp.int32)
    rows = w * jnp.ones(8)
    return lax.ragged_all_to_all(
        rows, rows, starts, ones, starts, ones, axis_name="replica"
    ).sum()


REFUSED = {
    "the batch itself": lambda x, w: x,
    "x - x": lambda x, w: w + (x - x),
    "axis_index": lambda x, w: w * lax.axis_index("replica").astype(jnp.float32),
    "replica_id": lambda x, w: w * replicator.replica_id().astype(jnp.float32),
    "cond on what varies": lambda x, w: lax.cond(x > 0, lambda: w, lambda: 2 * w),
    "switch on what varies": lambda x, w: lax.switch(
        x.astype(jnp.int32), [lambda: w, lambda: 2 * w]
    ),
    "while on what varies": lambda x, w: lax.while_loop(
        lambda c: c < x, lambda c: c * 2, w
    ),
    "while whose bound varies late": lambda x, w: lax.while_loop(
        lambda c: c[0] < c[1], lambda c: (c[0] * 2, x, c[2] + 1), (w, w, w)
    )[2],
    "scan that lets it in late": lambda x, w: lax.scan(
        lambda c, _: ((c[1], c[2], x), None), (w, w, w), None, length=3
    )[0][0],
    "select": lambda x, w: jnp.where(x > 0, w, 2 * w),
    "index": lambda x, w: jnp.arange(4.0)[x.astype(jnp.int32)],
    "reduce_scatter": lambda x, w: lax.psum_scatter(
        x * jnp.ones(8), "replica", scatter_dimension=0
    ).sum(),
    "all_to_all": lambda x, w: lax.all_to_all(w * jnp.ones(8), "replica", 0, 0).sum(),
    "ring": lambda x, w: ring(x),
    "grouped psum": lambda x, w: lax.psum(
        x, "replica", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]
    ),
    "grouped psum of an equal value": lambda x, w: replicator.all_reduce(
        w, "sum", groups=[[0, 1, 2], [3, 4, 5, 6, 7]]
    ),
    "grouped all_gather": lambda x, w: lax.all_gather(
        x, "replica", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]
    ).sum(),
    "a reduction added to what varies": lambda x, w: reduced(x) + x,
    "custom_linear_solve around axis_index": solved,
    "rng_uniform": lambda x, w: lax.rng_uniform(0.0 * w, w, ()),
    "pure_callback": called_back,
    "io_callback": with_impure_callback,
    "ragged_all_to_all": ragged,
    "mutable array, read": read_after_write(lambda ref, w: ref[...]),
    "mutable array, swapped": read_after_write(
        lambda ref, w: jax.ref.swap(ref, ..., w)
    ),
    "mutable array, frozen": read_after_write(lambda ref, w: jax.freeze(ref)),
    "mutable array, read in a branch": read_after_write(
        lambda ref, w: lax.cond(w > 0, lambda: ref[...], lambda: w)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_differ_is_refused(name):
    assert refused_value(REFUSED[name]).startswith("`w` may differ between replicas: ")


@pytest.mark.parametrize("name", ["ring", "x - x"])
def test_a_promise_lets_pass_what_the_proof_cannot_see(name):
    prove_value(lambda x, w: replicator.assume_replicated(REFUSED[name](x, w)))


def test_a_varying_value_may_be_declared():
    def step_fn(state, batch):
        return {"own": PerReplica(state["own"].value + batch["x"].sum())}, {}

    prove(step_fn, lambda key: {"own": PerReplica(jnp.zeros(()))})


def test_what_follows_from_a_declared_leaf_may_differ():
    def step_fn(state, batch):
        return {"own": state["own"], "w": state["own"].value}, {}

    def init_fn(key):
        return {"own": PerReplica(jnp.zeros(())), "w": jnp.zeros(())}

    message = refusal(step_fn, init_fn)
    assert message.startswith(
        "`w` may differ between replicas: it was computed from a `PerReplica` leaf"
    )


def test_metrics_need_no_proof():
    prove(lambda state, batch: (state, {"x": batch["x"].sum()}), {"w": jnp.ones(())})


# ------------------------------------------------------------------------ messages


def line_of(function, text):
    """Return `file:line in function`, as an error names the line that holds `text`."""
    lines, start = inspect.getsourcelines(function)
    [offset] = [i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{start + offset} in {function.__name__}"


def test_an_unwrapped_optimizer_is_named_by_leaf_primitive_and_line():
    tx = optax.sgd(0.1)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {}

    def init_fn(key):
        params = init_mlp(key)
        return {"params": params, "opt": tx.init(params)}

    where = line_of(step_fn, "optax.apply_updates")
    assert refusal(step_fn, init_fn, regression_batch()) == (
        "`params/b1` may differ between replicas: it was computed from the batch at "
        f"{where} (`add`) and not reduced. So may 2 more. Reduce gradients with "
        "`rep.wrap_optimizer`, other values with `replicator.all_reduce`; declare a "
        "leaf that should differ with `PerReplica`, or assert what the proof cannot "
        "see with `replicator.assume_replicated`."
    )


def test_a_source_inside_the_step_is_named_by_its_own_line():
    def step_fn(state, batch):
        index = lax.axis_index("replica")
        scaled = state["w"] * index.astype(jnp.float32)
        return {"w": scaled + 1}, {}

    message = refusal(step_fn, {"w": jnp.ones(())})
    where = line_of(step_fn, "lax.axis_index")
    assert f"`axis_index` at {where} differs on each replica" in message


def test_the_line_is_found_inside_a_function_that_the_step_calls():
    def moved(w, x):
        y = w + 1
        return y * x

    def step_fn(state, batch):
        return {"w": jax.jit(moved)(state["w"], batch["x"].sum())}, {}

    where = line_of(moved, "y * x")
    assert f"{where} (`mul`)" in refusal(step_fn, {"w": jnp.ones(())})


def test_the_line_is_found_inside_a_loop():
    def body(carry, row):
        return carry * row.sum(), None

    def step_fn(state, batch):
        return {"w": lax.scan(body, state["w"], batch["x"])[0]}, {}

    where = line_of(body, "carry * row")
    assert f"{where} (`mul`)" in refusal(step_fn, {"w": jnp.ones(())})


def test_the_line_of_a_jitted_function_of_jax_is_that_of_its_call():
    def early(state, batch):
        return {"w": jnp.where(batch["x"].sum() > 0, state["w"], 0.0)}, {}

    def step_fn(state, batch):
        return {"w": jnp.where(batch["x"].sum() > 0, state["w"], 0.0)}, {}

    refusal(early, {"w": jnp.ones(())})  # JAX keeps this trace of `jnp.where`
    where = line_of(step_fn, "jnp.where")
    assert f"at {where} (`select_n`)" in refusal(step_fn, {"w": jnp.ones(())})


def test_only_the_guilty_leaf_is_named():
    def step_fn(state, batch):
        return {
            "good": lax.pmean(batch["x"].sum(), "replica"),
            "bad": state["bad"] * batch["x"].sum(),
        }, {}

    message = refusal(step_fn, {"good": jnp.ones(()), "bad": jnp.ones(())})
    assert message.startswith("`bad` may differ")
    assert "more." not in message


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_statistics_that_are_not_reduced_are_named(accumulate):
    rep = replicas(8)
    init_fn, step_fn = norm_trainer(rep.wrap_optimizer(adam()), lambda x: x)
    message = refusal(step_fn, init_fn, image_batch(), accumulate=accumulate)
    assert message.startswith("`running` may differ between replicas")
    assert re.search(r"steps\.py:\d+ in step_fn \(`add`\)", message)


def test_one_of_two_gan_optimizers_left_unwrapped_is_named():
    rep = replicas(8)
    init_fn, step_fn = gan_trainer(rep.wrap_optimizer(adam()), optax.sgd(0.1))
    message = refusal(step_fn, init_fn, regression_batch())
    assert message.startswith("`critic/params` may differ")


def test_a_refused_step_is_refused_on_one_replica_too():
    init_fn, step_fn = trainer(optax.sgd(0.1))
    rep = replicas(1)
    with pytest.raises(ReplicationError, match="`params/b1` may differ"):
        rep.compile(step_fn)(rep.init(init_fn), regression_batch())


def test_program_order_of_the_newest_jax_is_a_call_like_others():
    overlap = pytest.importorskip("jax.experimental.overlap")

    @overlap.program_order(enforce=True)
    def both(x, w):
        return x, w + reduced(x)

    prove_value(lambda x, w: both(x, w)[1])
    assert "`w` may differ" in refused_value(lambda x, w: both(x, w)[0])

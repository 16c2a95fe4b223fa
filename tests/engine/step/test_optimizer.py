"""A wrapped optimizer sees the gradient of the whole global batch, and nothing less."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import OptimizerState, PerReplica, strategies, wrap_optimizer
from replicator.errors import ArgumentError
from tests.steps import (
    adam,
    apply,
    assert_close,
    assert_equal_bits,
    errors,
    init_mlp,
    lenient,
    mlp_loss,
    params_after,
    regression_batch,
    replicas,
    trainer,
    weighted_trainer,
)

TRANSFORMATIONS = {
    "adamw": lambda: lenient(optax.adamw(0.1, weight_decay=0.1)),
    "lamb": lambda: lenient(optax.lamb(0.1)),
    "adafactor": lambda: lenient(optax.adafactor(0.1)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0)),
    "scheduled": lambda: lenient(optax.sgd(optax.linear_schedule(0.5, 0.0, 4))),
    "masked": lambda: optax.masked(
        optax.sgd(0.1), {"w1": True, "b1": False, "w2": False}
    ),
    "by label": lambda: optax.multi_transform(
        {"slow": optax.sgd(0.01), "fast": optax.sgd(0.1)},
        {"w1": "slow", "b1": "fast", "w2": "fast"},
    ),
}


def trained(tx, *, n, accumulate=1, steps=3, batch=None):
    rep = replicas(n)
    init_fn, step_fn = trainer(rep.wrap_optimizer(tx))
    step = rep.compile(step_fn, accumulate=accumulate)
    return params_after(
        step, rep.init(init_fn), batch or regression_batch(), steps=steps
    )


@pytest.mark.parametrize(
    ("n", "accumulate"), [(8, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_any_transformation_gives_the_answer_of_one_device(name, n, accumulate):
    tx, batch = TRANSFORMATIONS[name](), regression_batch()

    @jax.jit
    def by_hand(params, opt):
        updates, opt = tx.update(jax.grad(mlp_loss)(params, batch), opt, params)
        return optax.apply_updates(params, updates), opt

    params = init_mlp(None)
    opt = tx.init(params)
    for _ in range(3):
        params, opt = by_hand(params, opt)
    assert_close(trained(tx, n=n, accumulate=accumulate), params, rtol=1e-5)


def test_replicas_are_clipped_together():
    # Gradients ±1 on two replicas: clipped one by one to 0.1 they would cancel too, but
    # 3 and -1 mean 1 after reduction, and 0 if each were clipped to ±0.1 first.
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    )

    def init_fn(key):
        return {"params": jnp.zeros(()), "opt": optimizer.init(jnp.zeros(()))}

    def step_fn(state, batch):
        return apply(optimizer, state, batch["g"].mean()), {}

    state, _ = rep.compile(step_fn)(rep.init(init_fn), {"g": np.float32([3, -1])})
    np.testing.assert_allclose(state["params"], -0.1, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_schedules_count_updates(accumulate):
    rates = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.0})
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(lenient(optax.sgd(rates)))

    def init_fn(key):
        return {"params": jnp.zeros(()), "opt": optimizer.init(jnp.zeros(()))}

    def step_fn(state, batch):
        return apply(optimizer, state, batch["g"].mean()), {}

    step, state, path = (
        rep.compile(step_fn, accumulate=accumulate),
        rep.init(init_fn),
        [],
    )
    for _ in range(4):
        state, _ = step(state, {"g": np.ones(8, np.float32)})
        path.append(float(state["params"]))
    assert path == [-1.0, -1.5, -1.5, -1.5]


def test_extra_arguments_reach_the_inner_update():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: -value * g, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = wrap_optimizer(inner)
    updates, _ = optimizer.update(
        jnp.asarray(3.0), optimizer.init(jnp.zeros(())), value=2.0
    )
    assert float(updates) == -6


def test_the_gradient_norm_is_that_of_the_reduced_gradient():
    rep, batch = replicas(8), regression_batch()
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    grads = jax.grad(mlp_loss)(jax.device_get(rep.init(init_fn)["params"]), batch)
    result = rep.run(step_fn, [batch], init_fn=init_fn, steps=1, display=False)
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(result.metrics["gradient_norm"], norm, rtol=1e-5)


def test_outside_any_replica_it_is_the_plain_transformation():
    tx = adam()
    optimizer, params = wrap_optimizer(tx), init_mlp(None)
    grads = jax.grad(mlp_loss)(params, regression_batch())
    found, _ = optimizer.update(grads, optimizer.init(params), params, weight=3.0)
    expected, _ = tx.update(grads, tx.init(params), params)
    assert_close(found, expected)


def test_it_keeps_its_name():
    assert wrap_optimizer(adam(), name="critic").init(jnp.zeros(())).name == "critic"


def poisoned(batch, value):
    """Put a bad number into the examples of one replica only."""
    batch = jax.tree.map(np.copy, batch)
    batch["y"][3] = value
    return batch


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_non_finite_update_is_skipped_and_counted_on_all_replicas(value, accumulate):
    rep, batch = replicas(8), regression_batch()
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam(), skip_nonfinite=True))
    step = rep.compile(step_fn, accumulate=accumulate)
    state, _ = step(rep.init(init_fn), batch)
    before = jax.device_get(state)
    state, _ = step(state, poisoned(batch, value))
    assert_equal_bits(state["params"], before["params"])
    assert_equal_bits(state["opt"].inner, before["opt"].inner)
    counts = [int(s.data) for s in state["opt"].skipped.addressable_shards]
    assert counts == [1] * 8


def test_training_goes_on_after_a_skipped_update():
    batch = regression_batch()

    def path(batches):
        rep = replicas(2)
        init_fn, step_fn = trainer(rep.wrap_optimizer(adam(), skip_nonfinite=True))
        step, state = rep.compile(step_fn), rep.init(init_fn)
        for each in batches:
            state, _ = step(state, each)
        return state

    skipped = path([batch, poisoned(batch, np.nan), batch])
    assert_equal_bits(skipped["params"], path([batch, batch])["params"])
    assert int(skipped["opt"].skipped) == 1


def test_without_skipping_a_non_finite_update_goes_through():
    rep = replicas(8)
    init_fn, step_fn = trainer(rep.wrap_optimizer(adam()))
    state, _ = rep.compile(step_fn)(
        rep.init(init_fn), poisoned(regression_batch(), np.nan)
    )
    assert state["opt"].skipped is None
    assert np.isnan(state["params"]["w1"]).any()


def own_loop(k, *, n=2, weighted=False, tx=None):
    """Return a step of one microbatch, for a loop that feeds k of them."""
    rep = replicas(n)
    make = weighted_trainer if weighted else trainer
    init_fn, step_fn = make(rep.wrap_optimizer(tx or optax.sgd(0.1), accumulate=k))
    return rep.compile(step_fn), rep.init(init_fn)


def microbatches(batch, k):
    return [
        jax.tree.map(lambda leaf, j=j: np.split(leaf, k)[j], batch) for j in range(k)
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_an_own_loop_over_microbatches_equals_the_big_batch(weighted):
    batch = {**regression_batch(), "mask": (np.arange(16) % 3 > 0).astype(np.float32)}
    batch["mask"][4:6] = 0  # one replica's part of one microbatch is all padding
    step, state = own_loop(4, weighted=weighted, tx=adam())
    for _ in range(2):
        for microbatch in microbatches(batch, 4):
            state, _ = step(state, microbatch)
    rep = replicas(1)
    init_fn, step_fn = (weighted_trainer if weighted else trainer)(
        rep.wrap_optimizer(adam())
    )
    big = params_after(rep.compile(step_fn), rep.init(init_fn), batch, steps=2)
    assert_close(state["params"], big, rtol=2e-6)
    assert int(state["opt"].inner[0].count) == 2


def test_parameters_wait_for_the_last_call_of_an_own_loop():
    step, state = own_loop(3)
    before = jax.device_get(state["params"])
    for _ in range(2):
        state, _ = step(state, regression_batch())
        assert_equal_bits(state["params"], before)
    state, _ = step(state, regression_batch())
    assert not np.array_equal(state["params"]["w1"], before["w1"])


def test_the_sum_of_an_own_loop_is_declared_per_replica():
    _, state = own_loop(3, n=8)
    pending = state["opt"].pending
    assert isinstance(pending.total, PerReplica)
    assert pending.total.on_resize == "sum"
    assert pending.total.value["w1"].shape == (8, 4, 8)
    assert pending.weight.on_resize == "sum"


def test_an_own_loop_of_one_keeps_no_sums():
    _, state = own_loop(1)
    assert isinstance(state["opt"], OptimizerState)
    assert state["opt"].pending is None


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")
def test_gradients_of_numpy_add_up_in_the_width_of_jax():
    tx, params = wrap_optimizer(optax.sgd(1.0), accumulate=2), {"w": jnp.ones(2)}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update({"w": np.ones(2)}, state, params)
    assert updates["w"].tolist() == [-1.0, -1.0]


def test_an_own_loop_outside_any_replica_is_one_replica():
    optimizer, batch = wrap_optimizer(optax.sgd(0.1), accumulate=4), regression_batch()
    init_fn, step_fn = trainer(optimizer)
    state = init_fn(jax.random.key(0))
    expected = jax.grad(mlp_loss)(state["params"], batch)
    after = state
    for microbatch in microbatches(batch, 4):
        after, _ = jax.jit(step_fn)(after, microbatch)
    moved = jax.tree.map(lambda a, b: (a - b) / 0.1, state["params"], after["params"])
    assert_close(moved, expected, rtol=2e-6)


def test_a_skipped_update_of_an_own_loop_starts_the_next_one_from_zero():
    batch = regression_batch(8)
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(adam(), accumulate=2, skip_nonfinite=True)
    init_fn, step_fn = trainer(optimizer)
    step = rep.compile(step_fn)

    def after(batches):
        state = rep.init(init_fn)
        for each in batches:
            state, _ = step(state, each)
        return state

    bad = poisoned(batch, np.nan)
    skipped, clean = after([bad, batch, batch, batch]), after([batch, batch])
    assert_equal_bits(skipped["params"], clean["params"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "`accumulate` must be at least 1, got 0"),
        ({"reduction": "slow"}, "`reduction` must be one of 'fast', 'ordered'"),
        (
            {"reduction": "ordered", "accumulate": 2},
            "`accumulate` must be 1 with `reduction='ordered'`, got 2",
        ),
    ],
)
def test_a_bad_option_is_refused_at_the_door(options, message):
    with pytest.raises(ArgumentError, match=message):
        wrap_optimizer(adam(), **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_weight_per_example_is_refused(accumulate):
    rep = replicas(2)
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))

    def init_fn(key):
        return {"params": jnp.zeros(()), "opt": optimizer.init(jnp.zeros(()))}

    def step_fn(state, batch):
        return apply(optimizer, state, batch["y"].mean(), weight=batch["y"]), {}

    with pytest.raises(ArgumentError, match="`weight` must be"):
        rep.compile(step_fn, accumulate=accumulate)(
            rep.init(init_fn), {"y": np.ones(8, np.float32)}
        )


def test_unweighted_updates_count_replicas_alike():
    rep = replicas(2)
    optimizer = replicator.wrap_optimizer(optax.sgd(1.0))

    def init_fn(key):
        return {"params": jnp.zeros(()), "opt": optimizer.init(jnp.zeros(()))}

    def step_fn(state, batch):
        return apply(optimizer, state, batch["g"].mean()), {}

    state, _ = rep.compile(step_fn)(rep.init(init_fn), {"g": np.float32([1, 5])})
    assert float(state["params"]) == -3


def test_it_reduces_over_the_axis_of_a_mesh_of_ones_own():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]), ("data",))
    optimizer, batch = (
        wrap_optimizer(optax.sgd(0.1), axis_name="data"),
        regression_batch(),
    )
    params = init_mlp(None)

    def step(params, batch):
        grads = jax.grad(mlp_loss)(params, batch)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    spec = jax.sharding.PartitionSpec
    spread = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(spec(), spec("data")),
        out_specs=spec(),
        check_vma=False,
    )
    assert_close(jax.jit(spread)(params, batch), step_alone(params, batch))


def step_alone(params, batch):
    grads = jax.grad(mlp_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_an_axis_of_ones_own_takes_no_accumulation():
    with pytest.raises(ArgumentError, match="`axis_name` must be 'replica' with"):
        wrap_optimizer(optax.sgd(0.1), axis_name="data", accumulate=2)


@pytest.mark.parametrize(
    "leaf", [jnp.ones(3, jnp.int32), np.zeros(3, jax.dtypes.float0)]
)
def test_gradients_that_are_no_floats_are_refused_by_name(leaf):
    optimizer = wrap_optimizer(optax.sgd(0.1))
    state = optimizer.init({"table": jnp.ones(3)})
    with pytest.raises(ArgumentError, match=r"floating-point leaves, got .*`table`"):
        optimizer.update({"table": leaf}, state)


@pytest.mark.parametrize("told", [True, False])
def test_a_run_reports_the_gradient_norm_unless_told_not_to(told):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    result = rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=1,
        gradient_norm=told,
        display=False,
    )
    assert ("gradient_norm" in result.metrics) is told


def test_a_loop_of_ones_own_computes_no_gradient_norm():
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    lowered = rep.compile(step_fn).lower(rep.init(init_fn), regression_batch())
    assert "sqrt" not in lowered.as_text()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", [None, strategies.fsdp()])
def test_gradients_of_single_examples_are_refused_by_name(told, accumulate, strategy):
    rep = replicas(4, strategy=strategy)
    private = optax.chain(
        optax.contrib.differentially_private_aggregate(0.1, 0.0, key=0),
        optax.sgd(0.1),
    )
    tx = rep.wrap_optimizer(lenient(private))

    def step_fn(state, batch):
        grads = jax.vmap(jax.grad(mlp_loss), (None, 0))(
            state["params"], jax.tree.map(lambda leaf: leaf[:, None], batch)
        )
        params = state["params"] if told else None
        updates, opt = tx.update(grads, state["opt"], params)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {}

    state = rep.init(trainer(tx)[0])
    with pytest.raises(ArgumentError, match=r"`grads` must .*leaf `b1`.*wrap"):
        rep.compile(step_fn, accumulate=accumulate)(state, regression_batch())


@pytest.mark.parametrize("absent", [None, optax.MaskedNode()])
def test_gradients_of_some_of_the_parameters_are_right(absent):
    optimizer = wrap_optimizer(optax.sgd(0.5))
    params = {"w": jnp.ones(3), "frozen": jnp.ones(2)}
    own = {"w": params["w"], "frozen": absent}
    grads = {"w": jnp.ones(3), "frozen": absent}
    updates, _ = optimizer.update(grads, optimizer.init(own), own)
    assert updates["w"].tolist() == [-0.5] * 3
    updates, _ = optimizer.update({"w": grads["w"]}, optimizer.init(own), params)
    assert updates["w"].tolist() == [-0.5] * 3


@pytest.mark.parametrize("strategy", [None, strategies.fsdp()])
def test_hyperparameters_are_read_and_set_by_hand(strategy):
    rep = replicas(2, strategy=strategy)
    tx = rep.wrap_optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    init_fn, train = trainer(tx)

    def step_fn(state, batch):
        after, _ = train(state, batch)
        return after, {"rate": state["opt"].hyperparams["learning_rate"]}

    step, state, batch = rep.compile(step_fn), rep.init(init_fn), regression_batch()
    state, metrics = step(state, batch)
    assert metrics["rate"] == 0.5
    state["opt"].hyperparams["learning_rate"] = 0.0
    before = jax.device_get(state["params"])
    state, metrics = step(state, batch)
    assert metrics["rate"] == 0.0
    assert_equal_bits(state["params"], before)


def test_an_optimizer_without_hyperparameters_says_so():
    with pytest.raises(AttributeError, match="hyperparams"):
        _ = wrap_optimizer(optax.sgd(0.1)).init({"w": jnp.ones(3)}).hyperparams


VALUED = {
    "plateau": lambda: optax.chain(
        optax.sgd(0.2), optax.contrib.reduce_on_plateau(0.5, patience=0)
    ),
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.5),
}


def valued_trainer(tx, how):
    """Hand the loss to the optimizer too, as a mean, or of a sum over a count."""
    init_fn, _ = trainer(tx)

    def step_fn(state, batch):
        if how != "count":
            loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
            extra = {"weight": 16.0} if how == "weight" else {}
            return apply(tx, state, grads, value=loss, **extra), {"loss": loss}

        def sums(params):
            losses = errors(params, batch)
            return replicator.LocalSum(losses.sum(), len(losses))

        loss, grads = replicator.value_and_grad(sums)(state["params"])
        extra = {"value": loss.value, "count": loss.weight}
        return apply(tx, state, grads, **extra), {"loss": loss}

    return init_fn, step_fn


@pytest.mark.parametrize(
    ("n", "k", "how"), [(4, 1, "mean"), (2, 2, "count"), (1, 4, "weight")]
)
@pytest.mark.parametrize("name", VALUED)
def test_an_optimizer_that_takes_the_value_gets_that_of_the_whole_batch(
    name, n, k, how
):
    batch = regression_batch()

    def states(tx, rep, k, how):
        init_fn, step_fn = valued_trainer(tx, how)
        step, state = rep.compile(step_fn, accumulate=k), rep.init(init_fn)
        for _ in range(3):
            state, _ = step(state, batch)
        return jax.device_get((state["params"], state["opt"].inner))

    found = replicas(n)
    one = replicas(1)
    assert_close(
        states(found.wrap_optimizer(lenient(VALUED[name]())), found, k, how),
        states(one.wrap_optimizer(lenient(VALUED[name]())), one, 1, "mean"),
    )


def in_scan(update, state, rows):
    return jax.lax.scan(lambda s, row: (update(s, row), None), state, rows)[0]


def in_while_loop(update, state, rows):
    def step(held):
        return held[0] + 1, update(held[1], rows[held[0]])

    return jax.lax.while_loop(lambda held: held[0] < 2, step, (0, state))[1]


def is_due(state):
    return state[0].sum() < 1e9  # traced, and so is what follows from it


def in_cond(update, state, rows):
    return jax.lax.cond(is_due(state), lambda s: update(s, rows[0]), lambda s: s, state)


def in_switch(update, state, rows):
    branches = [lambda s: s, lambda s: update(s, rows[0])]
    return jax.lax.switch(is_due(state).astype(int), branches, state)


def in_fori_loop(update, state, rows):
    return jax.lax.fori_loop(0, 2, lambda i, s: update(s, rows[i]), state)


def in_jit(update, state, rows):
    return jax.jit(update)(state, rows[0])


def in_checkpoint(update, state, rows):
    return jax.checkpoint(update)(state, rows[0])


def under_vmap(update, state, rows):
    return jax.vmap(update)(state, rows)


def over_states(update, state, rows):
    return jax.lax.scan(lambda _, one: (None, update(*one)), None, (state, rows))[1]


def scan_under_vmap(update, state, rows):
    return jax.vmap(lambda s, row: in_scan(update, s, row[None]))(state, rows)


@pytest.mark.parametrize(
    ("around", "shown"),
    [
        *((each, ()) for each in (in_scan, in_while_loop, in_cond, in_switch)),
        *((each, ()) for each in (in_fori_loop, in_jit, in_checkpoint)),
        *((each, (2,)) for each in (under_vmap, over_states)),
        (scan_under_vmap, None),  # there is no way to show it
    ],
)
def test_a_run_updates_within_what_jax_calls_as_a_compiled_step_does(around, shown):
    rep, rows = replicas(1), np.ones((2, 3), np.float32)
    optimizer = rep.wrap_optimizer(adam())
    many = around in (under_vmap, over_states, scan_under_vmap)

    def init_fn(key):
        params = jnp.zeros((2, 3) if many else 3)
        return params, (jax.vmap(optimizer.init) if many else optimizer.init)(params)

    def update(state, row):
        updates, opt = optimizer.update(state[0] - row, state[1], state[0])
        return state[0] + updates, opt

    calls = []

    def step_fn(state, batch):
        jax.debug.callback(lambda: calls.append(None))
        return around(update, state, batch[0]), {}

    expected, _ = rep.compile(step_fn)(rep.init(init_fn), rows[None])
    ran = rep.run(step_fn, [rows[None]], init_fn=init_fn, steps=1, display=False)
    assert_equal_bits(ran.state, expected)
    jax.effects_barrier()
    assert len(calls) == 2  # what was tried, and failed, calls nobody
    norm = ran.metrics.get("gradient_norm")
    assert (None if norm is None else np.shape(norm)) == shown
    assert norm is None or np.all(np.asarray(norm) > 0)


def test_an_optimizer_that_a_loop_carries_and_does_not_call_has_no_norm():
    rep = replicas(2)
    txs = [rep.wrap_optimizer(adam(), name=name) for name in "ab"]

    def step_fn(state, batch):
        def update(opts, grad):
            return (txs[0].update(grad, opts[0])[1], opts[1]), None

        return jax.lax.scan(update, state, batch)[0], {}

    result = rep.run(
        step_fn,
        [np.ones((4, 3), np.float32)],
        init_fn=lambda key: tuple(tx.init(jnp.zeros(3)) for tx in txs),
        steps=1,
        display=False,
    )
    assert list(result.metrics) == ["gradient_norm"]

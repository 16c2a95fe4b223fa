"""A step has the same answer on every layout; `CASES` has a row for each maker."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Sharding

from replicator import (
    Concat,
    PerReplica,
    all_reduce,
    num_replicas,
    replica_id,
    replica_key,
    strategies,
    wrap_optimizer,
)
from replicator.base.mesh import put
from replicator.collectives.moments import make_windows
from replicator.engine.evaluation.evaluate import Evaluation
from replicator.engine.evaluation.predict import Prediction
from replicator.engine.layout import EQUAL, STATE, examples, per_replica
from replicator.engine.make_step import compiled_step
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.state import first_state
from replicator.errors import ArgumentError, ReplicationError
from replicator.inputs.placement import batch_axis, place
from replicator.testing.invariance import GRADIENT_TOLERANCE
from tests.helpers import partitioned_layout, replicated_layout
from tests.steps import assert_equal_bits

optimizer = wrap_optimizer(optax.sgd(0.1, momentum=0.9))


class Refusal(NamedTuple):
    """A step that a layout does not take."""

    step_fn: object
    error: type
    message: str


class Case(NamedTuple):
    """A maker of layouts, and what it refuses by name."""

    make: object
    refused: dict


def unreduced(state, batch):
    _, gradient = jax.value_and_grad(loss_fn)(state["params"], batch)
    params = jax.tree.map(lambda p, g: p - g, state["params"], gradient)
    return state | {"params": params}, {}


def branching(state, batch):
    bias = jax.lax.cond(
        batch["x"].sum() > 0, lambda: all_reduce(state["params"]["b"]), lambda: zeros
    )
    return state | {"params": state["params"] | {"b": bias}}, {}


REPLICATED = {
    "a leaf that may differ": Refusal(
        unreduced, ReplicationError, "`params/b` may differ between replicas"
    ),
    "a branch of some": Refusal(
        branching, ReplicationError, "`psum` at .* must be reached by all replicas"
    ),
}
CASES = {
    f"replicated on {n}": Case(lambda n=n: replicated_layout(n), REPLICATED)
    for n in (1, 2, 4, 8)
}
CUT = {"whole_below_bytes": 0}
PARTITIONED = {
    "a replica's number": Refusal(
        lambda state, batch: (state, {"id": replica_id()}),
        ArgumentError,
        "`replica_id` must be left to strategies that replicate",
    ),
    "a key of each replica": Refusal(
        lambda state, batch: (state, {"n": drawn(replica_key(jax.random.key(0)))}),
        ArgumentError,
        "`replica_key` must be left to strategies that replicate",
    ),
    "JAX's number of a replica": Refusal(
        lambda state, batch: (state, {"id": jax.lax.axis_index("replica")}),
        ArgumentError,
        "`lax.axis_index`, .* must be left to strategies that replicate",
    ),
    "JAX's cast to what varies": Refusal(
        lambda state, batch: (state, {"n": cast(batch["x"].sum())}),
        ArgumentError,
        "`lax.pcast` over `replica` must be left to strategies that replicate",
    ),
    "groups of replicas": Refusal(
        lambda state, batch: (state, {"n": all_reduce(batch["x"].sum(), groups=[[0]])}),
        ArgumentError,
        "`groups` must be left to strategies that replicate",
    ),
    "statistics of each replica": Refusal(
        lambda state, batch: (state, {"n": own_windows(batch["x"])}),
        ArgumentError,
        "`stats='replica'` must be left to strategies that replicate",
    ),
}
CASES |= {
    strategy.name: Case(lambda s=strategy: partitioned_layout(s), PARTITIONED)
    for strategy in (
        strategies.zero1(**CUT),
        strategies.zero2(replicas=2, **CUT),
        strategies.fsdp(**CUT),
        strategies.hybrid(shard=4, **CUT),
        strategies.tensor_parallel({"params/w": (None, "model")}, model=2, replicas=4),
    )
}
REFUSALS = [
    (name, what)
    for name, case in CASES.items()
    for what in case.refused
    if case.refused is not PARTITIONED or name == "fsdp"
]
# The same machinery as others, with other axes.
SLOW = {"zero1", "zero2", "hybrid"}


def named(names):
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in names
    ]


zeros = np.zeros(2, np.float32)
batch = {
    "x": np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(32, 2)).astype(np.float32),
    "mask": np.ones(32, np.float32),
}


def own_windows(x):
    make_windows(len(x), stats="replica")


def cast(x):
    return jax.lax.psum(jax.lax.pcast(x, "replica", to="varying"), "replica")


def drawn(key):
    return jax.random.normal(key)


@pytest.fixture(params=named(CASES))
def layout(request):
    return CASES[request.param].make()


@pytest.fixture(params=[name for name in CASES if name.startswith("replicated")])
def replicating(request):
    return CASES[request.param].make()


@pytest.fixture(
    params=named(name for name in CASES if not name.startswith("replicated"))
)
def partitioning(request):
    return CASES[request.param].make()


def loss_fn(params, rows):
    errors = rows["x"] @ params["w"] + params["b"][None] - rows["y"]
    return (jnp.square(errors).mean(axis=1) * rows["mask"]).mean()


def init_fn(key):
    params = {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)}
    return {"params": params, "opt": optimizer.init(params)}


def step_fn(state, rows):
    loss, gradient = jax.value_and_grad(loss_fn)(state["params"], rows)
    updates, opt = optimizer.update(gradient, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
        "loss": loss
    }


def born(layout, init_fn=init_fn):
    return first_state(init_fn, layout, key=jax.random.key(0)).born()


def leaf_shardings(prefix, tree):
    """List a sharding for each leaf of `tree`."""
    spread = jax.tree.map(
        lambda sharding, below: jax.tree.map(lambda _: sharding, below),
        prefix,
        tree,
        is_leaf=lambda node: isinstance(node, Sharding),
    )
    return jax.tree.leaves(spread)


def without_keys(tree):
    """Return the tree with the data of keys in their place."""
    return jax.tree.map(
        lambda leaf: (
            jax.random.key_data(leaf)
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
            else leaf
        ),
        tree,
    )


def assert_lies(tree, shardings):
    leaves = jax.tree.leaves(tree)
    for leaf, sharding in zip(leaves, leaf_shardings(shardings, tree), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_gradients_are_those_of_one_device(layout):
    def gradient(state, rows):
        return all_reduce(jax.grad(loss_fn)(state["params"], rows))

    program = layout.spread(gradient, inputs=(STATE, examples()), outputs=EQUAL)
    state = born(layout)
    found = jax.tree.leaves(jax.jit(program)(state, place(batch, layout)))
    params = jax.device_get(state["params"])
    expected = jax.tree.leaves(jax.grad(loss_fn)(params, batch))
    apart = optax.tree.norm(jax.tree.map(np.subtract, found, expected))

    assert apart <= GRADIENT_TOLERANCE * optax.tree.norm(expected)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_step_gives_the_answer_of_one_device(layout, accumulate):
    options = CompileOptions(accumulate=accumulate)
    step = compiled_step(step_fn, layout, options, counted=False)
    start = jax.device_get(born(layout))
    state, metrics = step(born(layout), batch)
    expected, told = step_fn(start, batch)

    np.testing.assert_allclose(metrics["loss"], told["loss"], rtol=1e-5)
    for name, leaf in expected["params"].items():
        np.testing.assert_allclose(state["params"][name], leaf, atol=1e-5)


def test_collectives_of_jax_itself_speak_to_all_replicas(layout):
    def mean(rows):
        many = jax.lax.psum(jnp.ones(()), "replica")
        return jax.lax.pmean(rows["x"].mean(0), "replica"), many, num_replicas()

    program = layout.spread(mean, inputs=(examples(),), outputs=EQUAL)
    found, many, told = jax.jit(program)(place(batch, layout))

    np.testing.assert_allclose(found, batch["x"].mean(0), rtol=1e-5)
    assert many == told == layout.num_replicas


def test_a_step_leaves_the_state_where_it_was(layout):
    step = compiled_step(step_fn, layout, CompileOptions(), counted=False)
    state, _ = step(born(layout), batch)

    assert_lies(state, layout.state_shardings(state))


def test_a_state_is_born_in_its_place(layout):
    state = born(layout)

    assert_lies(state, layout.state_shardings(state))
    assert_equal_bits(state, born(replicated_layout(1)))


def test_a_state_that_was_put_is_read_back_as_it_was(layout):
    state = {"key": jax.random.key(3), "w": batch["x"], "n": np.int32(7)}
    placed = put(state, layout.state_shardings(state))

    assert_lies(placed, layout.state_shardings(state))
    assert_equal_bits(without_keys(placed), without_keys(state))


def test_a_declared_leaf_that_was_put_has_a_row_on_each_replica(replicating):
    count = replicating.num_replicas
    own = np.arange(3.0 * count, dtype=np.float32).reshape(count, 3)
    state = {"own": PerReplica(own)}
    placed = put(state, replicating.state_shardings(state))

    assert_lies(placed, replicating.state_shardings(state))
    assert_equal_bits(placed, state)


def test_a_declared_leaf_is_refused_where_there_is_one_replica(partitioning):
    message = "`state` must hold no `PerReplica` leaf .* got one at `own`"

    with pytest.raises(ArgumentError, match=message):
        born(partitioning, lambda key: {"own": PerReplica(jnp.zeros(3))})


def test_each_replica_sees_its_own_of_a_declared_leaf(replicating):
    layout = replicating

    def step(state):
        assert state["own"].value.shape == (3,)
        return state

    state = born(layout, lambda key: {"own": PerReplica(jnp.arange(3.0)), "w": key})
    spread = jax.jit(layout.spread(step, inputs=(STATE,), outputs=STATE))

    assert_equal_bits(without_keys(spread(state)), without_keys(state))
    assert_lies(spread(state), layout.state_shardings(state))


@pytest.mark.parametrize("axis", [0, 1])
def test_values_of_each_replica_come_along_an_axis_of_their_own(layout, axis):
    def largest(rows):
        return jnp.broadcast_to(rows["x"].max(), (2,))

    program = layout.spread(largest, inputs=(examples(),), outputs=per_replica(axis))
    found = jax.jit(program)(place(batch, layout))
    parts = batch["x"].reshape(layout.num_replicas, -1).max(axis=1)

    np.testing.assert_array_equal(np.moveaxis(found, axis, 0), np.stack([parts] * 2, 1))


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_rows_come_back_in_the_order_of_their_examples(layout, accumulate, steps):
    given = jax.tree.map(lambda leaf: np.stack([leaf] * steps), batch)
    given = given if steps > 1 else batch
    kind = examples(batch_axis(accumulate, steps))
    placed = place(given, layout, accumulate=accumulate, steps_per_call=steps)
    double = layout.spread(
        lambda rows: jax.tree.map(lambda leaf: 2 * leaf, rows),
        inputs=(kind,),
        outputs=kind,
    )
    for name, leaf in jax.jit(double)(placed).items():
        np.testing.assert_array_equal(np.ravel(leaf), 2 * given[name].ravel())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_all_rows_of_an_example_lie_together_whatever_their_rank(layout, accumulate):
    axis = batch_axis(accumulate)
    placed = jax.tree.map(jnp.asarray, place(batch, layout, accumulate=accumulate))
    lies = {
        name: [(each.device, str(each.index[axis])) for each in leaf.addressable_shards]
        for name, leaf in placed.items()
    }

    assert_lies(placed, layout.batch_shardings(placed, axis=axis))
    assert lies["x"] == lies["y"] == lies["mask"]
    assert len({where for _, where in lies["x"]}) == len(layout.batch_owners)


def test_an_evaluation_counts_each_example_once(layout):
    def eval_fn(state, rows):
        return {"sum": rows["x"] @ state["w"], "rows": Concat(rows["x"])}

    rows = [{"x": np.arange(n * 3, dtype=np.float32).reshape(n, 3)} for n in (5, 40, 3)]
    state = put({"w": np.ones(3, np.float32)}, layout.state_shardings({"w": 0}))
    found = Evaluation(eval_fn, layout, block=8)(state, rows)
    all_rows = np.concatenate([each["x"] for each in rows])

    assert found["examples"] == 48
    assert found["sum"] == all_rows.sum(axis=1).mean()
    np.testing.assert_array_equal(found["rows"], all_rows)


def test_a_prediction_has_a_row_for_each_example_in_order(layout):
    prediction = Prediction(lambda state, rows: rows["x"] * state["w"], layout, block=8)
    state = put({"w": np.float32(2)}, layout.state_shardings({"w": 0}))
    rows = prediction(state, [{"x": np.arange(37, dtype=np.float32)}])

    np.testing.assert_array_equal(rows, 2 * np.arange(37))


@pytest.mark.parametrize(("name", "what"), REFUSALS)
def test_what_it_would_run_wrongly_is_refused_by_name(name, what):
    layout, refusal = CASES[name].make(), CASES[name].refused[what]
    step = compiled_step(refusal.step_fn, layout, CompileOptions(), counted=False)

    with pytest.raises(refusal.error, match=refusal.message):
        step(born(layout), batch)


def test_a_state_without_its_axis_of_replicas_is_refused_by_name(layout):
    count = layout.num_replicas + 1
    state = born(layout) | {"own": PerReplica(np.zeros((count, 2), np.float32))}
    step = compiled_step(step_fn, layout, CompileOptions(), counted=False)
    # One that partitions has no place for such a leaf, whatever its axes.
    message = f"(leading axis of {layout.num_replicas} replicas|got one) at `own`"

    with pytest.raises(ValueError, match=message):
        step(state, batch)


def test_it_describes_itself_in_plain_json(layout):
    told = layout.describe()

    assert json.loads(json.dumps(told)) == told
    assert np.prod(list(told["mesh"].values())) == layout.mesh.devices.size
    assert told["engine"]

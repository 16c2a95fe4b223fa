"""What `rep.inspect` says of steps that were really compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from replicator import PerReplica, Replicator, all_reduce, strategies
from replicator.engine.inspection.collectives import Collective
from replicator.engine.inspection.inspection import Inspection
from replicator.engine.program_cost import TracedWork
from replicator.errors import ArgumentError, BatchError
from replicator.strategies.traffic import traffic_over

CUT = {"whole_below_bytes": 0}
ROWS = 16
batch = {"x": np.ones((ROWS, 64), np.float32)}
tx = optax.sgd(0.1, momentum=0.9)


def init_fn(key):
    params = {"layers": jnp.ones((3, 64, 64)), "head": jax.random.normal(key, (64, 8))}
    return {"params": params, "opt": tx.init(params)}


def loss_fn(params, x):
    def layer(h, kernel):
        return jnp.tanh(h @ kernel), None  # the layer

    h, _ = lax.scan(layer, x, params["layers"])
    return jnp.mean((h @ params["head"]) ** 2)  # the head


def step_fn(state, rows):
    loss, gradient = jax.value_and_grad(loss_fn)(state["params"], rows["x"])
    gradient = all_reduce(gradient)  # the reduction
    updates, opt = tx.update(gradient, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, {"loss": loss}


def line_with(comment):
    with open(__file__) as source:
        [number] = [n for n, line in enumerate(source, 1) if f"  # {comment}\n" in line]
    return f"{__file__}:{number}"


@pytest.fixture(scope="module")
def sharded():
    """Return a replicator under `fsdp`, a step that was called, and what it does."""
    rep = Replicator(strategy=strategies.fsdp(**CUT))
    step = rep.compile(step_fn)
    step(rep.init(init_fn), batch)
    return rep, step, rep.inspect(step)


EACH = {
    "zero1": (strategies.zero1(**CUT), {("shard",)}),
    "zero2": (strategies.zero2(replicas=2, **CUT), {("shard",), ("replica",)}),
    "hybrid": (strategies.hybrid(shard=4, **CUT), {("shard",), ("replica",)}),
    "tensor_parallel": (
        strategies.tensor_parallel(
            {"params/layers": (None, None, "model")}, model=4, replicas=2
        ),
        {("model",), ("replica",)},
    ),
}


@pytest.mark.parametrize("name", EACH)
def test_each_strategy_sends_along_the_axes_that_it_cuts(name):
    strategy, axes = EACH[name]
    found = Replicator(strategy=strategy).inspect(step_fn, init_fn, batch)
    sent = {each.axes for each in found.collectives}

    assert found.strategy == name
    assert axes <= sent <= {*axes, ("replica", "shard"), ("replica", "model")}
    assert all(each.is_counted for each in found.collectives)


def of_kind(inspection, kind):
    return [each for each in inspection.collectives if each.kind == kind]


def test_a_replicated_step_reduces_once_where_the_user_says_so():
    found = Replicator().inspect(step_fn, init_fn, batch)
    [reduce] = found.collectives
    parameters = 3 * 64 * 64 + 64 * 8

    assert found.strategy == "data_parallel"
    assert found.counts() == {"all-reduce replica": 1}
    assert reduce.source.startswith(line_with("the reduction"))
    # The loss is a mean over replicas, too.
    assert reduce.wire_bytes == 2 * 4 * (parameters + 1) * 7 // 8


def test_weights_are_gathered_along_shard_at_the_lines_that_multiply(sharded):
    _, _, found = sharded
    gathers = {each.arrays: each for each in of_kind(found, "all-gather")}
    layer = gathers[("f32[1,64,64]",)]

    assert found.mesh == {"replica": 1, "shard": 8, "model": 1}
    assert {each.axes for each in found.collectives} == {("shard",)}
    assert layer.count % 3 == 0
    assert layer.wire_bytes == layer.count * 4 * 64 * 64 * 7 // 8
    assert any(
        each.source.startswith(line_with("the layer")) for each in found.collectives
    )


def test_a_variable_that_is_gathered_as_it_is_stored_is_named(sharded):
    _, _, found = sharded

    assert "params/head" in {each.variable for each in found.collectives}


def test_arrays_shapes_and_a_function_that_makes_them_are_inspected_alike(sharded):
    rep, step, found = sharded
    shapes = jax.eval_shape(init_fn, jax.random.key(0))

    assert rep.inspect(step_fn, shapes, jax.eval_shape(lambda: batch)) == found
    assert rep.inspect(step, rep.init(init_fn), batch) == found


def test_memory_is_that_of_one_device(sharded):
    _, _, found = sharded
    parameters = 3 * 64 * 64 + 64 * 8

    assert found.memory.arguments_bytes == 4 * (2 * parameters + ROWS * 64) // 8


def test_arithmetic_is_that_of_all_devices(sharded):
    _, _, found = sharded
    forward = 2 * ROWS * (3 * 64 * 64 + 64 * 8)

    assert found.flops == 3 * forward


def test_a_run_record_has_the_bytes_that_the_partitioner_sends(sharded):
    _, step, found = sharded
    [compilation] = step.compilations

    assert compilation.cost.collective_bytes == found.wire_bytes > 0


def test_accumulation_gathers_as_often_as_there_are_microbatches(sharded):
    rep, _, found = sharded
    plain = Replicator(strategy=strategies.fsdp(**CUT))
    wrapped = plain.wrap_optimizer(tx)

    def init(key):
        params = init_fn(key)["params"]
        return {"params": params, "opt": wrapped.init(params)}

    def step(state, rows):
        gradient = jax.grad(loss_fn)(state["params"], rows["x"])
        updates, opt = wrapped.update(gradient, state["opt"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt": opt,
        }, {}

    twice = rep.inspect(rep.compile(step, accumulate=2), init, batch)
    gathers = {each.arrays: each.count for each in of_kind(twice, "all-gather")}
    once = {each.arrays: each.count for each in of_kind(found, "all-gather")}

    assert gathers[("f32[1,64,64]",)] == 2 * once[("f32[1,64,64]",)]


def test_an_inspection_prints_as_a_table(sharded):
    _, _, found = sharded
    lines = str(found).splitlines()

    assert lines[0] == "fsdp over replica=1, shard=8, model=1"
    assert " ".join(lines[3].split()) == "collective count bytes sent axes arrays from"
    assert len(lines) == 5 + len(found.collectives)
    assert lines[-1].split() == [
        "all",
        str(sum(each.count for each in found.collectives)),
        f"{found.wire_bytes:,}",
    ]


def test_a_step_that_was_not_called_needs_a_state_and_a_batch():
    rep = Replicator()

    with pytest.raises(ArgumentError, match="`step` must have been called, or come"):
        rep.inspect(step_fn)


def test_what_a_call_refuses_is_refused():
    rep = Replicator()
    uneven = {"x": np.ones((12, 64), np.float32)}

    with pytest.raises(BatchError, match="must divide evenly over 8 replicas, got 12"):
        rep.inspect(step_fn, init_fn, uneven)
    own = {"own": PerReplica(jax.ShapeDtypeStruct((3,), jnp.float32))}
    with pytest.raises(ArgumentError, match="leading axis of 8 replicas at `own`"):
        rep.inspect(lambda state, rows: (state, {}), own, batch)


def test_features_of_a_replicated_step_are_those_of_its_trace():
    found = Replicator().inspect(step_fn, init_fn, batch).features()
    [sums] = found.traffic
    assert (found.num_devices, sums.kind, sums.axes) == (8, "all-reduce", ("replica",))
    parameters = 3 * 64 * 64 + 64 * 8
    assert sums.wire_bytes >= 2 * 4 * parameters * 7 // 8
    assert list(found.flops) == ["float32"]
    assert found.memory_bytes > 2 * 2 * 4 * parameters


def test_sums_of_replicas_are_as_many_as_the_compiler_left():
    traced = traffic_over("all-reduce", ["replica"], {"replica": 8}, 700, count=10)
    joined = Collective(
        kind="all-reduce",
        count=4,
        wire_bytes=700,
        axes=("replica",),
        devices=8,
        arrays=("f32[100]",),
        source="",
        variable="",
        op_name="",
    )
    found = Inspection(
        strategy="data_parallel",
        mesh={"replica": 8},
        collectives=(joined,),
        memory=None,
        flops=0,
        work=TracedWork(traffic=(traced,), replicates=True),
    )
    [sums] = found.features().traffic
    assert (sums.count, sums.wire_bytes) == (4, 700)


def test_features_of_a_partitioned_step_have_its_compiled_collectives(sharded):
    _, _, found = sharded
    features = found.features()
    assert sum(each.wire_bytes for each in features.traffic) == found.wire_bytes
    assert {each.axes for each in features.traffic} == {("shard",)}
    assert sum(features.flops.values()) * 8 == found.flops


def test_features_are_of_one_update():
    rep = Replicator()
    rows = {"x": np.ones((3, ROWS, 64), np.float32)}
    several = rep.compile(step_fn, steps_per_call=3).inspect(init_fn, rows).features()
    one = rep.inspect(step_fn, init_fn, batch).features()
    assert several.flops == one.flops
    assert several.traffic == one.traffic

"""Costs of programs: counted in the trace, against arithmetic done by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from replicator.engine.inspection.collectives import collectives_of
from replicator.engine.program_cost import (
    Compilation,
    ProgramCost,
    program_cost,
    traced_work,
)
from tests.helpers import replicated_program


def cost(fn, *arrays, **jit):
    traced = jax.jit(fn, **jit).trace(*arrays)
    return program_cost(traced.jaxpr, traced.lower().compile())


def replicated_cost(fn, *arrays, n=8):
    return cost(replicated_program(fn, n), *arrays)


def test_a_matrix_product_is_two_operations_for_each_of_its_products():
    found = cost(lambda a, b: a @ b, jnp.ones((3, 5)), jnp.ones((5, 7)))
    assert (found.flops, found.collective_bytes) == (2 * 3 * 5 * 7, 0)


def test_the_compiler_counts_a_matrix_product_alike():
    traced = jax.jit(jnp.dot).trace(jnp.ones((64, 32)), jnp.ones((32, 16)))
    compiled = traced.lower().compile()
    ours = program_cost(traced.jaxpr, compiled).flops
    assert compiled.cost_analysis()["flops"] == pytest.approx(ours)


def convolve(x, kernel, **options):
    return lax.conv_general_dilated(
        x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_and_its_gradients_cost_the_same_each(groups):
    x, kernel = jnp.ones((2, 16, 16, 8)), jnp.ones((2, 2, 8 // groups, 4))

    def loss(x, kernel):
        y = convolve(
            x, kernel, window_strides=(2, 2), padding="SAME", feature_group_count=groups
        )
        return jnp.sum(y**2)

    once = 2 * (2 * 8 * 8 * 4) * (2 * 2 * 8 // groups)
    assert cost(loss, x, kernel).flops == once
    assert cost(jax.grad(loss, (0, 1)), x, kernel).flops == 3 * once


def test_a_loop_costs_as_often_as_it_turns():
    def loop(x):
        return lax.scan(lambda c, _: (c @ c, None), x, length=20)[0]

    found = cost(loop, jnp.eye(4))
    assert found.flops == 20 * 2 * 4**3
    assert found.bytes_accessed is None


def test_of_a_branch_the_dearer_way_counts():
    def branch(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert cost(branch, jnp.eye(4)).flops == 2 * 2 * 4**3


def test_all_replicas_count_for_arithmetic_and_one_for_the_wire():
    found = replicated_cost(lambda x: lax.psum(x @ x, "replica"), jnp.ones((8, 4, 4)))
    assert found.flops == 8 * 2 * 4**3
    assert found.collective_bytes == 2 * 4 * 4 * 4 * 7 // 8


def test_wire_bytes_are_those_of_the_dtype_that_is_sent():
    def send(x):
        return lax.psum(x.astype(jnp.bfloat16), "replica").astype(jnp.float32)

    sent = replicated_cost(send, jnp.ones((8, 100))).collective_bytes
    assert sent == 2 * 200 * 7 // 8


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        (lambda x: lax.all_gather(x, "replica"), 3 * 64),
        (lambda x: lax.psum_scatter(x, "replica", tiled=True), 3 * 16),
        (lambda x: lax.pmax(x, "replica"), 6 * 16),
        (lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0)]), 64),
        (lambda x: lax.all_to_all(x, "replica", 0, 0, tiled=True), 3 * 16),
        (lambda x: lax.pmean(x, "replica"), 6 * 16),
        (lambda x: lax.psum(x, "replica", axis_index_groups=[[0, 1], [2, 3]]), 64),
    ],
)
def test_a_collective_sends_what_a_ring_does_also_by_the_compiled_program(
    collective, sent
):
    program = replicated_program(collective, 4)
    traced = jax.jit(program).trace(jnp.ones((4, 16)))
    compiled = traced.lower().compile()
    [one] = collectives_of(compiled.as_text(), {"replica": 4})

    assert program_cost(traced.jaxpr, compiled).collective_bytes == sent
    assert one.wire_bytes == sent


def test_a_collective_in_a_loop_sends_in_each_turn():
    def loop(x):
        return lax.fori_loop(0, 5, lambda _, c: lax.psum(c, "replica") / 8, x)

    sent = replicated_cost(loop, jnp.ones((8, 10))).collective_bytes
    assert sent == 5 * (2 * 40 * 7 // 8)


def work(fn, *arrays, n=4):
    return traced_work(jax.make_jaxpr(replicated_program(fn, n))(*arrays))


def test_operations_are_counted_by_the_dtype_of_their_operands():
    def products(x):
        half = x.astype(jnp.bfloat16)
        return x @ x + (half @ half @ half).astype(jnp.float32)

    found = traced_work(jax.make_jaxpr(products)(jnp.eye(4)))
    assert found.flops == {"float32": 128, "bfloat16": 256}
    assert not found.replicates


def test_products_read_their_operands_and_write_their_results():
    found = traced_work(jax.make_jaxpr(lambda a, b: a @ b)(*2 * [jnp.eye(4)]))
    assert found.product_bytes == 3 * 64
    assert work(lambda x: x @ x, jnp.ones((4, 4, 4))).product_bytes == 4 * 3 * 64


def test_collectives_of_one_kind_are_one_row_of_traffic():
    def send(x):
        def turn(c, _):
            return lax.psum(c, "replica"), None

        return lax.scan(turn, x, length=3)[0] + lax.psum(x, "replica")

    [found] = work(send, jnp.ones((4, 16))).traffic
    assert (found.kind, found.axes, found.count) == ("all-reduce", ("replica",), 4)
    assert (found.stride, found.span) == (1, 4)
    assert found.wire_bytes == 4 * 96


@pytest.mark.parametrize(
    ("groups", "stride", "span"),
    [([[0, 1], [2, 3]], 1, 2), ([[0, 2], [1, 3]], 2, 4)],
)
def test_groups_of_an_axis_lie_where_their_devices_do(groups, stride, span):
    def send(x):
        return lax.psum(x, "replica", axis_index_groups=groups)

    [found] = work(send, jnp.ones((4, 16))).traffic
    assert (found.stride, found.span) == (stride, span)


def test_a_program_of_one_device_sends_nothing():
    one = replicated_cost(lambda x: lax.psum(x, "replica"), jnp.ones((1, 10)), n=1)
    assert one.collective_bytes == 0


def test_memory_is_that_of_one_device_and_donated_buffers_count_once(mesh):
    step = jax.shard_map(
        lambda w, x: w + lax.psum(jnp.sum(x), "replica"),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("replica")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = cost(step, jnp.ones(1000), jnp.ones((80, 10)), donate_argnums=0).memory
    assert found is not None
    assert found.arguments_bytes == 4000 + 400
    assert found.outputs_bytes == found.aliased_bytes == 4000


def test_a_compilation_is_told_for_one_step_in_one_line():
    memory = cost(lambda x: x + 1, jnp.ones(30_000_000)).memory
    told = Compilation(
        seconds=3.21,
        steps_per_call=2,
        cost=ProgramCost(
            flops=2_800_000_000,
            collective_bytes=1_400_000,
            bytes_accessed=None,
            memory=memory,
        ),
    )
    assert str(told) == (
        "compiled in 3.2 s · 1.4 GFLOP/step · 700 kB on the wire/step · 240 MB/device"
    )
    bare = ProgramCost(flops=0, collective_bytes=0, bytes_accessed=None, memory=None)
    alone = Compilation(seconds=0.04, steps_per_call=1, cost=bare)
    assert str(alone) == "compiled in 0.0 s"

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.step.hlo_counts import (
    Operations,
    compiled_operations,
    hlo_operations,
    lowered_operations,
)
from tests.helpers import replicated_program


def lowered(fn, *arrays, n=8):
    return jax.jit(replicated_program(fn, n)).lower(*arrays)


def test_counts_dots_and_convolutions_in_both_views():
    def fn(x, w):
        y = lax.conv(x, w, (1, 1), "SAME")
        return y.reshape(2, -1) @ y.reshape(2, -1).T

    program = lowered(fn, jnp.ones((8, 2, 1, 5, 5)), jnp.ones((8, 1, 1, 3, 3)))
    assert lowered_operations(program) == Operations(dots=1, convolutions=1)
    assert compiled_operations(program.compile()) == Operations(dots=1, convolutions=1)


def test_wire_bytes_are_those_of_the_operands():
    def fn(x):
        return lax.psum(x, "replica"), lax.all_gather(x, "replica")

    program = lowered(fn, jnp.ones((8, 3, 5)))
    sent = Operations(collectives=2, wire_bytes=2 * 15 * 4)
    assert lowered_operations(program) == sent
    assert compiled_operations(program.compile()) == sent


def test_lowered_program_has_the_bytes_that_a_cpu_would_promote():
    program = lowered(lambda x: lax.psum(x, "replica"), jnp.ones((8, 7), jnp.bfloat16))
    assert lowered_operations(program).wire_bytes == 14
    assert compiled_operations(program.compile()).wire_bytes == 28


def test_complex_and_boolean_elements_have_their_sizes():
    def fn(x, flag):
        return lax.psum(x, "replica"), lax.all_gather(flag, "replica")

    arrays = jnp.ones((8, 3), jnp.complex64), jnp.ones((8, 5), bool)
    assert lowered_operations(lowered(fn, *arrays)).wire_bytes == 3 * 8 + 5


def test_function_counts_at_each_of_its_calls():
    product = jax.jit(lambda x: x @ x)

    def fn(x):
        return product(product(product(x)))

    assert lowered_operations(lowered(fn, jnp.ones((8, 4, 4)))).dots == 3


def test_compiled_loop_counts_as_often_as_it_turns():
    def fn(x):
        def body(carry, _):
            return lax.psum(carry @ carry, "replica"), None

        return lax.scan(body, x, length=6)[0]

    program = lowered(fn, jnp.ones((8, 4, 4)))
    assert lowered_operations(program) == Operations(
        dots=1, collectives=1, wire_bytes=64
    )
    assert compiled_operations(program.compile()) == Operations(
        dots=6, collectives=6, wire_bytes=6 * 64
    )


def test_arrays_that_share_a_collective_all_count():
    def fn(x, y):
        return lax.psum(x, "replica"), lax.psum(y, "replica")

    program = lowered(fn, jnp.ones((8, 3)), jnp.ones((8, 5)))
    assert lowered_operations(program).collectives == 2
    assert compiled_operations(program.compile()) == Operations(
        collectives=1, wire_bytes=32
    )


def test_asynchronous_collective_counts_once():
    text = """
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %start = f32[4]{0} all-reduce-start(%x), to_apply=%add
  ROOT %done = f32[4]{0} all-reduce-done(%start)
}
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
    assert hlo_operations(text) == Operations(collectives=1, wire_bytes=16)


def test_loop_of_unknown_length_is_refused():
    def fn(x):
        return lax.while_loop(
            lambda c: c.sum() < 9, lambda c: lax.psum(c, "replica"), x
        )

    compiled = lowered(fn, jnp.ones((8, 2))).compile()
    with pytest.raises(ValueError, match="must say how often its loops turn"):
        compiled_operations(compiled)


def test_operations_add_and_multiply():
    one = Operations(dots=1, convolutions=2, collectives=3, wire_bytes=4)
    assert one + one == one * 2

"""The key of a program: the same for the same program, whoever wrote it where."""

import jax
import jax.numpy as jnp

from replicator.engine.program_key import program_key


def key_of(fn, *shape):
    return program_key(jax.jit(fn).lower(jnp.ones(shape)))


def test_a_key_does_not_know_where_a_program_was_written():
    def program(x):
        return x + 1

    first = key_of(program, 2)

    def program(x):
        return x + 1

    assert key_of(program, 2) == first


def test_another_shape_or_equation_has_another_key():
    def program(x):
        return x + 1

    found = {key_of(program, 2), key_of(program, 3)}

    def program(x):
        return x + 2

    assert len(found | {key_of(program, 2)}) == 3

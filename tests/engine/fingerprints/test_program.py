"""Fingerprints differ wherever bits do, on the device that holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from replicator.base.mesh import partition_mesh, replica_mesh
from replicator.engine.fingerprints.program import _program, fingerprint, fingerprints

of_one = jax.jit(fingerprint)
DTYPES = [
    *("bool", "int2", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32"),
    *("float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"),
    *("float32", "complex64"),
]
BITS = {"bool": 1, "int2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_flipped_bit_shows_in_any_dtype(dtype):
    whole = np.zeros((3, 5), jnp.dtype(dtype))
    size = whole.dtype.itemsize
    seen = {int(of_one(whole))}
    for bit in range(BITS.get(dtype, 8 * size)):
        damaged = whole.copy()
        damaged.reshape(-1).view(np.uint8)[7 * size + bit // 8] ^= 1 << bit % 8
        seen.add(int(of_one(damaged)))
    assert len(seen) == 1 + BITS.get(dtype, 8 * size)


def test_words_of_64_bits_show_in_both_halves():
    with jax.enable_x64(True):
        seen = {
            int(fingerprint(jnp.asarray([3 ^ flip], jnp.int64)))
            for flip in (0, 1, 1 << 31, 1 << 32, 1 << 62)
        }
    assert len(seen) == 5


NORMAL = np.random.default_rng(0).normal(size=(32, 33)).astype(np.float32)


@pytest.mark.parametrize(
    "damaged",
    [
        -NORMAL,
        NORMAL[::-1],
        np.concatenate([NORMAL[1::-1], NORMAL[2:]]),
        np.where(np.arange(33) < 2, -NORMAL, NORMAL),
    ],
    ids=["negated", "upside down", "two rows swapped", "64 signs"],
)
def test_what_products_alone_would_miss_shows(damaged):
    assert int(of_one(damaged)) != int(of_one(NORMAL))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int4", "complex64", "bool"])
@pytest.mark.parametrize("block", [7, 64, 528, 529])
def test_a_fingerprint_does_not_depend_on_the_block(dtype, block):
    array = NORMAL.astype(dtype)
    in_blocks = jax.jit(lambda x: fingerprint(x, block=block))
    assert int(in_blocks(array)) == int(of_one(array))


def test_keys_and_empty_arrays_have_fingerprints():
    keys = jax.random.split(jax.random.key(0), 2)
    assert int(of_one(keys[0])) != int(of_one(keys[1]))
    assert int(of_one(jnp.zeros((0, 3)))) == 0


def test_each_device_has_a_row_for_its_own_piece():
    mesh = partition_mesh({"replica": 2, "shard": 4}, jax.devices())
    array = np.arange(8, dtype=np.float32)
    specs = [P(), P("shard")]
    table = np.asarray(
        fingerprints(
            [jax.device_put(array, NamedSharding(mesh, s)) for s in specs], mesh
        )
    )
    assert table[:, 0].tolist() == [int(of_one(array))] * 8
    pieces = [int(of_one(piece)) for piece in array.reshape(4, 2)]
    assert table[:, 1].tolist() == pieces * 2


def test_the_program_has_no_collective():
    mesh = replica_mesh(8)
    shardings = (NamedSharding(mesh, P()), NamedSharding(mesh, P("replica")))
    arrays = [jax.device_put(jnp.zeros((8, 2)), each) for each in shardings]
    text = _program(mesh, shardings).lower(arrays).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "permute", "reduce-scatter")
    assert not [kind for kind in kinds if kind in text]

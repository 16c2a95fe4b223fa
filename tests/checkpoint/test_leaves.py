"""Leaves of any name, dtype and size are saved; what they are named names no file."""

import collections

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore

from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.manifest import read_manifest
from tests.checkpoint.states import bits


def rows(number, size=30_000):
    return np.full(size, number, np.float32)


ODD = {
    "a slash": {"a/b": rows(1), "a": {"b": rows(2)}},
    "a dot": {"a.b": rows(1), "a": {"b": rows(2)}},
    "empty": {"": rows(1), " ": rows(2)},
    "dots": {"..": {"..": rows(1)}, ".": rows(2)},
    "names of zarr": {"zarr.json": rows(1), "c": {"0": rows(2)}, "0": rows(3)},
    "long": {"x" * 300: rows(1), "y" * 300: rows(2)},
    "case": {"W": rows(1), "w": rows(2)},
    "integers": {"list": [rows(1), rows(2)], "dict": {0: rows(3), 1: rows(4)}},
    "text": {"0": rows(1), "00": rows(2)},
    "odd text": {"\ud800": rows(1), "new\nline": rows(2), "größe": rows(3)},
    "None": {"a": None, "b": rows(1), "c": {}, "d": [], "e": ()},
    "alone": rows(1),
}


@pytest.mark.parametrize("size", [30_000, 3], ids=["large", "small"])
@pytest.mark.parametrize("name", ODD)
def test_leaves_of_any_name_come_back(tmp_path, name, size):
    arrays = jax.tree.map(lambda leaf: leaf[:size], ODD[name])
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=arrays))
        restored = store.restore(arrays).arrays
    assert jax.tree.structure(restored) == jax.tree.structure(arrays)
    assert bits(restored) == bits(arrays)
    files = {path.name for path in tmp_path.glob("0*/state-*/*/*")}
    assert files <= {"zarr.json", "c.0"}


DTYPES = (
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint16", "int64", "float16"),
    *("bfloat16", "float64", "complex64", "complex128", "float4_e2m1fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


@pytest.mark.parametrize("size", [7, 70_000], ids=["small", "large"])
def test_leaves_of_any_dtype_come_back(tmp_path, size):
    zeros_and_ones = np.arange(size) % 2
    arrays = {
        name: zeros_and_ones.astype(getattr(ml_dtypes, name, name)) for name in DTYPES
    }
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=arrays))
        assert bits(store.restore().arrays) == bits(arrays)
        assert bits(store.restore(arrays).arrays) == bits(arrays)


def test_large_arrays_of_zeros_are_stored_like_others(tmp_path):
    arrays = {"w": np.zeros(1 << 20, np.float32)}
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=arrays))
        assert bits(store.restore().arrays) == bits(arrays)
    size = sum(path.stat().st_size for path in tmp_path.glob("0*/state-*/0/c.*"))
    assert arrays["w"].nbytes <= size <= 1.02 * arrays["w"].nbytes


def test_thousands_of_small_leaves_are_a_handful_of_files(tmp_path):
    arrays = {f"{number}": np.full(16, number, np.float32) for number in range(1000)}
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=arrays))
        assert bits(store.restore(arrays).arrays) == bits(arrays)
    assert len([path for path in tmp_path.glob("0*/**/*") if path.is_file()]) == 4


def test_a_part_is_read_without_the_rest(tmp_path):
    arrays = {"a": rows(1), "b": rows(2)}
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=arrays))
    (shard,) = tmp_path.glob("0*/state-*/1/c.0")
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    restored = CheckpointStore(tmp_path).restore(only="a")
    assert bits(restored.arrays) == bits({"a": arrays["a"]})


def test_an_array_is_read_by_tensorstore_alone(tmp_path):
    """The lines of docs/guides/checkpoints.md."""
    w = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
    with CheckpointStore(tmp_path) as store:
        store.save(Snapshot(step=1, arrays=collections.OrderedDict(b=rows(1), w=w)))
    (folder,) = tmp_path.glob("0*/state-*")
    names = [leaf.path for leaf in read_manifest(folder.parent).leaves]
    spec = {"driver": "zarr3", "kvstore": f"file://{folder}/{names.index('w')}/"}
    np.testing.assert_array_equal(tensorstore.open(spec).result().read().result(), w)

"""Saved arrays are plain zarr 3: the package of PyPI reads the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.docs.pages import ROOT, blocks_of
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.manifest import read_manifest
from tests.test_readme import run_blocks

zarr = pytest.importorskip("zarr")

# It knows neither bfloat16 nor float8 and int4, which TensorStore reads as well.
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float16", "float32", "complex64"),
)
CUTS = {
    "whole": PartitionSpec(),
    "rows": PartitionSpec("a"),
    "columns": PartitionSpec(None, "a"),
}


def values(dtype):
    words = np.random.default_rng(0).integers(0, 200, (256, 1024))
    return (words % 2 if dtype == "bool" else words / 3).astype(dtype)


def cut(array, spec):
    mesh = Mesh(np.array(jax.devices()), ("a",))
    return jax.device_put(array, NamedSharding(mesh, spec))


def save(directory, arrays):
    """Save arrays; return the folder of each by its name."""
    with CheckpointStore(directory) as store:
        store.save(Snapshot(step=1, arrays=arrays))
    (state,) = directory.glob("0*/state-*")
    leaves = read_manifest(state.parent).leaves
    return {leaf.path: state / str(number) for number, leaf in enumerate(leaves)}


@pytest.mark.parametrize("spec", CUTS)
def test_zarr_reads_the_same_bits(tmp_path, spec):
    arrays = {dtype: values(dtype) for dtype in DTYPES}
    on_devices = {dtype: cut(array, CUTS[spec]) for dtype, array in arrays.items()}
    for dtype, folder in save(tmp_path, on_devices).items():
        found = zarr.open_array(folder, mode="r")
        assert (found.dtype, found.shape) == (np.dtype(dtype), (256, 1024))
        np.testing.assert_array_equal(found[:], arrays[dtype])
        assert found.attrs["path"] == dtype


def test_zarr_reads_a_part_of_an_array_in_many_shards(tmp_path):
    w = np.arange(1 << 21, dtype=np.float32).reshape(2048, 1024)
    (folder,) = save(tmp_path, {"w": cut(w, CUTS["rows"])}).values()
    found = zarr.open_array(folder, mode="r")
    assert found.shards == (256, 1024)
    np.testing.assert_array_equal(found[300:900, 7], w[300:900, 7])


def test_the_lines_of_the_guide_read_an_array(tmp_path, capsys):
    folder = save(tmp_path, {"w": values("float32")})["w"]
    blocks = blocks_of(ROOT / "docs" / "guides" / "checkpoints.md")
    names = {"folder": folder.parent, "number": 0}
    run_blocks([block for block in blocks if "import zarr" in block.code], names)
    assert capsys.readouterr().out.startswith("w float32 (256, 1024) [[")


def test_a_flipped_bit_is_an_error_in_zarr_too(tmp_path):
    folder = save(tmp_path, {"w": values("float32")})["w"]
    (shard,) = folder.glob("c.*")
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"(?i)checksum"):
        zarr.open_array(folder, mode="r")[:]


def test_zarr_does_not_know_bfloat16(tmp_path):
    """Once it does, take this out, and the sentence of docs/guides/checkpoints.md."""
    folder = save(tmp_path, {"w": jnp.zeros((256, 1024), jnp.bfloat16)})["w"]
    with pytest.raises(ValueError, match="bfloat16"):
        zarr.open_array(folder, mode="r")

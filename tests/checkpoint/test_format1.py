"""Checkpoints of format 1, which orbax wrote, are read; the directory goes on in 2.

`format1.zip` holds two steps of `former_state(4)`, as the version before saved them.
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicator.base.mesh import replica_mesh, replicated, split_over_replicas
from replicator.base.per_replica import PerReplica
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.manifest import encode, read_manifest
from replicator.training.options import Retention
from tests.checkpoint.states import bits


@pytest.fixture
def former(tmp_path):
    shutil.unpack_archive(Path(__file__).with_name("format1.zip"), tmp_path)
    return tmp_path


def former_state(num_replicas):
    mesh = replica_mesh(num_replicas)
    whole, own = replicated(mesh), split_over_replicas(mesh)
    rows = jnp.arange(num_replicas * 3, dtype=jnp.float32).reshape(num_replicas, 3)
    weights = jnp.arange(64, dtype=jnp.float32).reshape(16, 4)
    return {
        "params": {"w": jax.device_put(weights, own)},
        "key": jax.device_put(jax.random.key(3), whole),
        "sums": PerReplica(jax.device_put(rows, own), "sum"),
        "half": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        "four": np.arange(6).astype(ml_dtypes.uint4),
        "empty": np.zeros((0, 3), np.float32),
        "none": None,
    }


def test_a_checkpoint_of_format_1_is_restored_bit_for_bit(former):
    like = former_state(4)
    restored = CheckpointStore(former).restore(like)
    assert bits(restored.arrays) == bits(like)
    assert (restored.step, restored.meta) == (2, {"number": 2})
    for wanted, leaf in zip(
        *map(jax.tree.leaves, (like, restored.arrays)), strict=True
    ):
        assert getattr(leaf, "sharding", None) == getattr(wanted, "sharding", None)


def test_it_is_restored_on_another_number_of_replicas(former):
    like = former_state(8)
    arrays = CheckpointStore(former).restore(like).arrays
    assert bits(arrays["params"]) == bits(like["params"])
    saved = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(arrays["sums"].value.sum(0), saved.sum(0))


def test_without_like_it_is_nested_dicts(former):
    arrays = CheckpointStore(former).restore(only="params/*").arrays
    np.testing.assert_array_equal(arrays["params"]["w"], former_state(4)["params"]["w"])


def test_its_manifest_is_written_as_it_was(former):
    data = (former / f"{2:012d}" / "manifest.json").read_bytes()
    assert encode(read_manifest(former / f"{2:012d}")) == data


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_its_damage_is_found(former, damage):
    for path in sorted((former / f"{2:012d}" / "state").rglob("*")):
        if path.is_file():
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            if damage == "remove":
                path.unlink()
            assert CheckpointStore(former).restore().step == 1
            path.write_bytes(whole)
    assert CheckpointStore(former).restore().step == 2


def test_its_directory_goes_on_in_format_2_with_one_retention(former):
    with CheckpointStore(former, retention=Retention(keep_last=2)) as store:
        assert store.restore().step == 2
        store.save(Snapshot(step=3, arrays=former_state(4)))
        assert store.steps() == (2, 3)
        assert bits(store.restore(former_state(4)).arrays) == bits(former_state(4))
    formats = [read_manifest(former / f"{step:012d}").format for step in (2, 3)]
    assert formats == [1, 2]

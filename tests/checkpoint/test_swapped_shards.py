"""A shard in the place of another is noticed, though all of its checksums are right."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from replicator.checkpoint import CheckpointStore, Snapshot

MESH = jax.make_mesh((8,), ("shard",))
CUT = NamedSharding(MESH, PartitionSpec("shard"))


def state(step):
    values = np.random.default_rng(step).normal(size=(256, 128)).astype(np.float32)
    return {
        name: jax.device_put(values * sign, CUT) for name, sign in (("a", 1), ("b", 2))
    }


@pytest.fixture
def folder(tmp_path):
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2):
            store.save(Snapshot(step=step, arrays=state(step)))
    return tmp_path


def shards(folder, step):
    return sorted(folder.glob(f"*{step}/state-*/*/c.*"))


def restored_step(folder):
    restored = CheckpointStore(folder).restore(state(1))
    assert restored is not None
    for name, leaf in state(restored.step).items():
        np.testing.assert_array_equal(restored.arrays[name], leaf)
    return restored.step


def test_two_shards_that_changed_places_are_noticed(folder):
    for one, other in zip(shards(folder, 2), shards(folder, 2)[1:], strict=False):
        before = one.read_bytes(), other.read_bytes()
        assert len(before[0]) == len(before[1])
        one.write_bytes(before[1])
        other.write_bytes(before[0])
        assert restored_step(folder) == 1
        one.write_bytes(before[0])
        other.write_bytes(before[1])
    assert restored_step(folder) == 2


def test_a_shard_of_another_checkpoint_is_noticed(folder):
    for new, old in zip(shards(folder, 2), shards(folder, 1), strict=True):
        before = new.read_bytes()
        new.write_bytes(old.read_bytes())
        assert restored_step(folder) == 1
        new.write_bytes(before)
    assert restored_step(folder) == 2


def test_the_error_names_the_shard(folder, caplog):
    new, old = shards(folder, 2)[3], shards(folder, 1)[3]
    new.write_bytes(old.read_bytes())
    restored_step(folder)
    place = "/".join(new.parts[-3:])
    assert f"`{place}` is a shard of another place" in caplog.text

"""A bundle is whole or absent, holds every dtype, and nothing in it is executed."""

import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.training.postmortem import bundle as bundles
from replicator.training.postmortem.bundle import (
    Bundle,
    arrays_of,
    read_bundle,
    write_bundle,
)

STATE = {
    "params/w": np.asarray([[1.0, np.nan]], np.float32),
    "half": np.asarray([1, 2], ml_dtypes.bfloat16),
    "step": np.asarray(7, np.int32),
    "mask": np.asarray([True, False]),
    "nothing": np.zeros((0, 3), np.float32),
}
FULL = Bundle(
    step=8,
    error={"type": "NonFiniteError", "message": "nan", "traceback": "at ..."},
    state=STATE,
    batch={"x": np.ones((4, 2), np.float32)},
    jaxpr="{ lambda ; }",
    exported=b"\x00\x01",
    about={"config": {"seed": 3}, "loss": float("nan")},
)


def assert_same_arrays(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_what_was_written_is_read(tmp_path):
    path = write_bundle(tmp_path, FULL)
    assert path == tmp_path / "postmortem" / "8"
    found = read_bundle(path)
    assert_same_arrays(found.state, FULL.state)
    assert_same_arrays(found.batch, FULL.batch)
    assert (found.jaxpr, found.exported) == (FULL.jaxpr, FULL.exported)
    assert (found.step, found.error) == (8, FULL.error)
    assert found.about == {"config": {"seed": 3}, "loss": "NaN"}


def test_little_may_be_known(tmp_path):
    given = Bundle(step=1, error={"type": "ValueError"})
    assert read_bundle(write_bundle(tmp_path, given)) == given


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(tmp_path, monkeypatch):
    write_bundle(tmp_path, FULL)

    def full_disk(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundles, "sync", full_disk)
    for step in (8, 9):
        with pytest.raises(OSError, match="No space left"):
            write_bundle(tmp_path, dataclasses.replace(FULL, step=step))
    assert [path.name for path in (tmp_path / "postmortem").iterdir()] == ["8"]
    assert read_bundle(tmp_path / "postmortem" / "8").exported == FULL.exported


def test_a_second_bundle_of_a_step_replaces_the_first(tmp_path):
    write_bundle(tmp_path, FULL)
    path = write_bundle(tmp_path, dataclasses.replace(FULL, jaxpr=None))
    assert read_bundle(path).jaxpr is None


def test_the_state_is_known_by_its_hash(tmp_path):
    path = write_bundle(tmp_path, FULL)
    about = json.loads((path / "about.json").read_text())
    assert about["state_sha256"] == bundles.hash_of(STATE)
    other = STATE | {"step": np.asarray(8, np.int32)}
    assert about["state_sha256"] != bundles.hash_of(other)


def test_keys_are_stored_as_their_data():
    found = arrays_of({"key": jax.random.key(3), "n": jnp.ones(2)})
    np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(3)))


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


def test_a_pickle_in_its_place_is_refused(tmp_path):
    path = write_bundle(tmp_path, FULL)
    (path / "arrays.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ArgumentError, match="which is damaged"):
        read_bundle(path)


def test_an_object_array_in_its_place_is_refused(tmp_path):
    path = write_bundle(tmp_path, FULL)
    np.savez(path / "arrays.npz", state_0=np.asarray([Bomb()], object))
    with pytest.raises(ArgumentError, match="which is damaged"):
        read_bundle(path)


@pytest.mark.parametrize("name", ["about.json", "arrays.npz"])
@pytest.mark.parametrize("keep", [0, 100])
def test_a_torn_file_is_told(tmp_path, name, keep):
    path = write_bundle(tmp_path, FULL)
    (path / name).write_bytes((path / name).read_bytes()[:keep])
    with pytest.raises(ArgumentError, match="which is damaged"):
        read_bundle(path)


def test_a_directory_without_a_bundle_is_told(tmp_path):
    with pytest.raises(ArgumentError, match=r"without `about\.json`"):
        read_bundle(tmp_path)

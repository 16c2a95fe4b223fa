"""A flipped bit or a lost byte is found, named, and the step before it is used."""

import json
import random
import shutil
import zlib

import numpy as np
import pytest

from replicator.base.host.strict_json import strict_json
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.manifest import decode
from replicator.errors import CheckpointError, CheckpointMismatchError
from tests.checkpoint.states import bits, small_state


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    with CheckpointStore(directory) as store:
        for step in (1, 2):
            arrays = state(step)
            store.save(Snapshot(step=step, arrays=arrays, meta={"number": step}))
    return directory


def state(number):
    """A state of leaves that share a file, and of one that has its own."""
    return {**small_state(number), "large": np.full((200, 100), number, np.float32)}


def files_of(directory, step=2):
    return sorted(p for p in (directory / f"{step:012d}").rglob("*") if p.is_file())


def state_of(directory, step=2):
    (state,) = directory.glob(f"{step:012d}/state-*")
    return state


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def restored_step(directory):
    restored = CheckpointStore(directory).restore()
    assert bits(restored.arrays) == bits(state(restored.step))
    assert restored.meta == {"number": restored.step}
    return restored.step


def damages(data, rng):
    """Say in how many ways a file may end up other than it was."""
    for _ in range(6):
        if data:
            yield flipped(data, rng.randrange(8 * len(data)))
            yield data[: rng.randrange(len(data))]
    yield data + b"\0"


def test_no_damage_to_any_file_is_silent(two_steps):
    rng, cases = random.Random(0), 0
    for path in files_of(two_steps):
        whole = path.read_bytes()
        for damage in damages(whole, rng):
            path.write_bytes(damage)
            assert restored_step(two_steps) == 1, f"{path.name} passed"
            cases += 1
        path.write_bytes(whole)
    assert restored_step(two_steps) == 2
    assert cases > 70


def test_a_flipped_bit_in_any_byte_of_a_manifest_is_noticed(two_steps):
    data = (two_steps / f"{2:012d}" / "manifest.json").read_bytes()
    assert decode(data).step == 2
    for byte in range(len(data)):
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            decode(flipped(data, 8 * byte + byte % 8))


def test_a_file_that_is_missing_or_too_much_is_noticed(two_steps, tmp_path):
    for number, path in enumerate(files_of(two_steps)):
        copy = shutil.copytree(two_steps, tmp_path / str(number))
        (copy / path.relative_to(two_steps)).unlink()
        assert restored_step(copy) == 1
    more = shutil.copytree(two_steps, tmp_path / "more")
    (state_of(more) / "stray").touch()
    assert restored_step(more) == 1


def test_files_of_two_steps_do_not_mix(two_steps, tmp_path):
    copy = shutil.copytree(two_steps, tmp_path / "copy")
    there, other = state_of(copy), state_of(copy, 1)
    shutil.rmtree(there)
    shutil.copytree(other, there.with_name(other.name))
    assert restored_step(copy) == 1


def test_the_damaged_file_is_named_in_the_log(two_steps, tmp_path, caplog):
    copy = shutil.copytree(two_steps, tmp_path / "copy")
    path = state_of(copy) / "zarr.json"
    path.write_bytes(flipped(path.read_bytes(), 100))
    assert CheckpointStore(copy).restore().damaged == (2,)
    assert f"content of `{path.parent.name}/zarr.json` has changed" in caplog.text


def test_a_damaged_step_is_not_kept_in_place_of_a_good_one(two_steps, tmp_path):
    copy = shutil.copytree(two_steps, tmp_path / "copy")
    (copy / f"{2:012d}" / "manifest.json").write_text("{}")
    with CheckpointStore(copy) as store:
        assert store.restore().step == 1
        assert store.steps() == (1,)
    assert list(copy.glob(f".damaged-{2:012d}-0/state-*"))


def test_a_damaged_step_that_was_asked_for_is_refused(two_steps, tmp_path):
    copy = shutil.copytree(two_steps, tmp_path / "copy")
    files_of(copy)[-1].unlink()
    with pytest.raises(CheckpointError, match=r"got damage: .* is missing"):
        CheckpointStore(copy).restore(step=2)


def test_if_all_are_damaged_a_run_does_not_begin_anew(two_steps, tmp_path):
    copy = shutil.copytree(two_steps, tmp_path / "copy")
    for step in (1, 2):
        (copy / f"{step:012d}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="got 2, all damaged"):
        CheckpointStore(copy).restore()


def written_by_a_newer_version(directory):
    path = directory / f"{2:012d}" / "manifest.json"
    body = json.loads(path.read_text())["manifest"] | {"format": 3, "colour": "red"}
    signed = {"manifest": body, "crc32": zlib.crc32(strict_json(body).encode())}
    path.write_text(json.dumps(signed, indent=1))
    return directory


def use(directory, how):
    store = CheckpointStore(directory)
    store.open() if how == "open" else store.restore()


@pytest.mark.parametrize("how", ["open", "restore"])
def test_what_a_newer_version_wrote_is_not_damaged_and_stays(two_steps, tmp_path, how):
    copy = written_by_a_newer_version(shutil.copytree(two_steps, tmp_path / "copy"))
    before = sorted(copy.rglob("*"))
    with pytest.raises(CheckpointMismatchError, match=r"got 3, of a newer .* Upgrade"):
        use(copy, how)
    assert sorted(copy.rglob("*")) == before


def test_what_a_newer_version_wrote_does_not_hide_an_older_step(two_steps, tmp_path):
    copy = written_by_a_newer_version(shutil.copytree(two_steps, tmp_path / "copy"))
    restored = CheckpointStore(copy).restore(step=1)
    assert restored is not None
    assert restored.step == 1

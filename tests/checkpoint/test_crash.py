"""Whenever a process dies, what is restored is one whole state that was committed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replicator.checkpoint import CheckpointStore
from tests.checkpoint.states import bits, small_snapshot, small_state

ROOT = Path(__file__).parents[2]


def require_whole(directory):
    """Open as the next run would; return the step, if all its leaves are of it."""
    with CheckpointStore(directory) as store:
        restored = store.restore()
        assert restored.damaged == ()
        assert bits(restored.arrays) == bits(small_state(restored.step))
        assert restored.meta == {"number": restored.step}
        left = {path.name for path in directory.iterdir()}
        # Between the new name and the end of the old one both are there, both whole.
        assert left <= {".writer.lock", ".writer.json", f"{1:012d}", f"{2:012d}"}
        assert restored.step == store.steps()[-1]
        return restored.step


def steps_after_each_death(folder, stride, *, step):
    """Save a step, and die before every so many-th operation; return what is left."""
    start, cases = start_with_step_1(folder / "start"), folder / "cases"
    cases.mkdir()
    program = [sys.executable, "-m", "tests.checkpoint.killed"]
    arguments = [str(start), str(cases), str(stride), str(step)]
    subprocess.run([*program, *arguments], check=True, cwd=ROOT, timeout=300)
    directories = sorted(cases.iterdir(), key=lambda path: int(path.name))
    return [require_whole(directory) for directory in directories]


def start_with_step_1(directory):
    with CheckpointStore(directory) as store:
        store.save(small_snapshot(1))
    return directory


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_death_before_any_operation_leaves_one_whole_state(tmp_path, stride):
    steps = steps_after_each_death(tmp_path, stride, step=2)
    # One moment decides; many operations lie before it and many after.
    assert steps == sorted(steps)
    # One survives, or two: they run two at a time.
    assert min(steps.count(1), steps.count(2)) * stride >= 10


@pytest.mark.slow
def test_death_while_a_step_is_saved_again_leaves_one_whole_state(tmp_path):
    assert set(steps_after_each_death(tmp_path, 1, step=1)) == {1}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "unlink"])
def test_death_at_a_system_call_leaves_one_whole_state(tmp_path, call):
    start = start_with_step_1(tmp_path / "start")
    steps, n = [], 0
    while not steps or steps[-1] == 1:
        n += 1
        directory = tmp_path / str(n)
        shutil.copytree(start, directory)
        inject = f"inject={call}:signal=KILL:when={n}"
        save = f"killed.save_until_killed(killed.Path({str(directory)!r}), 0)"
        subprocess.run(
            [
                "strace",
                "-f",
                "-qq",
                "-e",
                f"trace={call}",
                "-e",
                inject,
                "-o",
                str(tmp_path / "trace"),
                sys.executable,
                "-c",
                f"from tests.checkpoint import killed; {save}",
            ],
            cwd=ROOT,
            timeout=300,
            check=False,
        )
        steps.append(require_whole(directory))
    assert n > 1
    assert steps == sorted(steps)

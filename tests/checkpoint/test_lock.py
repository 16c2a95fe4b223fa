"""The lock holds between processes, and ends with the one that took it."""

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replicator.checkpoint import CheckpointStore
from replicator.checkpoint.disk import Disk
from replicator.errors import CheckpointInUseError
from tests.checkpoint.states import small_snapshot

ROOT = Path(__file__).parents[2]
OPEN = """
import os, signal, sys
from replicator.checkpoint import CheckpointStore
CheckpointStore(sys.argv[1]).open()
"""
WAIT = OPEN + "print('open', flush=True); sys.stdin.read()"
FORK_AND_DIE = (
    OPEN
    + """
stores = [CheckpointStore(f"{sys.argv[1]}/{name}").open() for name in "abc"]
stores[0].close()
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
)


@contextlib.contextmanager
def program(code, directory):
    """Start a program, and go on when it has written its first line."""
    command = [sys.executable, "-c", code, str(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT
    ) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def test_another_process_is_refused_until_the_owner_is_killed(tmp_path):
    with program(WAIT, tmp_path) as owner:
        with pytest.raises(CheckpointInUseError, match=f"process {owner.pid} on "):
            CheckpointStore(tmp_path).open()
        owner.kill()
        owner.wait(timeout=60)
        CheckpointStore(tmp_path).open().close()


def test_a_forked_child_that_outlives_the_owner_does_not_keep_the_lock(tmp_path):
    with program(FORK_AND_DIE, tmp_path) as owner:
        assert owner.wait(timeout=60) == -signal.SIGKILL
        for name in [".", *"abc"]:
            CheckpointStore(tmp_path / name).open().close()


@pytest.mark.parametrize("successor", ["another writer", "nobody yet"])
def test_who_wrote_to_a_directory_that_was_made_anew_commits_no_more(
    tmp_path, successor
):
    directory = tmp_path / "run"
    with CheckpointStore(directory) as first, contextlib.ExitStack() as opened:
        first.save(small_snapshot(1))
        shutil.rmtree(directory)
        directory.mkdir()
        if successor == "another writer":
            second = opened.enter_context(CheckpointStore(directory))
            second.save(small_snapshot(2))
        with pytest.raises(CheckpointInUseError, match="as its only writer, got"):
            first.save(small_snapshot(3))
        left = [path.name for path in directory.iterdir() if path.is_dir()]
    assert left == ([f"{2:012d}"] if successor == "another writer" else [])


def test_two_drafts_of_one_step_never_have_one_name(tmp_path):
    folders = []
    disk = Disk(
        lambda operation, path: (
            folders.append(path.name) if path.name.startswith(".writing-") else None
        )
    )
    with CheckpointStore(tmp_path, disk=disk) as store:
        store.save(small_snapshot(1))
        store.save(small_snapshot(1))
    assert len(set(folders)) == 2

"""Power may fail after a save: first content, then names, the new name, its parent."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replicator.checkpoint import CheckpointStore
from replicator.checkpoint.disk import Disk
from tests.checkpoint.states import small_snapshot

ROOT = Path(__file__).parents[2]
SAVE = """
import sys
from pathlib import Path
from replicator.checkpoint import CheckpointStore
from tests.checkpoint.states import small_snapshot
with CheckpointStore(Path(sys.argv[1])) as store:
    store.save(small_snapshot(1))
"""


def operations_of_a_save(folder):
    operations = []
    with CheckpointStore(folder, disk=Disk(lambda *o: operations.append(o))) as store:
        operations.clear()
        store.save(small_snapshot(1))
    (checkpoint,) = folder.glob("0*")
    return operations, checkpoint


def test_content_then_names_then_the_new_name_then_its_parent(tmp_path):
    operations, checkpoint = operations_of_a_save(tmp_path)
    order = {"sync_file": [], "sync_directory": [], "rename": []}
    for number, (operation, path) in enumerate(operations):
        if operation in order:
            order[operation].append((number, path))
    ((renamed, target),) = order["rename"]
    *inside, (last, parent) = order["sync_directory"]
    assert target == checkpoint
    assert parent == checkpoint.parent
    assert max(number for number, _ in order["sync_file"]) < inside[0][0]
    assert inside[-1][0] < renamed < last


def test_every_file_and_directory_of_a_checkpoint_is_synced(tmp_path):
    operations, checkpoint = operations_of_a_save(tmp_path)
    synced = {
        path.relative_to(tmp_path).parts[1:]
        for operation, path in operations
        if operation.startswith("sync_")
    }
    there = {path.relative_to(checkpoint).parts for path in checkpoint.rglob("*")}
    assert there <= synced


def test_a_directory_is_synced_after_those_in_it(tmp_path):
    operations, checkpoint = operations_of_a_save(tmp_path)
    inside = [path for op, path in operations if op == "sync_directory"][:-1]
    depths = [len(path.parts) for path in inside]
    assert depths[-1] == min(depths)
    assert len(depths) == 1 + sum(path.is_dir() for path in checkpoint.rglob("*"))


def test_the_names_of_a_new_directory_are_synced_too(tmp_path):
    operations = []
    disk = Disk(lambda *operation: operations.append(operation))
    with CheckpointStore(tmp_path / "new" / "deeper", disk=disk):
        pass
    assert ("sync_directory", tmp_path) in operations
    assert ("sync_directory", tmp_path / "new") in operations


def system_calls_of_a_save(folder):
    """Return what the kernel was asked for: ("fsync", path) or ("rename", new path)."""
    trace = folder / "trace"
    calls = ["-e", "trace=fsync,fdatasync,rename,renameat,renameat2"]
    command = ["strace", "-f", "-y", "-qq", *calls, "-e", "signal=none", "-o", trace]
    program = [sys.executable, "-c", SAVE, folder / "run"]
    subprocess.run([*command, *program], cwd=ROOT, timeout=300, check=True)
    called = re.compile(r"(fsync|fdatasync|rename)\w*\(.*?[<\"]([^<>\"]+)[>\"]\) += 0")
    lines = map(called.search, trace.read_text().splitlines())
    return [found.groups() for found in lines if found]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_kernel_is_asked_in_this_order(tmp_path):
    calls = system_calls_of_a_save(tmp_path)
    directory = tmp_path / "run"
    checkpoint = directory / f"{1:012d}"
    named = calls.index(("rename", str(checkpoint)))
    before, after = calls[:named], calls[named + 1 :]
    assert ("fsync", str(directory)) in after
    synced = {path for call, path in before if call.startswith("f")}
    (writing,) = {
        parent
        for path in map(Path, synced)
        for parent in [path, *path.parents]
        if parent.name.startswith(".writing-")
    }
    there = [checkpoint, *checkpoint.rglob("*")]
    now_there = {str(writing / path.relative_to(checkpoint)) for path in there}
    assert now_there <= synced
    assert ("fsync", str(tmp_path)) in before

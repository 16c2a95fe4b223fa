"""Power may fail after a save: first content, then names, the new name, its parent."""

from replicator.checkpoint import CheckpointStore
from replicator.checkpoint.disk import Disk
from tests.checkpoint.states import small_snapshot


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

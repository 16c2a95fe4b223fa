"""What the processes of `test_shards` run: save together, restore together."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicator.base.mesh import put
from replicator.base.padded import Padded, is_padded
from replicator.base.per_replica import PerReplica
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.disk import Disk
from replicator.errors import ArgumentError, CheckpointError
from replicator.training.to_host import whole_on_host

SHAPE = (256, 1024)  # 1 MB: several shards
CUTS = {
    "rows": PartitionSpec(("a", "b")),
    "columns": PartitionSpec(None, ("a", "b")),
    "blocks": PartitionSpec("a", "b"),
    "halves": PartitionSpec("b"),
    "whole": PartitionSpec(),
}


def state(rotate=0):
    """A state that is cut in all ways; which leaf is cut how depends on `rotate`."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, -1), ("a", "b"))
    names = list(CUTS)
    arrays = {}
    for number, name in enumerate(names):
        spec = CUTS[names[(number + rotate) % len(names)]]
        values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + number
        arrays[name] = put(values, NamedSharding(mesh, spec))
        arrays[f"small {name}"] = put(values[:16, :16], NamedSharding(mesh, spec))
    rows, whole = NamedSharding(mesh, CUTS["rows"]), NamedSharding(mesh, CUTS["whole"])
    room = -(-250 // devices.size) * devices.size
    padded = np.pad(arrays_on_host()[:250], ((0, room - 250), (0, 0)))
    own = np.arange(devices.size * 2, dtype=np.int32).reshape(-1, 2)
    return arrays | {
        "padded": Padded(put(padded, rows), (250, SHAPE[1])),
        "key": put(jax.random.key(5), whole),
        "keys": put(jax.random.split(jax.random.key(6), 4), whole),
        "own": PerReplica(put(own, rows), "sum"),
        "local": jnp.arange(3),
        "numpy": np.arange(20_000.0),
    }


def arrays_on_host():
    return np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


def on_host(tree):
    """Return whole values as NumPy arrays, without padding; keys as their data."""
    leaves = jax.tree.leaves(tree, is_leaf=is_padded)
    return [_on_host(leaf) for leaf in leaves]


def _on_host(leaf):
    if is_padded(leaf):
        whole = whole_on_host(leaf.padded)
        return whole[tuple(map(slice, leaf.shape))]
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return whole_on_host(leaf) if isinstance(leaf, jax.Array) else leaf


def save(directory):
    """Save twice; return which files this process wrote, and the values."""
    written = []

    def record(operation, path):
        if operation == "write_file" and path.name.startswith("c."):
            written.append((f"{path.parent.name}/{path.name}", path))

    with CheckpointStore(directory, disk=Disk(record)) as store:
        store.save(Snapshot(step=1, arrays=state()))
        written.clear()
        store.save_nowait(Snapshot(step=2, arrays=state()))
        store.wait()
    return {"names": [name for name, _ in written], "values": on_host(state())}


def restore(directory, rotate):
    """Restore in another layout than saved; return the values."""
    like = state(rotate)
    restored = CheckpointStore(directory).restore(like)
    for wanted, found in zip(
        jax.tree.leaves(like), jax.tree.leaves(restored.arrays), strict=True
    ):
        assert getattr(wanted, "sharding", None) == getattr(found, "sharding", None)
    return {"step": restored.step, "values": on_host(restored.arrays)}


def open_apart(directory):
    """Open a store in a directory of this process alone."""
    own = Path(directory) / f"{jax.process_index()}"
    own.mkdir(parents=True)
    try:
        CheckpointStore(own).open()
    except CheckpointError as failure:
        return str(failure)
    return None


def save_alone(directory):
    """Save an array that is cut over all processes, in this one alone."""
    with CheckpointStore(
        Path(directory) / f"{jax.process_index()}", together=False
    ) as store:
        rows = {"rows": state()["rows"]}
        try:
            store.save(Snapshot(step=1, arrays=rows))
        except ArgumentError as failure:
            return str(failure), store.steps()
    return None


def fail_in_one(directory):
    """Save while the disk of process 1 fails; return what was raised and what stays."""
    is_full = False

    def fail(operation, path):
        if is_full and operation == "write_file" and jax.process_index() == 1:
            raise OSError(28, "No space left on device", str(path))

    with CheckpointStore(directory, disk=Disk(fail)) as store:
        store.save(Snapshot(step=1, arrays=state()))
        is_full = True
        raised = None
        try:
            store.save(Snapshot(step=2, arrays=state()))
        except CheckpointError as failure:
            raised = str(failure)
        is_full = False
        store.save(Snapshot(step=3, arrays=state()))
        return {"raised": raised, "steps": store.steps()}

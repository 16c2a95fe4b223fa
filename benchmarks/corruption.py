"""Damage files of the newest checkpoint in seven ways, and see who notices.

A state is cut over eight devices. Each case damages the newest of two checkpoints (a
bit is flipped; a file is cut short, made longer, or deleted; two files change places,
equally long ones if there are; a file of the other checkpoint stands in its place; a
value in the manifest is another), restores as a run would that starts again, and puts
the files back. What is restored from a damaged checkpoint is counted as silent,
whatever its numbers, and so are other bits than those of the checkpoint before.
"""

import json
import logging
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

import replicator
from replicator.base.host.clock import SystemClock
from replicator.base.types import Key, PyTree
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.strategies import fsdp

_CASES = flags.DEFINE_integer("cases", 2000, "How often files are damaged.")
_SEED = flags.DEFINE_integer("seed", 0, "Of what is damaged, and where.")
NEWEST = 2
_MANIFEST = "manifest.json"

Changes = Mapping[Path, bytes | None]
"""New content of files; None for one that is deleted."""


class Saved(NamedTuple):
    """Files of the newest checkpoint, and of the one before, by their paths."""

    newest: dict[Path, bytes]
    before: dict[Path, bytes]


def init_fn(key: Key) -> PyTree:
    """Return leaves of equal and of other shapes, large and small ones."""
    shapes = {"a": (512, 256), "b": (512, 256), "odd": (24, 1000), "small": (7,)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(each, shape)
        for each, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def save_two_steps(directory: Path, state: PyTree) -> Saved:
    """Save a state, then another of its shapes; return all files."""
    with CheckpointStore(directory) as store:
        for step in (NEWEST - 1, NEWEST):
            arrays = jax.tree.map(lambda leaf, step=step: leaf * step, state)
            store.save(Snapshot(step=step, arrays=arrays, meta={"position": step}))
    newest, before = (
        {
            path: path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        for step in (NEWEST, NEWEST - 1)
        for folder in directory.glob(f"[0-9]*{step}")
    )
    return Saved(newest, before)


def draw_damage(saved: Saved, rng: random.Random) -> tuple[str, Changes]:
    """Return the kind of a damage, and what becomes of which files.

    Small files are met as often as large ones.
    """
    while True:
        kind, draw = rng.choice(list(_KINDS.items()))
        changes = draw(saved, rng)
        if any(saved.newest[path] != data for path, data in changes.items()):
            return kind, changes


def _flip(saved: Saved, rng: random.Random) -> Changes:
    path, whole = _one(saved.newest, rng)
    if not whole:
        return {}
    place = rng.randrange(len(whole))
    flipped = bytes([whole[place] ^ 1 << rng.randrange(8)])
    return {path: whole[:place] + flipped + whole[place + 1 :]}


def _cut(saved: Saved, rng: random.Random) -> Changes:
    path, whole = _one(saved.newest, rng)
    return {path: whole[: rng.randrange(len(whole) + 1)]}


def _append(saved: Saved, rng: random.Random) -> Changes:
    path, whole = _one(saved.newest, rng)
    return {path: whole + rng.randbytes(rng.choice([1, 4, 20, 4096]))}


def _delete(saved: Saved, rng: random.Random) -> Changes:
    return {_one(saved.newest, rng)[0]: None}


def _swap(saved: Saved, rng: random.Random) -> Changes:
    alike = defaultdict(list)
    for path, whole in saved.newest.items():
        alike[len(whole)].append(path)
    groups = [group for group in alike.values() if len(group) > 1]
    among = rng.choice(groups) if groups and rng.random() < 0.8 else [*saved.newest]
    one, other = rng.sample(among, 2)
    return {one: saved.newest[other], other: saved.newest[one]}


def _replace(saved: Saved, rng: random.Random) -> Changes:
    path, _ = _one(saved.newest, rng)
    alike = [each for each in saved.before if each.parts[-2:] == path.parts[-2:]]
    alike = alike or [each for each in saved.before if each.name == path.name]
    return {path: saved.before[rng.choice(alike or [*saved.before])]}


def _edit(saved: Saved, rng: random.Random) -> Changes:
    (path,) = (path for path in saved.newest if path.name == _MANIFEST)
    content = json.loads(saved.newest[path])
    node, key = content, rng.choice([*content])
    while isinstance(node[key], dict | list) and node[key]:
        node = node[key]
        key = rng.choice([*node] if isinstance(node, dict) else range(len(node)))
    node[key] = _another(node[key])
    return {path: (json.dumps(content, indent=1) + "\n").encode()}


def _another(value: Any) -> Any:
    match value:
        case bool() | None:
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{value}x"
    return [0]  # an empty list, or object


_KINDS: Mapping[str, Callable[[Saved, random.Random], Changes]] = {
    "flip": _flip,
    "cut": _cut,
    "append": _append,
    "delete": _delete,
    "swap": _swap,
    "replace": _replace,
    "edit": _edit,
}


def _one(files: Mapping[Path, bytes], rng: random.Random) -> tuple[Path, bytes]:
    return rng.choice(list(files.items()))


def write(changes: Changes) -> None:
    """Write or delete files."""
    for path, data in changes.items():
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)


def is_silent(directory: Path, state: PyTree) -> bool:
    """Return whether a restore is not that of the undamaged checkpoint."""
    restored = CheckpointStore(directory).restore(state)
    if restored is None or restored.step != NEWEST - 1:
        return True
    return not (restored.meta == {"position": NEWEST - 1} and equal(restored, state))


def equal(restored: Any, state: PyTree) -> bool:
    """Return whether restored bits are those of the first step."""
    pairs = zip(jax.tree.leaves(restored.arrays), jax.tree.leaves(state), strict=True)
    return all(np.array_equal(np.asarray(one), np.asarray(two)) for one, two in pairs)


def main(argv: list[str]) -> None:
    del argv
    clock = SystemClock()
    started_s = clock.now_s()
    logging.getLogger("replicator").setLevel(logging.CRITICAL)  # it names each damage
    replicator.fake_devices(8)
    rep = replicator.Replicator(strategy=fsdp(whole_below_bytes=0))
    state = rep.init(init_fn)
    rng, silent, drawn = random.Random(_SEED.value), Counter(), Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = save_two_steps(folder, state)
        for _ in range(_CASES.value):
            kind, changes = draw_damage(saved, rng)
            drawn[kind] += 1
            write(changes)
            if is_silent(folder, state):
                silent[kind] += 1
                files = [path.relative_to(folder).as_posix() for path in changes]
                print(f"silent: {kind} of {', '.join(files)}")
            write({path: saved.newest[path] for path in changes})
        restored = CheckpointStore(folder).restore(state)
        assert restored is not None, "two steps were saved"
        assert restored.step == NEWEST, "nothing is damaged any more"
    total = silent.total()
    print(f"{total} of {_CASES.value} damaged checkpoints were restored silently")
    result = {"silent": total, "cases": _CASES.value, "drawn": dict(drawn)}
    print(json.dumps(result | {"seconds": round(clock.now_s() - started_s, 1)}))


if __name__ == "__main__":
    app.run(main)

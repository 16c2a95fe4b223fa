"""Flip bits in the newest checkpoint, or cut its files short, and see who notices.

Each case damages one file of the newest of two checkpoints, restores as a run would
that starts again, and puts the file back. What is restored from a damaged checkpoint is
counted as silent, whatever its numbers.
"""

import json
import logging
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import app, flags

from benchmarks.tasks import mlp
from replicator.checkpoint import CheckpointStore, Snapshot

_CASES = flags.DEFINE_integer("cases", 2000, "How often a file is damaged.")
_SEED = flags.DEFINE_integer("seed", 0, "Of what is damaged, and where.")
NEWEST = 2


def save_two_steps(directory: Path) -> list[Path]:
    """Save a model twice; return the files of the newest checkpoint."""
    model = mlp(1).init_model(jax.random.key(0))
    with CheckpointStore(directory) as store:
        for step in (NEWEST - 1, NEWEST):
            store.save(Snapshot(step=step, arrays=model, meta={"position": step}))
    (newest,) = directory.glob(f"*{NEWEST}")
    return [path for path in sorted(newest.rglob("*")) if path.stat().st_size > 0]


def damages(
    files: list[Path], *, cases: int, seed: int
) -> Iterator[tuple[Path, bytes]]:
    """Yield a file and what becomes of it; small files are met as often as large."""
    rng = random.Random(seed)
    contents = {path: path.read_bytes() for path in files if path.is_file()}
    for _ in range(cases):
        path, whole = rng.choice(list(contents.items()))
        place = rng.randrange(len(whole))
        if rng.random() < 0.5:
            yield path, whole[:place]
        else:
            flipped = whole[place] ^ 1 << rng.randrange(8)
            yield path, whole[:place] + bytes([flipped]) + whole[place + 1 :]


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("replicator").setLevel(logging.CRITICAL)  # it names each damage
    silent = 0
    with tempfile.TemporaryDirectory() as folder:
        files = save_two_steps(Path(folder))
        for path, damaged in damages(files, cases=_CASES.value, seed=_SEED.value):
            whole = path.read_bytes()
            path.write_bytes(damaged)
            restored = CheckpointStore(folder).restore()
            silent += restored is None or restored.step == NEWEST
            path.write_bytes(whole)
        restored = CheckpointStore(folder).restore()
        assert restored is not None, "two steps were saved"
        assert restored.step == NEWEST, "nothing is damaged any more"
    print(f"{silent} of {_CASES.value} damaged checkpoints were restored silently")
    print(json.dumps({"silent": silent, "cases": _CASES.value}))


if __name__ == "__main__":
    app.run(main)

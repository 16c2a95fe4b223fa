"""Move an array between slices in all pairs of layouts, and compare with NumPy.

    python -m benchmarks.controller_reshard

Slices of 1, 2 and 4 devices in one and two dimensions, on two islands of this process.
`failures` counts moves that changed a value or a layout, `host_copies` arrays that came
to the host on the way, `call_ms` is how long a call takes that moves what an op of
300 ms has yet to compute: the median of ten.
"""

import itertools
import json
import os
import statistics
import time

# Before JAX starts: the pool of XLA's CPU client needs a thread per device.
os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec as P

from replicator import controller

MESHES = (
    {"x": 1},
    {"x": 2},
    {"x": 4},
    {"x": 2, "y": 1},
    {"x": 1, "y": 2},
    {"x": 2, "y": 2},
)
SHAPE = 8, 4
PRODUCER_S = 0.3
_MESHES = flags.DEFINE_integer("meshes", len(MESHES), "Number of the meshes to pair.")


def main(argv: list[str]) -> None:
    """Run all moves, and print the counts."""
    del argv
    started_s = time.monotonic()
    with controller.local(islands=2, devices=4) as pw:
        moves = _moves(pw)
        result = {**moves, "call_ms": _call_ms(pw)}
    result["seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(result))


def _moves(pw: controller.Controller) -> dict[str, int]:
    value = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    targets = [
        (slice_, spec)
        for mesh in MESHES[: _MESHES.value]
        for slice_ in [_slice(pw, mesh, "island1")]
        for spec in _specs(mesh)
    ]
    with _CountedCopies() as counted:
        _by_way_of_the_host(pw)
    assert counted.count, "the counter does not see what JAX brings to the host"
    failures = copies = moves = 0
    for mesh in MESHES[: _MESHES.value]:
        source = _slice(pw, mesh, "island0")
        for spec in _specs(mesh):
            put = pw.put(value, source, spec)
            with _CountedCopies() as counted:
                arrived = [pw.put(put, slice_, to) for slice_, to in targets]
                arrays = [future.result() for future in arrived]
            copies += counted.count
            moves += len(arrays)
            for (slice_, to), array in zip(targets, arrays, strict=True):
                wanted = slice_.layout(to).sharding(slice_.devices)
                is_there = array.sharding.is_equivalent_to(wanted, array.ndim)
                failures += not (is_there and np.array_equal(array, value))
    return {"moves": moves, "failures": failures, "host_copies": copies}


def _by_way_of_the_host(pw: controller.Controller) -> None:
    """Move an array as JAX does: to another layout on another client."""
    one, two = (_slice(pw, {"x": 2}, island) for island in ("island0", "island1"))
    put = pw.put(np.ones(SHAPE, np.float32), one, P("x")).result()
    jax.device_put(put, two.layout(P(None, "x")).sharding(two.devices))


def _slice(
    pw: controller.Controller, mesh: dict[str, int], island: str
) -> controller.Slice:
    return pw.slice(int(np.prod(list(mesh.values()))), axes=mesh, island=island)


def _specs(mesh: dict[str, int]) -> list[P]:
    """Return all specs of two dimensions by the axes of a mesh."""
    entries = [None, *mesh]
    entries += list(itertools.permutations(mesh)) if len(mesh) > 1 else []
    pairs = itertools.product(entries, repeat=2)
    return [P(*pair) for pair in pairs if _uses_each_axis_once(pair)]


def _uses_each_axis_once(pair: tuple) -> bool:
    names = [name for entry in pair if entry for name in entry]
    return len(names) == len(set(names))


class _CountedCopies:
    """Count arrays that JAX brings to the host, by the property that does."""

    count = 0

    def __enter__(self) -> "_CountedCopies":
        from jax._src import array

        self._kind = array.ArrayImpl
        self._whole = array.ArrayImpl._value

        def counting(each: jax.Array) -> np.ndarray:
            self.count += 1
            return self._whole.fget(each)  # pyright: ignore[reportAttributeAccessIssue]

        setattr(self._kind, "_value", property(counting))  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._kind, "_value", self._whole)  # noqa: B010


def _call_ms(pw: controller.Controller) -> float:
    """Time calls that move what is not computed yet: another spec, other devices."""

    def slow(x: jax.Array) -> jax.Array:
        def sleep(x: np.ndarray) -> np.ndarray:
            time.sleep(PRODUCER_S)
            return np.asarray(x)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    one, four = _slice(pw, {"x": 2}, "island0"), _slice(pw, {"x": 4}, "island1")
    produce = pw.fn(slow, one, in_specs=P(), out_specs=P("x"))
    take = pw.fn(lambda x: x + 1, four, in_specs=P(None, "x"))

    @pw.program
    def both(x: jax.Array) -> jax.Array:
        return take(produce(x))

    value, times_s = np.ones(SHAPE, np.float32), []
    both(value).result()
    for _ in range(10):
        started_s = time.perf_counter()
        future = both(value)
        times_s.append(time.perf_counter() - started_s)
        future.result()
    return round(1e3 * statistics.median(times_s), 3)


if __name__ == "__main__":
    app.run(main)

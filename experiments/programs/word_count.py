"""Count the words of this repository's pages by MapReduce.

    coordinator ── map(text) ──▶ mappers ── take(pairs) ──▶ reducers
        └─────────────────────── reduce() ─────────────────────▲

A mapper turns a text into pairs of key and value and sends each pair to the reducer
that its key belongs to, so each reducer alone knows all values of its keys. What is
counted is two functions, `map_fn` and `reduce_fn`; the program itself is general.

J. Dean and S. Ghemawat, "MapReduce: Simplified Data Processing on Large Clusters", OSDI
2004. As there (§4.3), values are combined once before they travel.
"""

import collections
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import replicator.launchpad_bridge as lp
from experiments.programs import launch_flag

MapFn: TypeAlias = Callable[[str], Iterable[tuple[str, int]]]
ReduceFn: TypeAlias = Callable[[Sequence[int]], int]


def words(text: str) -> Iterable[tuple[str, int]]:
    """Yield (word, 1) for each word: this is `map_fn`; `reduce_fn` is `sum`."""
    for word in re.findall(r"[a-z]+", text.lower()):
        yield word, 1


def grouped(pairs: Iterable[tuple[str, int]], reduce_fn: ReduceFn) -> dict[str, int]:
    """Return by key what `reduce_fn` makes of its values."""
    values: dict[str, list[int]] = collections.defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return {key: reduce_fn(found) for key, found in values.items()}


class Reducer:
    """Knows all values of its share of the keys."""

    def __init__(self, reduce_fn: ReduceFn) -> None:
        self._reduce_fn = reduce_fn
        self._pairs: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def take(self, found: Mapping[str, int]) -> None:
        """Keep what a mapper found in one text."""
        with self._lock:  # several mappers call at the same time
            self._pairs += found.items()

    def reduce(self) -> dict[str, int]:
        """Return by key what came of its values."""
        return grouped(self._pairs, self._reduce_fn)


class Mapper:
    """Finds pairs in texts."""

    def __init__(
        self, map_fn: MapFn, reduce_fn: ReduceFn, reducers: Sequence[lp.CourierClient]
    ) -> None:
        self._map_fn = map_fn
        self._reduce_fn = reduce_fn
        self._reducers = reducers

    def map(self, text: str) -> None:
        """Send each pair of a text to the reducer of its key."""
        shares: list[dict[str, int]] = [{} for _ in self._reducers]
        for key, value in grouped(self._map_fn(text), self._reduce_fn).items():
            # `hash` of a string is another number in each process.
            shares[zlib.crc32(key.encode()) % len(shares)][key] = value
        calls = [
            reducer.futures.take(share)
            for reducer, share in zip(self._reducers, shares, strict=True)
        ]
        for call in calls:
            call.result()  # it ran once, or this raises: no pair counts twice


class Coordinator:
    """Hands out texts; when all are mapped it has them reduced."""

    def __init__(
        self,
        mappers: Sequence[lp.CourierClient],
        reducers: Sequence[lp.CourierClient],
        texts: Sequence[str],
    ) -> None:
        self._mappers = mappers
        self._reducers = reducers
        self._texts = texts

    def run(self) -> list[dict[str, int]]:
        """Return what each reducer found."""
        mapped = [
            self._mappers[number % len(self._mappers)].futures.map(text)
            for number, text in enumerate(self._texts)
        ]
        for call in mapped:
            call.result()
        reduced = [reducer.futures.reduce() for reducer in self._reducers]
        found = [call.result() for call in reduced]
        lp.stop()
        return found


def map_reduce(
    launch_type: str | lp.Launcher,
    texts: Sequence[str],
    map_fn: MapFn,
    reduce_fn: ReduceFn,
    *,
    mappers: int = 4,
    reducers: int = 2,
) -> list[dict[str, int]]:
    """Run the program; return, by reducer, what came of the values of each key.

    Args:
      launch_type: Where nodes run.
      texts: What is mapped.
      map_fn: Yields the pairs of a text.
      reduce_fn: Makes one value of several, in any order and grouping.
      mappers: How many.
      reducers: How many.
    """
    program = lp.Program("map_reduce")
    with program.group("reducers"):
        to_reducers = [
            program.add_node(lp.CourierNode(Reducer, reduce_fn))
            for _ in range(reducers)
        ]
    with program.group("mappers"):
        to_mappers = [
            program.add_node(lp.CourierNode(Mapper, map_fn, reduce_fn, to_reducers))
            for _ in range(mappers)
        ]
    node = lp.PyClassNode(Coordinator, to_mappers, to_reducers, texts)
    program.add_node(node, label="coordinator")
    with lp.launch(program, launch_type) as run:
        run.wait()
        return run.results["coordinator"]


def pages() -> list[str]:
    """Return the texts of this repository that people read, its licence included."""
    root = Path(__file__).parents[2]
    paths = [
        root / "LICENSE",
        *sorted(root.glob("*.md")),
        *sorted(root.glob("docs/*.md")),
    ]
    return [path.read_text() for path in paths]


def count_words(
    launch_type: str | lp.Launcher = "threads", **sizes: Any
) -> collections.Counter[str]:
    """Return how often each word occurs in `pages()`."""
    counts: collections.Counter[str] = collections.Counter()
    for share in map_reduce(launch_type, pages(), words, sum, **sizes):
        counts.update(share)
    return counts


def main(launch_type: str) -> None:
    counts = count_words(launch_type)
    often = ", ".join(f"{word} {count}" for word, count in counts.most_common(5))
    print(f"{counts.total()} words, {len(counts)} different: {often}, …")


if __name__ == "__main__":
    launch_flag.run(main)

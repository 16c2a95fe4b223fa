"""The outcome of an agent's run, and the returns of its episodes in a file."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicator.base.host.json_lines import read_lines
from replicator.checkpoint.disk import Disk

NAME = "returns.jsonl"
_SHOWN = 30  # episodes that the metric while a run learns is the mean of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """Outcome of one sitting of a run.

    Attributes:
      params: At its end.
      updates: Behind them, those of earlier sittings included.
      begun: Updates of earlier sittings.
      returns: (updates so far, return) of each episode, in order; those of earlier
        sittings first.
      seconds: From the beginning of this sitting to its last update, compilation
        included.
    """

    params: Any
    updates: int
    begun: int
    returns: list[tuple[int, float]]
    seconds: float


class Returns:
    """Returns of episodes along the way; threads may add at once.

    Attributes:
      episodes: (updates so far, return) of each, in order.
    """

    def __init__(
        self, folder: Path | None, *, updates: int | None = None, name: str = NAME
    ) -> None:
        """Read what earlier sittings wrote.

        Args:
          folder: Where the file is; it exists. None keeps nothing.
          updates: Of the checkpoint that the run goes on from, 0 if it begins: episodes
            behind it are played again, and dropped. None keeps all.
          name: Of the file.
        """
        self._path = None if folder is None else folder / name
        self._begun, self._lock = updates or 0, threading.Lock()
        self.episodes: list[tuple[int, float]] = []
        if self._path is not None:
            self.episodes = [
                (made, gained)
                for made, gained in read_lines(self._path)
                if updates is None or made <= updates
            ]
            Disk().replace_file(self._path, _lines(self.episodes).encode())

    def add(self, updates: int, gained: Iterable[float]) -> None:
        """Take in the episodes that ended in an unroll."""
        new = [(updates, float(each)) for each in gained]
        with self._lock:
            self.episodes += new
            if new and self._path is not None:
                with self._path.open("a") as file:
                    file.write(_lines(new))

    def metrics(self) -> dict[str, float]:
        """Return `average_return`, of the last episodes; nothing without any."""
        average = average_of(self.episodes, _SHOWN)
        return {} if average is None else {"average_return": average}

    def learned(self, result: Any, *, since: float) -> Learned:
        """Return the outcome of a sitting that began then, of its session's result."""
        return Learned(
            params=jax.device_get(result.state["params"]),
            updates=result.step,
            begun=self._begun,
            returns=self.episodes,
            seconds=time.perf_counter() - since,
        )


def average_of(episodes: Sequence[tuple[int, float]], last: int) -> float | None:
    """Return the mean return of the last episodes; None if there are none."""
    gained = [each for _, each in episodes[-last:]]
    return float(np.mean(gained)) if gained else None


def _lines(episodes: Iterable[tuple[int, float]]) -> str:
    return "".join(f"{json.dumps(each)}\n" for each in episodes)

"""Counts of episodes and environment steps in the batches that a learner took.

They are counted on the host that takes a batch, and belong to it: they are metrics of
its update, and part of checkpoints.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from replicator.base.types import PyTree
from replicator.launchpad_bridge.trajectories.table import Taken

MEANS = ("episode_return", "episode_length")
_LAST = 100
"""Number of episodes that means are taken over."""


def _window(values: Any = ()) -> collections.deque[float]:
    return collections.deque(values, maxlen=_LAST)


@dataclasses.dataclass(kw_only=True, slots=True)
class Played:
    """Counts of a run, including those before a restart.

    Attributes:
      environment_steps: Steps of all environments together, without resets.
      inserted: Rows inserted into a replay table since it was started: what it gives
        out was given out before, so steps are not counted. None in other tables.
      episodes: Number of episodes that ended in inserted trajectories.
      returns: Returns of the last hundred of them.
      lengths: Lengths in steps of the last hundred in the batches taken.
      dropped: Trajectories that the table has dropped since it was started, by reason.
    """

    environment_steps: int = 0
    episodes: int = 0
    returns: collections.deque[float] = dataclasses.field(default_factory=_window)
    lengths: collections.deque[float] = dataclasses.field(default_factory=_window)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    inserted: int | None = None

    def note(self, taken: Taken, counts: Mapping[str, Any]) -> None:
        """Count the trajectories of a batch.

        Args:
          taken: Trajectories; steps and lengths are counted only if they have the
            leaves of `Actor`.
          counts: Statistics of the table by now.
        """
        dropped = counts.get("dropped", {})
        finite = [float(each) for each in taken.episodes if math.isfinite(each)]
        self.episodes += len(taken.episodes)
        self.returns.extend(finite)
        self.dropped = {reason: int(count) for reason, count in dropped.items()}
        rows = taken.trajectories
        if taken.keys is not None:
            self.inserted = int(counts.get("inserted", 0))
            return
        if not (isinstance(rows, Mapping) and {"first", "last", "age"} <= rows.keys()):
            return
        self.environment_steps += int((~rows["first"][:, 1:]).sum())
        self.lengths.extend(rows["age"][:, 1:][rows["last"][:, 1:]].tolist())

    def numbers(self) -> dict[str, Any]:
        """Return metrics; means are left out before there is an episode.

        >>> Played(episodes=3, environment_steps=60).numbers()
        {'episodes': 3, 'environment_steps': 60}
        """
        means = dict(zip(MEANS, (self.returns, self.lengths), strict=True))
        steps = {"environment_steps": self.environment_steps}
        return {
            **{name: float(np.mean(each)) for name, each in means.items() if each},
            "episodes": self.episodes,
            **(steps if self.inserted is None else {"inserted": self.inserted}),
            **({"dropped": dict(self.dropped)} if self.dropped else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain JSON."""
        windows = {"returns": list(self.returns), "lengths": list(self.lengths)}
        return {**dataclasses.asdict(self), **windows}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Return the counts that `to_json` wrote.

        >>> Played.from_json(Played(episodes=3).to_json()).episodes
        3
        """
        windows = {name: _window(saved[name]) for name in ("returns", "lengths")}
        return cls(**{**saved, **windows})


def as_example(numbers: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the means of episodes as a batch of one, and flags of those known."""
    found = [(numbers.get(name, 0.0), name in numbers) for name in MEANS]
    means, known = np.array(found, np.float32).T
    return {"means": means[None], "known": known[None]}


def evaluate_means(state: PyTree, acted: PyTree) -> PyTree:
    """Evaluate `as_example`: NaN, which ranks last, for a mean not known yet."""
    del state
    found = jnp.where(acted["known"] > 0, acted["means"], jnp.nan)
    return {name: found[:, place] for place, name in enumerate(MEANS)}

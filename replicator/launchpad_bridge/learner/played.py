"""What actors have played, of what a learner took: numbers of its run, batch by batch.

They are counted on the host where a batch is taken, and go along with it: into the
metrics of the update that it makes, and into checkpoints.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from replicator.launchpad_bridge.trajectories.table import Taken

_LAST = 100
"""Episodes that means are of."""


def _window(values: Any = ()) -> collections.deque[float]:
    return collections.deque(values, maxlen=_LAST)


@dataclasses.dataclass(kw_only=True, slots=True)
class Played:
    """Counts of a run, those of its earlier sittings included.

    Attributes:
      environment_steps: Of all environments together; resets are none.
      episodes: That have ended in what was inserted.
      returns: Of the last hundred of them.
      lengths: Of the last hundred in what was taken, in steps.
      dropped: Trajectories that the table has dropped since it was started, by reason.
    """

    environment_steps: int = 0
    episodes: int = 0
    returns: collections.deque[float] = dataclasses.field(default_factory=_window)
    lengths: collections.deque[float] = dataclasses.field(default_factory=_window)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)

    def note(self, taken: Taken, dropped: Mapping[str, int]) -> None:
        """Count what was taken for a batch.

        Args:
          taken: Trajectories of actors; what is told by leaves that others lack is not
            counted of theirs.
          dropped: What the table counts by now.
        """
        finite = [float(each) for each in taken.episodes if math.isfinite(each)]
        self.episodes += len(taken.episodes)
        self.returns.extend(finite)
        self.dropped = {reason: int(count) for reason, count in dropped.items()}
        rows = taken.trajectories
        if not (isinstance(rows, Mapping) and {"first", "last", "age"} <= rows.keys()):
            return
        self.environment_steps += int((~rows["first"][:, 1:]).sum())
        self.lengths.extend(rows["age"][:, 1:][rows["last"][:, 1:]].tolist())

    def numbers(self) -> dict[str, Any]:
        """Return metrics; means are left out before there is an episode."""
        means = {"episode_return": self.returns, "episode_length": self.lengths}
        return {
            **{name: float(np.mean(each)) for name, each in means.items() if each},
            "episodes": self.episodes,
            "environment_steps": self.environment_steps,
            **({"dropped": dict(self.dropped)} if self.dropped else {}),
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        windows = {"returns": list(self.returns), "lengths": list(self.lengths)}
        return {**dataclasses.asdict(self), **windows}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote."""
        windows = {name: _window(said[name]) for name in ("returns", "lengths")}
        return cls(**{**said, **windows})

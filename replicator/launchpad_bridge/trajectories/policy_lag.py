"""How many updates the trajectories of a batch have missed. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Self

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLag:
    """The policy lag of a batch's trajectories, in updates.

    Attributes:
      counts: Trajectories by their lag, the smallest first. A lag is below 0 where a
        learner went back to a checkpoint and its actors were ahead of that.
      mean: Over trajectories.
      largest: Of all trajectories.
    """

    counts: Mapping[int, int]
    mean: float
    largest: int

    @classmethod
    def at(cls, update: int, versions: np.ndarray) -> Self:
        """Measure the lag of trajectories that are learnt from after some updates.

        Args:
          update: How many.
          versions: int64 [n], of the policy of each trajectory.

        >>> PolicyLag.at(5, np.array([5, 3, 3, 4]))
        PolicyLag(counts={0: 1, 1: 1, 2: 2}, mean=1.25, largest=2)
        """
        lags = update - versions
        values, counts = np.unique(lags, return_counts=True)
        return cls(
            counts=dict(zip(values.tolist(), counts.tolist(), strict=True)),
            mean=float(lags.mean()),
            largest=int(lags.max()),
        )

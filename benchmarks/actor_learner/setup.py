"""Sizes of everything; plain values."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Sizes of one measurement.

    Attributes:
      actors: Processes that act.
      environments: Games of each actor.
      unroll_length: Steps of a trajectory.
      batch_size: Trajectories of an update.
      wait_s: Seconds that a step of all environments of an actor waits besides.
    """

    actors: int
    environments: int
    unroll_length: int
    batch_size: int
    wait_s: float = 0.0

    @property
    def steps_per_update(self) -> int:
        """Return how many environment steps an update learns from."""
        return self.batch_size * self.unroll_length

"""Work within a window of time; plain values."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Counts within a window.

    Attributes:
      seconds: How long it was.
      acted: Environment steps that were taken.
      trained: Environment steps that were learnt from.
      stepping_s: Processor time within environments.
      actors_s: User and system time of the processes that act.
      learner_s: That of the one that learns, or takes.
    """

    seconds: float
    acted: int
    trained: int
    stepping_s: float
    actors_s: float
    learner_s: float

    @property
    def acted_per_s(self) -> float:
        """Return environment steps a second."""
        return self.acted / self.seconds

    @property
    def trained_per_s(self) -> float:
        """Return environment steps a second that were learnt from."""
        return self.trained / self.seconds

"""Clocks: the system's, and the interface of those that tests use instead."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time."""

    def now_s(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        return time.monotonic()

"""Which examples, or tokens, of a global batch are real."""

from collections.abc import Callable

import numpy as np

from benchmarks.truth.tasks import ROWS, TIME

Mask = Callable[[np.random.Generator], np.ndarray]


def scattered(rng: np.random.Generator) -> np.ndarray:
    """Two thirds of the examples, anywhere; in small cuts, some parts have none."""
    return (rng.random(ROWS) < 0.66).astype(np.float64)


def padded(rng: np.random.Generator) -> np.ndarray:
    """An uneven end: the last microbatch of four, and more, is padding alone."""
    return (np.arange(ROWS) < 19 - rng.integers(0, 3)).astype(np.float64)


def empty_replica(rng: np.random.Generator) -> np.ndarray:
    """The second half of each microbatch of two or one is padding alone."""
    del rng
    return (np.arange(ROWS) % 16 < 7).astype(np.float64)


def empty_microbatch(rng: np.random.Generator) -> np.ndarray:
    """The first half of the batch is padding alone."""
    return (np.arange(ROWS) >= 16 + rng.integers(0, 5)).astype(np.float64)


def lengths(rng: np.random.Generator) -> np.ndarray:
    """Sequences of 0 to all tokens."""
    length = rng.integers(0, TIME + 1, (ROWS, 1))
    return (np.arange(TIME) < length).astype(np.float64)


def short_end(rng: np.random.Generator) -> np.ndarray:
    """Sequences of any length, and none after half of the batch."""
    return lengths(rng) * (np.arange(ROWS) < 15)[:, None]


def importances(rng: np.random.Generator) -> np.ndarray:
    """Examples that count 0 to 3 times, in fractions."""
    return scattered(rng) * rng.uniform(0, 3, ROWS)

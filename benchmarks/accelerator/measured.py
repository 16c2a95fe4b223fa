"""Numbers of a part, why one may be missing, and how all parts measure."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import jax

Numbers: TypeAlias = dict[str, Any]
"""Numbers by name; under `"reasons"`, by name, why one of them is null."""

Parts: TypeAlias = Iterator[Numbers]
"""What a part yields: numbers as they come, so that those of a cut run are kept."""


class LeftOut(Exception):
    """The rest of a part cannot be measured here; the message is the reason."""


def memory_limit() -> float:
    """Return the bytes that one device can give, if it reports them."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", float("inf"))


def peak_memory(key: str) -> Numbers:
    """Return the most memory that was in use on the first device so far, in GB."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return {key: None, "reasons": {key: "the device does not report its memory"}}
    return {key: round(stats["peak_bytes_in_use"] / 1e9, 2)}

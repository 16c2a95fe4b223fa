"""Recognise a lack of device memory in an error of XLA, and write sizes for people."""

import jax

# A failure behind the call is "INTERNAL: ... Out of memory ..." on a CPU.
_MARKS = ("RESOURCE_EXHAUSTED", "out of memory")


def is_out_of_memory(failure: BaseException) -> bool:
    """Return whether `failure` is an out-of-memory error of XLA.

    >>> is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 8 GiB"))
    True
    """
    # By the text: XLA has one class for all of its errors.
    text = str(failure)
    is_marked = any(mark in text or mark in text.lower() for mark in _MARKS)
    return is_marked and isinstance(failure, jax.errors.JaxRuntimeError)


def readable(size_bytes: int) -> str:
    """Write a size with a unit.

    >>> readable(3 << 29)
    '1.5 GiB'
    """
    size, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"

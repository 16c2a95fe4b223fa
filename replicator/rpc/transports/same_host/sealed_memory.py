"""Nameless memory that one process writes, and others may map only to read."""

import contextlib
import ctypes
import fcntl
import mmap
import os

import numpy as np

from replicator.errors import DecodeError

IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""Whether the system has it: Linux does."""
# From Python 3.13 on in `fcntl`; since Linux 5.1 in the kernel.
_F_SEAL_FUTURE_WRITE = 0x0010
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def make_sealed(size: int, *, is_common: bool = False) -> tuple[int, mmap.mmap]:
    """Make memory that others may map to read, and nobody can make smaller or larger.

    Args:
      size: In bytes.
      is_common: Whether several others will map it, so that none of them may write.

    Returns:
      Its descriptor, and a mapping to write to.

    Raises:
      OSError: The system has no memory, or no descriptor, for it; or it cannot keep
        others from writing, and it is common.
    """
    # Without a name: when all processes that have mapped it are dead, it is gone.
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("replicator-rpc", flags)
    try:
        os.ftruncate(descriptor, size)
        mapped = _mapped(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(*([] if is_common else [OSError])):  # an older kernel
            # Our own mapping is there already; nobody makes another one to write.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        # Before another process has it: one that could shrink it could kill us.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapped


def map_sealed(descriptor: int, size: int) -> mmap.mmap:
    """Map memory of another process to read; the descriptor stays the caller's.

    Raises:
      DecodeError: It is not of that size, or not a memory file that is sealed.
      OSError: The system cannot map it.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise DecodeError("Shared memory must be a memory file, got another.") from None
    if ~seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
        raise DecodeError("Shared memory must be sealed, got one that may shrink.")
    # After the seals were checked, so that it stays true.
    found = os.fstat(descriptor).st_size
    if found != size:
        raise DecodeError(f"Shared memory must be of {size} bytes, got {found}.")
    return _mapped(descriptor, size, mmap.PROT_READ)


def _mapped(descriptor: int, size: int, prot: int) -> mmap.mmap:
    """Map a file without keeping a descriptor of it.

    Before Python 3.13 and its `trackfd` an `mmap` of a file has one: two more for each
    client. So one of no file is made, and the file put into its place.
    """
    # Unmapped when the last array in it dies, or with the process.
    mapped = mmap.mmap(-1, size, flags=_PRIVATE, prot=prot)
    place = np.frombuffer(mapped, np.uint8).ctypes.data
    flags = mmap.MAP_SHARED | _MAP_FIXED
    # Over pages that `mapped` owns, in one call: no other mapping can be hit.
    if _mmap(place, size, prot, flags, descriptor, 0) != place:
        raise OSError(ctypes.get_errno(), "the system cannot map shared memory")
    return mapped

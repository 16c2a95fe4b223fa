"""Memory without a name that one process writes, and others may map only to read.

Of two kinds. Its maker goes on writing to the one: slots that are used again. The other
nobody writes any more, its maker neither, and everybody can ask the kernel whether that
is so: bodies that are made once, and sent to many.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from typing import final

import numpy as np

from replicator.errors import DecodeError
from replicator.rpc.transports.frames import Layout

IS_AVAILABLE = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
"""Whether the system has it: Linux does."""
# From Python 3.13 on in `fcntl`; since Linux 5.1 in the kernel.
_F_SEAL_FUTURE_WRITE = 0x0010
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def make_sealed(size: int) -> tuple[int, mmap.mmap]:
    """Make memory that others may map to read, and nobody can make smaller or larger.

    Returns:
      Its descriptor, and a mapping to write to.

    Raises:
      OSError: The system has no memory, or no descriptor, for it.
    """
    descriptor = _make_file(size)
    try:
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = _mapped(descriptor, size, writable, mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # an older kernel
            # Our own mapping is there already; nobody makes another one to write.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        # Before another process has it: one that could shrink it could kill us.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapped


@final
class ConstantMemory:
    """Memory that holds the body of a message, and that nobody can write any more.

    Attributes:
      descriptor: Of the memory file; closed when this object dies. The memory goes with
        the last process that has mapped it.
      num_bytes: Its size.
    """

    __slots__ = ("__weakref__", "descriptor", "num_bytes")

    def __init__(self, layout: Layout) -> None:
        """Copy a body.

        Args:
          layout: Of its buffers.

        Raises:
          OSError: The system has no memory, or no descriptor, for it.
        """
        self.num_bytes = layout.num_bytes
        self.descriptor = _make_file(self.num_bytes)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        # Written without a mapping: the kernel refuses the seal as long as there is one
        # that may write, and says so when memory is short, where a mapping would kill.
        for offset, buffer in zip(layout.offsets, layout.buffers, strict=True):
            written = 0
            while written < len(buffer):  # the system takes less than 2 GiB at once
                rest = memoryview(buffer)[written:]
                written += os.pwrite(self.descriptor, rest, offset + written)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def is_constant(descriptor: int) -> bool:
    """Tell whether nobody can write a memory file any more, its maker neither.

    Raises:
      OSError: It is no memory file.
    """
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)


def map_sealed(descriptor: int, size: int) -> mmap.mmap:
    """Map memory of another process to read; the descriptor stays the caller's.

    Raises:
      DecodeError: It is not of that size, or no memory file that stays as it is.
      OSError: The system cannot map it.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise DecodeError("Shared memory must be a memory file, got another.") from None
    if ~seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
        raise DecodeError("Shared memory must be sealed, got one that may shrink.")
    found = os.fstat(descriptor).st_size
    if found != size:
        raise DecodeError(f"Shared memory must be of {size} bytes, got {found}.")
    # Pages that nobody writes are the same ones in both. Before Linux 6.7 memory that
    # nobody may write cannot be mapped as shared, not even to read.
    flags = mmap.MAP_PRIVATE if seals & fcntl.F_SEAL_WRITE else mmap.MAP_SHARED
    return _mapped(descriptor, size, mmap.PROT_READ, flags)


def _make_file(size: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("replicator-rpc", flags)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int, size: int, prot: int, flags: int) -> mmap.mmap:
    """Map a file without keeping a descriptor of it.

    Before Python 3.13 and its `trackfd` an `mmap` of a file has one: two more for each
    client. So one of no file is made, and the file put into its place.
    """
    mapped = mmap.mmap(-1, size, flags=_PRIVATE, prot=prot)
    place = np.frombuffer(mapped, np.uint8).ctypes.data
    # Over pages that `mapped` owns, in one call: no other mapping can be hit.
    if _mmap(place, size, prot, flags | _MAP_FIXED, descriptor, 0) != place:
        raise OSError(ctypes.get_errno(), "the system cannot map shared memory")
    return mapped

"""Stacks of all threads of this process, and the user's lines in them.

Python's view: for a thread inside JAX or another C++ library it shows the call into it.
"""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from replicator.engine.analysis.source_lines import (
    UNKNOWN_LINE,
    user_frame_of,
    user_line_of,
)

_DEBUGGERS = ("pdb", "bdb", "IPython.core.debugger")
_CALLBACKS = os.path.join("jax", "_src", "callback.py")


def format_stacks(*, first: int | None = None) -> str:
    """Return the stacks of all threads, each with its name.

    >>> format_stacks().splitlines()[0]
    'Thread ...

    Args:
      first: Identifier of the thread to show first; the main thread by default. The
        calling thread is last.
    """
    frames = sys._current_frames()
    first = threading.main_thread().ident if first is None else first
    own = threading.get_ident()
    order = sorted(frames, key=lambda ident: (ident == own, ident != first, ident))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, 'unknown to Python')} ({ident}):\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in order
    )


def save_stacks(text: str, path: Path) -> None:
    """Write stacks to a file, and wait until they are on the disk.

    Raises:
      OSError: They cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def where_is(ident: int) -> str:
    """Return the user's line that a thread runs, and the innermost call under it."""
    frame = sys._current_frames().get(ident)
    line = user_line_of(frame)
    if frame is None or line.endswith(f":{frame.f_lineno} in {frame.f_code.co_name}"):
        return line
    return f"{line}, inside `{frame.f_code.co_name}`"


def also_in_user_code(ident: int) -> list[str]:
    """Return the user's lines that threads other than `ident` and this one run."""
    frames = sys._current_frames()
    lines = {
        other: user_line_of(frame)
        for other, frame in frames.items()
        if other not in (ident, threading.get_ident())
    }
    return sorted({line for line in lines.values() if line != UNKNOWN_LINE})


def runs_callback() -> bool:
    """Return whether a thread runs a Python callback that a device waits for.

    >>> runs_callback()
    False
    """
    return any(
        each.f_code.co_filename.endswith(_CALLBACKS)
        for frame in sys._current_frames().values()
        for each in _outward(user_frame_of(frame))
    )


def waits_in_debugger(ident: int) -> bool:
    """Return whether a thread waits in a debugger.

    >>> waits_in_debugger(0)
    False
    """
    if "pydevd" in sys.modules:
        return True
    frame = sys._current_frames().get(ident)
    return any(each.f_globals.get("__name__") in _DEBUGGERS for each in _outward(frame))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back

"""Find the user's own line behind an equation of a jaxpr."""

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import jax
import optax
from jax.extend import core

UNKNOWN_LINE = "an unknown line"


def user_line(eqn: core.JaxprEqn, *, caller: str = UNKNOWN_LINE) -> str:
    """Return the user's line that made `eqn`: the first frame outside libraries.

    Args:
      eqn: Any equation.
      caller: Line of the call that holds `eqn`. JAX traces a jitted function of its own
        (`jnp.where`, `jax.random.normal`) once for all its callers, so equations in
        there have no line of the user.

    Returns:
      For example "train.py:12 in step_fn".
    """
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not is_library(frame.file_name):
            function = frame.function_name.rpartition("<locals>.")[2]
            return f"{frame.file_name}:{frame.line_num} in {function}"
    return caller


def innermost_line(eqns: Sequence[core.JaxprEqn]) -> str:
    """Return the user's line of the last of equations that hold each other."""
    line = UNKNOWN_LINE
    for each in eqns:
        line = user_line(each, caller=line)
    return line


def is_transposed(eqns: Sequence[core.JaxprEqn]) -> bool:
    """Return whether the last of equations in each other is of a backward pass."""
    scopes = [str(each.source_info.name_stack) for each in eqns]
    again = any("rematted_computation" in scope for scope in scopes)
    return not again and any("transpose(" in scope for scope in scopes)


def user_stacklevel() -> int:
    """Return the `stacklevel` at which `warnings.warn` points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def user_line_of(frame: FrameType | None) -> str:
    """Return the innermost line of the user's on a stack, as `user_line` does.

    >>> user_line_of(None)
    'an unknown line'
    """
    frame = user_frame_of(frame)
    if frame is None:
        return UNKNOWN_LINE
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def user_frame_of(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's on a stack."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


_LIBRARY_ROOTS = tuple(
    {
        str(Path(__file__).parents[2]) + os.sep,
        sysconfig.get_paths()["stdlib"] + os.sep,
        # An editable installation lies outside of site-packages.
        *(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, optax)),
        *(path + os.sep for path in site.getsitepackages()),
    }
)

# Not every "<": an interactive user's own code is "<stdin>" or "<ipython-input-…>".
_GENERATED = ("<frozen ", "<string>", "<@")


@functools.lru_cache  # thousands of equations come from some tens of files
def is_library(file_name: str) -> bool:
    """Return whether a file is not the user's: ours, JAX's, or installed.

    >>> is_library(jax.__file__), is_library("/home/me/train.py")
    (True, False)
    """
    return file_name.startswith((*_LIBRARY_ROOTS, *_GENERATED))

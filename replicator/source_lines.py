"""Find the user's own line behind an equation of a jaxpr."""

import os
import site
import sysconfig

import jax
import optax
from jax.extend import core


def user_line(eqn: core.JaxprEqn) -> str:
    """Return the user's line that made `eqn`: the first frame outside libraries."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if not _is_library(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return "an unknown line"


_LIBRARY_ROOTS = tuple(
    {
        os.path.dirname(os.path.abspath(__file__)) + os.sep,
        sysconfig.get_paths()["stdlib"] + os.sep,
        # An editable installation lies outside of site-packages.
        *(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, optax)),
        *(path + os.sep for path in site.getsitepackages()),
    }
)


def _is_library(file_name: str) -> bool:
    return file_name.startswith(_LIBRARY_ROOTS) or file_name.startswith("<")

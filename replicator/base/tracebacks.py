"""Tracebacks of errors that leave the library: the user's frames, and no others.

A mistake in a step surfaces under tens of frames of this library and of JAX, none of
which the user can change. The outermost call of the library drops them from the error,
its causes, its contexts and the members of groups; type, message and notes stay.
`REPLICATOR_TRACEBACK=full` keeps all, `JAX_TRACEBACK_FILTERING=off` those of JAX.
"""

import difflib
import functools
import importlib.util
import inspect
import os
import site
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import jax

from replicator.errors import ArgumentError

ENVIRONMENT_VARIABLE = "REPLICATOR_TRACEBACK"
_FULL = "_replicator_traceback"
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit)

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def _folder_of(module: str) -> str:
    spec = importlib.util.find_spec(module)  # imports nothing
    origin = spec.origin if spec is not None else None
    return os.path.dirname(origin) + os.sep if origin else "<"


_JAX_ROOTS = (_folder_of("jax"), _folder_of("jaxlib"))
_LIBRARY_ROOTS = tuple(
    {
        str(Path(__file__).parents[1]) + os.sep,
        sysconfig.get_paths()["stdlib"] + os.sep,
        # An editable installation lies outside of site-packages.
        *_JAX_ROOTS,
        *map(_folder_of, ("flax", "optax")),
        *(path + os.sep for path in site.getsitepackages()),
        site.getusersitepackages() + os.sep,
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


class _Calls(threading.local):
    """Number of calls of the library that this thread is in."""

    depth = 0


class _ShortTraceback:
    """A context, and a decorator, that drops frames of libraries from an error."""

    _calls = _Calls()

    def __call__(self, fn: Function) -> Function:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                try:
                    return fn(*args, **kwargs)
                except TypeError as error:
                    _note_call(error, fn, args, kwargs)
                    raise

        return call  # type: ignore[return-value]

    def __enter__(self) -> None:
        self._calls.depth += 1

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._calls.depth -= 1
        # Inner calls leave all frames to the records of the outermost one.
        if error is None or self._calls.depth or isinstance(error, _CONTROL_FLOW):
            return
        if os.environ.get(ENVIRONMENT_VARIABLE) != "full":
            _shorten(error)


short_traceback = _ShortTraceback()
"""Drops frames of libraries from the errors of a block, or of a decorated function.

Only the outermost call does. What is raised again in there gains no frame.

>>> @short_traceback
... def halve(number):
...     return number / 2
>>> halve(3)
1.5
"""


def short_tracebacks(kind: Kind) -> Kind:
    """Decorate all public methods of a class with `short_traceback`.

    >>> @short_tracebacks
    ... class Half:
    ...     def of(self, number):
    ...         return number / 2
    >>> Half().of(3)
    1.5
    """
    for name, member in list(vars(kind).items()):
        if inspect.isfunction(member) and (name[0] != "_" or name in _SPECIAL):
            setattr(kind, name, short_traceback(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(kind, name, property(short_traceback(member.fget)))
    return kind


_SPECIAL = frozenset({"__init__", "__call__", "__enter__", "__exit__", "__next__"})


def full_traceback(error: BaseException) -> str:
    """Return the traceback of an error as text, with the frames that were dropped.

    >>> full_traceback(ValueError("too small")).strip()
    'ValueError: too small'
    """
    kept = vars(error).get(_FULL)
    return "".join(traceback.format_exception(error) if kept is None else [kept])


def check_environment() -> None:
    """Refuse a value of `REPLICATOR_TRACEBACK` that has no meaning.

    Raises:
      ArgumentError: It is neither unset nor `full` or `short`.
    """
    if (value := os.environ.get(ENVIRONMENT_VARIABLE)) not in (None, "full", "short"):
        raise ArgumentError(
            f"`{ENVIRONMENT_VARIABLE}` must be 'full' or 'short', got {value!r}. Set "
            "it to 'full' to see the frames of libraries, or unset it."
        )


def _note_call(
    error: TypeError, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> None:
    """Add to an error about a call of `fn` itself how it is called."""
    signature = inspect.signature(fn)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        takes = [name for name in signature.parameters if name != "self"]
        odd = next((name for name in kwargs if name not in takes), "")
        if near := difflib.get_close_matches(odd, takes, n=1):
            error.add_note(f"Use `{near[0]}` in the place of `{odd}`.")
            return
        name = fn.__qualname__.removesuffix(".__call__").rpartition(".")[2]
        about = f"`{odd}` is none of them: it takes " if odd else "It takes "
        error.add_note(
            f"Call it as `{name}({', '.join(takes[:2])}, ...)`. {about}"
            f"{', '.join(f'`{each}`' for each in takes)}."
        )


def _shorten(error: BaseException) -> None:
    vars(error)[_FULL] = full_traceback(error)
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.with_traceback(_of_user(each.__traceback__))
        _shorten_words(each)
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def _shorten_words(error: BaseException) -> None:
    """Leave out of JAX's words what they tell of functions that are not the user's."""
    if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        first, *others = str(error).splitlines()
        error.args = ("\n".join([first, *others[-1:]]),)
    elif str(error).startswith("pytree structure error"):
        error.args = (" ".join(str(error).split()),)
    notes = getattr(error, "__notes__", [])
    notes[:] = [each for each in notes if "JAX has removed its internal" not in each]


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept = None
    for entry in reversed(entries):
        if _is_shown(entry.tb_frame):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _is_shown(frame: FrameType) -> bool:
    file_name = frame.f_code.co_filename
    if file_name == "<string>":  # of `python -c`, or made by a library
        return frame.f_globals.get("__name__") == "__main__"
    if file_name.startswith(_JAX_ROOTS):
        return getattr(jax.config, "jax_traceback_filtering", "auto") == "off"
    return not is_library(file_name)

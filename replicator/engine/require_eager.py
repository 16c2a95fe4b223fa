"""Run programs outside of what the caller has told JAX to do.

What runs on a mesh is compiled and looks at real arrays. Under `jit`, `grad`, `vmap` or
`jax.disable_jit` it would fail deep inside of JAX, or run once where many were meant:
that is refused. A layout names its own mesh wherever one is needed, so that a mesh that
the caller has set (`jax.set_mesh`) is left for as long as the call takes. To set the
layout's in its place would do less: boxes of flax look for the axes that they name.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state

from replicator.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_SAME_MESH = nullcontext()


def without_mesh() -> AbstractContextManager:
    """Leave the mesh that `jax.set_mesh` has set in this thread, if there is one.

    For a `with` statement: JAX leaves it when this is called. Where JAX traces the mesh
    stays: it cannot be left there.
    """
    if jax.sharding.get_abstract_mesh().empty or not _is_eager():
        return _SAME_MESH
    return jax.set_mesh(None)  # pyright: ignore[reportReturnType]


def in_no_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs without the mesh of its caller."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_mesh():
            return fn(*args, **kwargs)

    return run


def eager(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: as `in_no_mesh`, and refused as `require_eager` does.

    Args:
      what: The name of what is called.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            require_eager(what)
            with without_mesh():
                return fn(*args, **kwargs)

        return run

    return decorate


def require_eager(what: str) -> None:
    """Refuse a call under a transformation of JAX, or with `jit` switched off.

    Args:
      what: The name of what is called.

    Raises:
      ArgumentError: It is.
    """
    if getattr(jax.config, "jax_disable_jit", False):
        raise ArgumentError(
            f"`jax.disable_jit` must be off where `{what}` is called, got it on. To "
            "see values inside a step, compile it with `debug=True`."
        )
    if not _is_eager():
        raise ArgumentError(
            f"`{what}` must be called outside of `jit`, `grad`, `vmap` and the like, "
            "got a call that JAX traces. Call it directly: it compiles by itself."
        )


def _is_eager() -> bool:
    return get_opaque_trace_state() == _no_trace()


@functools.cache
def _no_trace():
    # Whatever is traced where this is asked first: a new thread traces nothing.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(get_opaque_trace_state).result()

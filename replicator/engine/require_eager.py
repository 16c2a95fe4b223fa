"""Run programs outside of transformations and meshes of the caller.

A program on a mesh is compiled and looks at real arrays. Under `jit`, `grad`, `vmap` or
`jax.disable_jit` it would fail deep inside of JAX, or run once where many were meant:
that is refused. A layout names its own mesh wherever one is needed, so a mesh that the
caller has set (`jax.set_mesh`) is left for as long as the call takes. To set the
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

    For a `with` statement: JAX leaves it when this is called. While JAX traces, the
    mesh cannot be left, and stays.
    """
    if jax.sharding.get_abstract_mesh().empty or not _is_eager():
        return _SAME_MESH
    return jax.set_mesh(None)  # pyright: ignore[reportReturnType]


def in_no_mesh(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs without the mesh of its caller.

    >>> in_no_mesh(lambda: jax.sharding.get_abstract_mesh().empty)()
    True
    """

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_mesh():
            return fn(*args, **kwargs)

    return run


def eager(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that does as `in_no_mesh` and `require_eager`.

    Args:
      what: Name of the function, for errors.
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
      what: Name of the function, for errors.

    Raises:
      ArgumentError: It is.

    >>> jax.jit(lambda x: require_eager("rep.put"))(1.0)
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `rep.put` must be called outside of `jit`, ...
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
    # In a new thread, which traces nothing: the first caller may be traced.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(get_opaque_trace_state).result()

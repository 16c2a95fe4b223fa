"""Refuse to run a program where JAX traces, or was asked to compile nothing.

What runs on a mesh is compiled and looks at real arrays. Under `jit`, `grad`, `vmap` or
`jax.disable_jit` it would fail deep inside of JAX, or run once where many were meant.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.extend.core import get_opaque_trace_state

from replicator.errors import ArgumentError


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
    if get_opaque_trace_state() != _no_trace():
        raise ArgumentError(
            f"`{what}` must be called outside of `jit`, `grad`, `vmap` and the like, "
            "got a call that JAX traces. Call it directly: it compiles by itself."
        )


@functools.cache
def _no_trace():
    # Whatever is traced where this is asked first: a new thread traces nothing.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(get_opaque_trace_state).result()

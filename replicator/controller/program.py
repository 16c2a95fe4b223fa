"""Functions as dataflows: what `pw.program` returns."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax import core

from replicator.base.types import PyTree
from replicator.controller.dataflow import Dataflow
from replicator.controller.functions import Function, name_of
from replicator.controller.layouts import SliceLayout
from replicator.errors import check_function


class Look(NamedTuple):
    """What a dataflow is traced for, of one leaf of the arguments."""

    shape: tuple[int, ...]
    dtype: Any
    is_weak: bool
    slice: str | None
    layout: SliceLayout | None


class Tracer(Protocol):
    """What a program needs of its controller."""

    def is_tracing(self) -> bool:
        """Return whether a dataflow is being traced in this thread."""
        ...

    def look(self, args: Sequence[PyTree]) -> tuple[list[Any], Any]:
        """Return the leaves of arguments, and what a dataflow is traced for of them."""
        ...

    def traced(
        self, name: str, fn: Callable[..., PyTree], signature: Any, *, fuse: bool
    ) -> Dataflow:
        """Trace and plan a function."""
        ...


class Program:
    """A function as a dataflow: traced for each shape and place of its arguments."""

    def __init__(
        self, tracer: "Tracer", fn: Callable[..., PyTree], *, fuse: bool
    ) -> None:
        check_function("fn", fn)
        self._tracer = tracer
        self._fn = fn
        self._fuse = fuse
        self._dataflows: dict[Any, Dataflow | None] = {}
        self.__name__ = name_of(fn)

    def __call__(self, *args: Any) -> PyTree:
        """Run it; return futures at once.

        A function that needs a value of an op (`float(x)`, `if x > 0:`) is not one
        dataflow: it runs op by op, and waits where it needs the value.
        """
        leaves = jax.tree.leaves(args)
        if self._tracer.is_tracing() or any(
            isinstance(leaf, core.Tracer) for leaf in leaves
        ):
            return self._fn(*args)
        return self.run(*args)

    def run(self, *args: Any) -> PyTree:
        """Run it outside of all traces."""
        leaves, signature = self._tracer.look(args)
        dataflow = self._dataflows.get(signature)
        if dataflow is None and signature not in self._dataflows:
            try:
                dataflow = self._traced(args, signature)
            except (
                jax.errors.ConcretizationTypeError,
                jax.errors.TracerArrayConversionError,
                jax.errors.TracerIntegerConversionError,
            ):
                if isinstance(self._fn, Function):
                    raise
            self._dataflows[signature] = dataflow
        return self._fn(*args) if dataflow is None else dataflow.run(leaves)

    def dataflow(self, *args: Any) -> Dataflow:
        """Trace and plan it for arguments, and run nothing.

        Args:
          *args: Arrays, futures or `jax.ShapeDtypeStruct`s.
        """
        _, signature = self._tracer.look(args)
        found = self._dataflows.get(signature)
        if found is None:
            found = self._dataflows[signature] = self._traced(args, signature)
        return found

    def _traced(self, args: Sequence[PyTree], signature: Any) -> Dataflow:
        return self._tracer.traced(self.__name__, self._fn, signature, fuse=self._fuse)

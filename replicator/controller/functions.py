"""Functions bound to a slice: what `pw.fn` returns."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicator.base.tracebacks import is_library
from replicator.base.types import PyTree
from replicator.controller.future import Future
from replicator.controller.layouts import misfit, unknown_axes
from replicator.controller.slices import Slice
from replicator.controller.step_calls import StepCall, StepTracer
from replicator.controller.tracing.host_calls import HostCall, HostTracer
from replicator.controller.tracing.trace import OpFunction
from replicator.engine.analysis.source_lines import UNKNOWN_LINE
from replicator.engine.compiled_step import CompiledStep
from replicator.errors import ArgumentError, check_count, check_function


class Runner(Protocol):
    """What a function needs of its controller."""

    def is_tracing(self) -> bool:
        """Return whether a dataflow is being traced in this thread."""
        ...

    def register(self, function: OpFunction) -> str:
        """Return the name by which equations name a function."""
        ...

    def program(self, fn: Callable[..., PyTree]) -> Any:
        """Return a function as a `Program`, whose file imports this one."""
        ...


class Function:
    """A function that runs on a slice; each call in a dataflow is an op.

    A call outside of one is a dataflow of one op, and returns futures at once.

    Attributes:
      slice: Where it runs.
    """

    def __init__(
        self,
        runner: Runner,
        fn: Callable[..., PyTree],
        on: Slice,
        *,
        in_specs: PyTree = None,
        out_specs: PyTree = None,
        donate: int | Sequence[int] = (),
        is_host: bool = False,
        host_result: PyTree = None,
    ) -> None:
        check_function("f", fn)
        self.slice = on
        self._runner = runner
        self._in_specs = in_specs
        self._ops: list[OpFunction] = []
        self.__name__ = self._label = name_of(fn)
        self._alone = runner.program(self)
        if is_host:
            register = functools.partial(self._register, line=definition_of(fn))
            self._traced = HostTracer(fn, self._label, host_result, on, register)
            return
        positions = _positions(donate)
        if isinstance(fn, CompiledStep):
            _check_bare(in_specs, out_specs, positions)
            self._label = "step"
            self._traced = StepTracer(fn, on, self._register)
            return
        name = self._register(line=definition_of(fn))

        @functools.wraps(fn)
        def run(*args: Any) -> PyTree:
            results = fn(*args)
            if not jax.tree.leaves(results):
                raise ArgumentError(
                    f"`fn` must return arrays, got {results!r} from `{self._label}`. "
                    "Return what it computes."
                )
            self._check("out_specs", out_specs, results)
            return results

        run.__name__ = run.__qualname__ = name
        try:
            self._traced: Callable[..., PyTree] = jax.jit(
                run,
                donate_argnums=positions,
                in_shardings=self._shardings("in_specs", in_specs),
                out_shardings=self._shardings("out_specs", out_specs),
            )
        except ArgumentError:
            raise
        except ValueError as error:  # of JAX, which looks at the signature
            raise ArgumentError(
                f"`donate` must be positions of arguments of `{self._label}`, got "
                f"{donate}: it takes fewer. Count from 0."
            ) from error

    def __call__(self, *args: Any) -> PyTree:
        """Run it on its slice.

        Args:
          *args: Trees of arrays, or of futures.

        Returns:
          What the function returns; futures, outside of a dataflow.

        Raises:
          ArgumentError: JAX traces the call, and no `pw.program` does.
        """
        leaves = jax.tree.leaves(args)
        if self._runner.is_tracing():
            if any(isinstance(leaf, Future) for leaf in leaves):
                raise ArgumentError(
                    f"op `{self._label}` must be called with the dataflow's values, "
                    "got a future from outside. Pass it to the dataflow."
                )
            self._check("in_specs", self._in_specs, args)
            return self._traced(*args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise ArgumentError(
                f"op `{self._label}` must be called by a dataflow of its own `pw`, got "
                "a call that JAX traces outside of one. Decorate the function that "
                "calls `jax.grad`, `jax.vmap` or the like by `pw.program`."
            )
        return self._alone.run(*args)

    def _register(
        self, step: StepCall | HostCall | None = None, line: str = UNKNOWN_LINE
    ) -> str:
        """Return the name of its equations; the controller keeps no function alive."""
        self._ops.append(
            OpFunction(label=self._label, slice=self.slice, line=line, step=step)
        )
        return self._runner.register(self._ops[-1])

    def __repr__(self) -> str:
        """Return its name and slice."""
        return f"<op {self._label} on {self.slice}>"

    def _shardings(self, name: str, specs: PyTree) -> PyTree:
        def sharding(spec: PartitionSpec | None) -> NamedSharding | None:
            if spec is None:
                return None
            if not isinstance(spec, PartitionSpec):
                raise ArgumentError(
                    f"`{name}` must be partition specs, got {spec!r}. Use "
                    "`jax.sharding.PartitionSpec`."
                )
            if unknown := unknown_axes(spec, self.slice.axes):
                raise ArgumentError(
                    f"`{name}` must name axes of {self.slice}, which are "
                    f"{list(self.slice.axes)}, got {spec}. Make the slice with "
                    f"`axes={{{unknown[0]!r}: ...}}`, or change the spec."
                )
            return NamedSharding(self.slice.mesh, spec)

        return jax.tree.map(sharding, specs, is_leaf=_is_spec)

    def _check(self, name: str, specs: PyTree, tree: PyTree) -> None:
        """Refuse arrays that their specs do not divide."""

        def check(spec: PartitionSpec | None, arrays: PyTree) -> None:
            if spec is None:
                return
            for leaf in jax.tree.leaves(arrays):
                shape = jnp.shape(leaf)
                if why := misfit(spec, self.slice.axes, shape):
                    raise ArgumentError(
                        f"`{name}` of op `{self._label}` must fit an array of shape "
                        f"{list(shape)}, got {spec}: {why}. Change the spec, or the "
                        "shape."
                    )

        try:
            jax.tree.map(check, specs, tree, is_leaf=_is_spec)
        except ArgumentError:
            raise
        except ValueError as error:  # of JAX: no prefix of the tree
            raise ArgumentError(
                f"`{name}` of op `{self._label}` must be a spec, or a prefix of the "
                f"tree that it is for, got {specs}. Pass a spec, or a tree of them, "
                f"for each of {jax.tree.structure(tree)}."
            ) from error


def _check_bare(in_specs: PyTree, out_specs: PyTree, donate: tuple[int, ...]) -> None:
    if (in_specs, out_specs, donate) != (None, None, ()):
        raise ArgumentError(
            "`in_specs`, `out_specs` and `donate` must be left out for a step of "
            f"`rep.compile`, got {in_specs}, {out_specs} and {donate}. It has the "
            "layouts of its strategy, and donates its state."
        )


def _positions(donate: int | Sequence[int]) -> tuple[int, ...]:
    positions = tuple(donate) if isinstance(donate, Iterable) else (donate,)
    for each in positions:
        check_count("donate", each, "Pass positions of arguments.", least=0)
    return positions


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def definition_of(fn: Callable[..., PyTree]) -> str:
    """Return the line of the user's at which a function is defined."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None or is_library(code.co_filename):
        return UNKNOWN_LINE
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def name_of(fn: Callable[..., PyTree]) -> str:
    """Return the name of a function, for people."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__).strip("<>")

"""Problems: a step, its first state and the shapes of a batch, by a function of a file.

    def problem(rep):
        optimizer = rep.wrap_optimizer(optax.adam(1e-3))
        ...
        batch = {"image": jax.ShapeDtypeStruct((2048, 28, 28), jnp.float32)}
        return step_fn, init_fn, batch

It gets the `Replicator` that the step is for, and reads no data.
"""

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.trees import named_leaves
from replicator.base.types import InitFn, PyTree, StepFn
from replicator.errors import ArgumentError, ReplicatorError, check_function

_LARGEST_INTEGER = 8  # of those that a batch holds: classes and tokens are that many

ProblemFn = Callable[[Any], tuple[StepFn, InitFn, PyTree]]
"""A function of a `Replicator` that returns `step_fn`, `init_fn` and a batch."""


class Problem(NamedTuple):
    """A step to compile.

    Attributes:
      step_fn: Step of one replica.
      init_fn: Makes the first state.
      batch: `jax.ShapeDtypeStruct`s of one global batch.
    """

    step_fn: StepFn
    init_fn: InitFn
    batch: PyTree

    @property
    def examples(self) -> int:
        """Number of examples of the batch."""
        return jax.tree.leaves(self.batch)[0].shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemFile:
    """Place of a function that returns a problem.

    Attributes:
      path: Path of its file.
      function: Its name in there.
    """

    path: str
    function: str

    @classmethod
    def from_text(cls, text: str) -> "ProblemFile":
        """Return the place that `FILE:FUNCTION` names.

        Raises:
          ArgumentError: There is no such file, or no function is named.
        """
        path, colon, function = text.rpartition(":")
        is_file = path.endswith(".py") and Path(path).is_file()
        if not colon or not function.isidentifier() or not is_file:
            raise ArgumentError(
                "`FILE:FUNCTION` must name a Python file that is there, and a function "
                f"in it, got {text!r}. Write `train.py:problem`."
            )
        return cls(path=os.path.abspath(path), function=function)

    def load(self) -> ProblemFn:
        """Import the file, as `python FILE` would but for its main part.

        Raises:
          ArgumentError: It has no such function.
        """
        # As for a script, and for one of a package that is run from above it.
        sys.path[:0] = [os.path.dirname(self.path), os.getcwd()]
        name = f"problem_of_{Path(self.path).stem}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        assert spec is not None, "a Python file"
        assert spec.loader is not None, "a Python file"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        function: ProblemFn | None = getattr(module, self.function, None)
        if not callable(function):
            raise ArgumentError(
                f"`FILE:FUNCTION` must name a function of {self.path}, got "
                f"{self.function!r}. Write `def {self.function}(rep)` there."
            )
        return function


def function_of(problem: ProblemFile | ProblemFn) -> ProblemFn:
    """Return the function of a problem, from its file if it is a place.

    Raises:
      ArgumentError: The file cannot be imported, or has no such function.
    """
    if not isinstance(problem, ProblemFile):
        return problem
    try:
        return problem.load()
    except ArgumentError:
        raise
    except Exception as failure:
        raise ArgumentError(
            f"`FILE:FUNCTION` must be of a file that can be imported, got "
            f"{type(failure).__name__}: {failure}. Run `python {problem.path}`."
        ) from failure


def at_small_sizes(function: Callable[..., Any]) -> ProblemFn:
    """Return the function of a problem's small sizes.

    Args:
      function: Takes `rep` and `small`.

    Raises:
      ArgumentError: It does not take `small`.
    """
    if "small" not in inspect.signature(function).parameters:
        raise ArgumentError(
            "`problem` must take `small` to be rehearsed, got one that takes "
            f"{inspect.signature(function)}. Write `def problem(rep, small=False)`, "
            "and small sizes where it is True."
        )
    return functools.partial(function, small=True)


def problem_from(function: ProblemFn, rep: Any) -> Problem:
    """Return the problem that a function makes for a `Replicator`.

    Args:
      function: Takes `rep`; returns `step_fn`, `init_fn`, and a batch of arrays or
        `jax.ShapeDtypeStruct`s.
      rep: The `Replicator`.

    Raises:
      ArgumentError: It takes something else, fails, or returns something else.
    """
    check_function("problem", function, "rep")
    try:
        found: Any = function(rep)
    except ReplicatorError:
        raise
    except Exception as failure:
        raise ArgumentError(
            "`problem` must return a step without reading data, got "
            f"{type(failure).__name__}: {failure}, at {_line(failure)}. Return "
            "`jax.ShapeDtypeStruct`s in place of a batch."
        ) from failure
    if not isinstance(found, tuple) or len(found) != 3:
        raise ArgumentError(
            "`problem` must return a tuple of step_fn, init_fn and the shapes of a "
            f"batch, got {found!r:.80}. Return these three."
        )
    step_fn, init_fn, batch = found
    check_function("step_fn", step_fn, "state, batch", "state, batch, key")
    check_function("init_fn", init_fn, "key")
    return Problem(step_fn, init_fn, _shapes(batch))


def random_batch(shapes: PyTree, *, seed: int) -> PyTree:
    """Return a batch of random numbers.

    Floats are from 0 to 1, so that weights of examples are weights; bytes are any;
    other integers are below 8, as they may be classes.

    >>> shapes = {"label": jax.ShapeDtypeStruct((4,), "int32")}
    >>> bool((random_batch(shapes, seed=0)["label"] < 8).all())
    True
    """
    draw = np.random.default_rng(seed)

    def drawn(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.asarray(draw.random(leaf.shape), leaf.dtype)
        is_bool = leaf.dtype == np.bool_
        largest = 2 if is_bool else _LARGEST_INTEGER
        if leaf.dtype == np.uint8:
            largest = 256
        return draw.integers(largest, size=leaf.shape).astype(leaf.dtype)

    return jax.tree.map(drawn, shapes)


def _shapes(batch: PyTree) -> PyTree:
    # JAX warns of an iterator that it takes for a leaf.
    leaves = named_leaves(batch, is_leaf=lambda node: hasattr(node, "__next__"))
    wrong = [
        (path, leaf)
        for path, leaf in leaves
        if not getattr(leaf, "shape", ()) or not hasattr(leaf, "dtype")
    ]
    if wrong or not leaves:
        path, leaf = wrong[0] if wrong else ("", batch)
        where = f" at `{path}`" if path else ""
        raise ArgumentError(
            "`problem` must return a batch of arrays or `jax.ShapeDtypeStruct`s with a "
            f"leading axis of examples, got {leaf!r:.80}{where}. Write `{{'x': "
            "jax.ShapeDtypeStruct((256, 784), 'float32')}`."
        )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def _line(failure: Exception) -> str:
    frame = traceback.extract_tb(failure.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"

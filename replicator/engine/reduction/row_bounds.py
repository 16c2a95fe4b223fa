"""Find in a step's jaxpr how many rows of a gradient may differ from zero.

The gradient of an embedding adds rows into zeros, as many as were looked up. The step
is traced once by itself, with a marker on each gradient that a rule adds up by rows;
from zeros and additions the number of rows follows. It is dense where the table is
multiplied too, or where the walk does not know an operation.
"""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.extend import core

from replicator.base.types import Key, PyTree
from replicator.collectives.context.axes import num_replicas
from replicator.collectives.markers import MARKERS, make_marker
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.evaluator import CALLS, REMAT
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.optimizer_state import OwnSums, optimizer_states

DENSE = math.inf
"""Number of rows where it is not known."""

_ROW_GRADIENT = "row_gradient"
_row_gradient_p = make_marker(_ROW_GRADIENT)


@dataclasses.dataclass(frozen=True, eq=False)
class _Bounds:
    """Rows by path; compared by identity: as a key of a trace cache it is of one trace.

    Attributes:
      rows: Number of rows by path; None while they are asked for.
    """

    rows: dict[str, int] | None


_here = jax.make_user_context(None)


def bounds_known(
    step: KeyedStep, state: PyTree, batch: PyTree, key: Key | None, *, accumulate: int
) -> AbstractContextManager[None]:
    """Find the rows of gradients, for what is traced inside a `with` block.

    Args:
      step: Any keyed step.
      state: The state.
      batch: The batch of an update, with a leading axis of microbatches if there are
        several.
      key: The key of the step.
      accumulate: Number of microbatches per update.
    """
    optimizers = optimizer_states(state)
    by_rows = {
        path: accumulate
        * (each.pending.every if isinstance(each.pending, OwnSums) else 1)
        for each in optimizers
        if each.synchroniser
        for path in each.synchroniser.paths
        if each.synchroniser.strategy.method_of(path).synchronise == "rows"
    }
    if not by_rows or num_replicas() == 1:
        return nullcontext()

    def once(state: PyTree, batch: PyTree, key: Key | None) -> tuple:
        one = jax.tree.map(lambda leaf: leaf[0], batch) if accumulate > 1 else batch
        return step(state, one, key)

    with asking():
        closed = jax.make_jaxpr(once)(state, batch, key)
    found = rows_of(closed.jaxpr)
    return _here(
        _Bounds(
            {
                path: int(found[path] * many)
                for path, many in by_rows.items()
                if found.get(path, DENSE) < DENSE
            }
        )
    )


def asking() -> AbstractContextManager[None]:
    """Mark gradients by `mark_rows` in what is traced inside a `with` block."""
    return _here(_Bounds(None))


def bound_of(path: str) -> int | None:
    """Return the most rows of a gradient that are not zero; None if it is dense.

    >>> bound_of("params/embedding")                     # outside of a step
    """
    known = _here.value
    return known.rows.get(path) if known and known.rows else None


def mark_rows(gradients: PyTree, paths: Sequence[str], *, part: int = 0) -> PyTree:
    """Return gradients, marked by their paths if their rows are asked for.

    Args:
      gradients: One tree like the parameters.
      paths: Path of each leaf.
      part: Number of the sum whose gradients these are.
    """
    if _here.value is None or _here.value.rows is not None:
        return gradients
    leaves, structure = jax.tree.flatten(gradients)
    return structure.unflatten(
        _row_gradient_p.bind(leaf, name=path, part=part)
        for path, leaf in zip(paths, leaves, strict=True)
    )


def rows_of(jaxpr: core.Jaxpr) -> dict[str, float]:
    """Return the most rows of each marked gradient, by its path."""
    rules = _RowRules()
    dataflow.flow(jaxpr, [DENSE] * len(jaxpr.invars), rules)
    total: dict[str, float] = {}
    for (name, _), rows in rules.found.items():  # parts add up
        total[name] = total.get(name, 0) + rows
    return total


@dataclasses.dataclass(frozen=True)
class _RowRules(dataflow.Rules[float]):
    """Rules for the number of slices along the first axis that are not zero.

    Attributes:
      found: Rows of marked gradients, by path and part.
    """

    clean = DENSE

    found: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)

    def literal(self, atom: core.Literal) -> float:
        return DENSE if np.any(np.asarray(atom.val)) else 0

    def join(self, marks: Sequence[float]) -> float:
        return max(marks, default=DENSE)

    def decide(self, eqn: core.JaxprEqn, marks: Sequence[float]) -> list[float] | None:
        name = eqn.primitive.name
        if name in CALLS or name in REMAT or name == "cond":
            return None  # walk into it
        if name == _ROW_GRADIENT:
            place = eqn.params["name"], eqn.params["part"]
            self.found[place] = max(marks[0], self.found.get(place, 0))
        return [_rows_after(eqn, marks)] * len(eqn.outvars)


def _rows_after(eqn: core.JaxprEqn, marks: Sequence[float]) -> float:
    """Return the rows of a result that are not zero, or NaN."""
    name = eqn.primitive.name
    if name in _ZERO_OF_ZEROS or name in MARKERS or name == _ROW_GRADIENT:
        return marks[0]
    if name in _SUMS:
        return sum(marks)
    if name == "mul":
        return min(marks)
    if name == "select_n":
        return sum(marks[1:])
    if name == "broadcast_in_dim":
        return 0 if marks[0] == 0 else DENSE
    if name in ("scatter-add", "scatter_add"):
        return marks[0] + _rows_written(eqn)
    return DENSE


_SUMS = frozenset({"add", "add_any", "sub"})
# Functions of the first operand, place by place, that keep zeros.
_ZERO_OF_ZEROS = frozenset(
    {"convert_element_type", "copy", "copy_p", "div", "neg", "reduce_precision"}
)


def _rows_written(eqn: core.JaxprEqn) -> float:
    """Return how many rows a scatter writes at most: one for each of its indices."""
    numbers: Any = eqn.params["dimension_numbers"]
    by_row = 0 in numbers.inserted_window_dims
    if not by_row or numbers.operand_batching_dims:
        return DENSE
    return math.prod(dataflow.shape_of(eqn.invars[1])[:-1])

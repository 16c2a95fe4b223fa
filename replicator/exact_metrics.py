"""Refuse the metrics of an evaluation that would silently not be exact.

Each block of examples may end in rows that only fill up. A metric counts every example
once if it has one row per example (then the host weighs the rows), or if what it says
of the block follows from the block's mask: a walk over the program's jaxpr tells.
"""

from typing import NamedTuple

import jax
from jax.extend import core

from replicator import dataflow
from replicator.errors import ArgumentError
from replicator.inputs.remainder import MASK
from replicator.mesh import REPLICA_AXIS
from replicator.metrics import Max, Mean, Metric, Sum, is_metric
from replicator.protocols import PyTree
from replicator.source_lines import user_line
from replicator.trees import describe, named_leaves

DATA_MARK: frozenset[int] = frozenset({0})
MASK_MARK: frozenset[int] = frozenset({1})


def refuse_collectives(jaxpr: core.Jaxpr) -> None:
    """Refuse to mix blocks: which ones run side by side depends on the replicas.

    Raises:
      ArgumentError: There is a collective; names it and the user's line.
    """
    found = dataflow.find_equation(
        jaxpr, lambda eqn: dataflow.is_collective(eqn, REPLICA_AXIS)
    )
    if found is not None:
        raise ArgumentError(
            f"`eval_fn` must not speak to other replicas, got `{found.primitive.name}` "
            f"at {user_line(found)}. Return what one replica finds: metrics are merged."
        )


def check_exact(
    metrics: PyTree,
    *,
    doubled: PyTree,
    block: int,
    marks: list[frozenset[int]],
) -> None:
    """Check every metric that a block reports.

    Args:
      metrics: Shapes with an axis of blocks in front.
      doubled: The same where blocks have twice the examples: an axis of examples is one
        that grows with them, not one that happens to be as long.
      block: Examples per block.
      marks: Per leaf of `metrics`, `DATA_MARK` and `MASK_MARK` by what it follows from.

    Raises:
      ArgumentError: A metric could not be merged exactly.
    """
    others = jax.tree.leaves(doubled)
    for path, metric in named_leaves(metrics, is_leaf=is_metric):
        own = jax.tree.leaves(metric)
        leaves = [
            _Leaf(
                text=describe(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)),
                scalar=leaf.ndim == 1,
                by_row=leaf.shape[1:2] == (block,) and other.shape[1:2] == (2 * block,),
                data=mark >= DATA_MARK,
                mask=mark >= MASK_MARK,
            )
            for leaf, other, mark in zip(own, others, marks, strict=False)
        ]
        others, marks = others[len(own) :], marks[len(own) :]
        if is_metric(metric):
            _check_declared(path, metric, leaves)
        else:
            _check_plain(path, *leaves)


class _Leaf(NamedTuple):
    """What is known of one array of a metric, before anything runs."""

    text: str  # its dtype and shape in one block
    scalar: bool
    by_row: bool  # has one row per example
    data: bool  # follows from the batch
    mask: bool  # follows from the batch's mask


def _check_plain(path: str, leaf: _Leaf) -> None:
    if not leaf.by_row:
        raise ArgumentError(
            "`eval_fn` must return one row per example for a plain metric, got "
            f"{leaf.text} for `{path}`. Leave the mean over examples to the "
            "evaluation, or declare it: `Mean(value, weight)`, `Sum` or `Max`."
        )


def _check_declared(path: str, metric: Metric, leaves: list[_Leaf]) -> None:
    kind = type(metric).__name__
    for leaf in leaves:
        if leaf.by_row:
            raise ArgumentError(
                f"`eval_fn` must reduce `{path}`, a `{kind}`, over its examples, got "
                f"{leaf.text}. Return the array itself for its mean over examples."
            )
    if isinstance(metric, Mean):
        _check_weight(path, leaves[1:])
    if isinstance(metric, Max):
        return  # padding repeats examples that are there, so it changes no maximum
    must_read = leaves if isinstance(metric, Sum) else [x for x in leaves if x.data]
    if not all(leaf.mask for leaf in must_read):
        _refuse_unmasked(path, kind)


def _check_weight(path: str, weight: list[_Leaf]) -> None:
    if not weight or not weight[0].scalar:
        raise ArgumentError(
            f"`eval_fn` must give `{path}`, a `Mean`, a scalar weight, got "
            f"{weight[0].text if weight else None}. Write how many examples stand "
            f'behind it: `Mean(value, batch["{MASK}"].sum())`.'
        )
    if not weight[0].mask:
        _refuse_unmasked(path, "Mean")


def _refuse_unmasked(path: str, kind: str) -> None:
    raise ArgumentError(
        f'`eval_fn` must weight `{path}`, a `{kind}`, by `batch["{MASK}"]`, which is 0 '
        "for rows that only fill up, got no use of it. Multiply by it, or return one "
        "row per example."
    )

"""Refuse a padded batch if its padding would change the state of a step.

A metric that reads the mask is not enough: the gradients that an optimizer gets must
follow from it, leaf by leaf, if they follow from the batch at all. For a state without
a wrapped optimizer its own leaves must.
"""

from collections.abc import Sequence

import jax
from jax.extend import core

from replicator.base.per_replica import declared_leaves
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.collectives.markers import REDUCED_GRADIENT
from replicator.engine.analysis import dataflow
from replicator.errors import BatchError
from replicator.inputs.placement import Placed
from replicator.inputs.remainder import MASK

_DATA, _MASK = 0, 1


def without_mask(jaxpr: core.Jaxpr, state: PyTree, batch: PyTree) -> str | None:
    """Name a result of a program that reads the batch and not its mask.

    Args:
      jaxpr: The program; its inputs are state, batch and key.
      state: Its state.
      batch: Its batch.

    Returns:
      For example "gradients of `params/w`"; None if there is no such result.
    """
    marks = [frozenset()] * len(jaxpr.invars)
    before = len(jax.tree.leaves(state))
    for place, (path, _) in enumerate(named_leaves(batch)):
        is_mask = path.partition("/")[0] == MASK
        marks[before + place] = frozenset({_MASK if is_mask else _DATA})
    rules = _Gradients()
    after = dataflow.flow(jaxpr, marks, rules)
    if any(_DATA in mark for mark in rules.read.values()):
        careless = (n for n, mark in rules.read.items() if mark == {_DATA})
        return next((f"gradients of `{name}`" for name in careless), None)
    shared = [
        mark
        for mark, (_, declared) in zip(after, declared_leaves(state), strict=False)
        if not declared
    ]
    for what, found in {"a state": shared, "metrics": after}.items():
        read = dataflow.DependsOn().join(found)
        if _DATA in read:
            return None if _MASK in read else what
    return None


def refuse_padding(batch: Placed, what: str) -> None:
    """Refuse a padded batch.

    Args:
      batch: The batch.
      what: Result of `without_mask`.

    Raises:
      BatchError: Always.
    """
    raise BatchError(
        f'`step_fn` must read `batch["{MASK}"]` where a batch is padded, got '
        f"{batch.examples} examples at batch {batch.index} and {what} computed without "
        "it. Weight the loss by it, or drop the remainder: "
        "`InputOptions(remainder='drop')`."
    )


class _Gradients(dataflow.DependsOn):
    """Rules that note the dependences of the gradients that optimizers get."""

    def __init__(self) -> None:
        self.read: dict[str, frozenset[int]] = {}

    def decide(self, eqn: core.JaxprEqn, marks: Sequence[frozenset[int]]) -> None:
        if eqn.primitive.name == REDUCED_GRADIENT:
            name = eqn.params["name"]
            self.read[name] = self.read.get(name, self.clean) | self.join(marks)

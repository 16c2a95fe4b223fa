"""Find the counters of a state, and tell which count updates and which microbatches.

A counter is a scalar that adds something to itself. Most count updates. Two kinds move
with the microbatches, though they read nothing of the batch: one whose new value weighs
what the batch moves (`count` in `mean + (x - mean) / count`), and one that adds how
many examples there are (`seen + len(x)`), which is a constant to a traced step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from replicator.base.types import PyTree
from replicator.engine.analysis import dataflow


class Counter(NamedTuple):
    """A scalar of the state that adds something to itself.

    Attributes:
      meaning: Of the equation that adds; see `meaning`.
      added: What it adds, if that is a constant.
    """

    meaning: tuple
    added: Any


def find_counters(variables: Sequence[Any], jaxpr: core.Jaxpr) -> dict[int, Counter]:
    """Return the counters among some outputs of `jaxpr`, by their place."""
    found = {}
    for place, variable in enumerate(variables):
        if variable.aval.shape == ():
            eqns = dataflow.computing(jaxpr, variable)
            # Of several programs, as a branch has, nobody knows which one runs.
            is_known = all(len(dataflow.sub_jaxprs(each)) == 1 for each in eqns[:-1])
            if is_known and eqns and eqns[-1].primitive.name in ("add", "sub"):
                eqn = eqns[-1]
                constants = [x.val for x in eqn.invars if isinstance(x, core.Literal)]
                added = constants[0].item() if constants else None
                found[place] = Counter(meaning(eqn), added)
    return found


def count_examples(
    counters: Mapping[int, Counter],
    batch: PyTree,
    trace: Callable[[PyTree], Mapping[int, Counter]],
) -> set[int]:
    """Return which counters add more where a batch has more examples.

    Args:
      counters: By place.
      batch: One microbatch; arrays or shapes.
      trace: Returns the counters of the step on another batch. It is asked only where a
        counter adds a constant that is not 1.
    """
    asked = [n for n, each in counters.items() if each.added not in (None, 1, -1)]
    if not asked:
        return set()
    doubled = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (2 * leaf.shape[0], *leaf.shape[1:]), leaf.dtype
        ),
        batch,
    )
    try:
        found = trace(doubled)
    except Exception as failure:
        failure.add_note(
            "`step_fn` was traced with twice the examples of a microbatch, to see "
            "which counters of the state count examples."
        )
        raise
    return {n for n in asked if n in found and found[n].added != counters[n].added}


def meaning(eqn: core.JaxprEqn) -> tuple:
    """Return what is equal for equations that compute the same, if written twice."""
    operands = [
        ("literal", str(atom.val)) if isinstance(atom, core.Literal) else id(atom)
        for atom in eqn.invars
    ]
    return (eqn.primitive.name, *operands)

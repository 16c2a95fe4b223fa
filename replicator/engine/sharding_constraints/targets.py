"""Follow the partitions wanted for gradients back from new state.

A target goes from a result of the program back to the products that make it, as far as
values only move or add up on the way, also through calls and loops.
"""

from collections.abc import Sequence

from jax.extend import core

from replicator.engine.analysis.dataflow import scan_sizes
from replicator.engine.analysis.evaluator import CALLS, REMAT, held_program
from replicator.engine.sharding_constraints.moves import backward
from replicator.strategies.rule import Cut

BARRIER = "optimization_barrier"

Targets = Sequence[Cut | None]


def wanted_cuts(jaxpr: core.Jaxpr, targets: Targets) -> dict[core.Var, Cut]:
    """Follow targets back from results, as far as values only move or add up."""
    wanted: dict[core.Var, Cut] = {}

    def want(atom: core.Var | core.Literal, cut: Cut | None) -> None:
        # Only arrays: numbers have no partition.
        if cut and not isinstance(atom, core.Literal):
            wanted.setdefault(atom, cut)

    for atom, cut in zip(jaxpr.outvars, targets, strict=True):
        want(atom, cut)
    for eqn in reversed(jaxpr.eqns):
        cuts = [wanted.get(var) for var in eqn.outvars]
        if any(cut is not None for cut in cuts):
            for atom, cut in zip(eqn.invars, _before(eqn, cuts), strict=True):
                want(atom, cut)
    return wanted


def _before(eqn: core.JaxprEqn, cuts: Targets) -> list[Cut | None]:
    """Return the targets of an equation's operands from those of its results."""
    name = eqn.primitive.name
    none: list[Cut | None] = [None] * len(eqn.invars)
    if name == BARRIER:
        return list(cuts)
    if name in CALLS or name in REMAT:
        held = held_program(eqn)
        return none if held is None else _inside(held, cuts)
    if name == "scan":
        num_consts, num_carry = scan_sizes(eqn)
        rows = [cut[1:] if cut and cut[0] is None else None for cut in cuts[num_carry:]]
        found = _inside(eqn.params["jaxpr"], [*cuts[:num_carry], *rows])
        start = num_consts + num_carry
        carried = [a or b for a, b in zip(cuts, found[num_consts:start], strict=False)]
        return [
            *found[:num_consts],
            *carried,
            *(None if cut is None else (None, *cut) for cut in found[start:]),
        ]
    if name == "while":
        start = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return [*none[:start], *cuts]
    if name == "cond":
        ways = [_inside(way, cuts) for way in eqn.params["branches"]]
        return [
            None,
            *(next(filter(None, way), None) for way in zip(*ways, strict=True)),
        ]
    if len(cuts) == 1 and cuts[0] is not None:
        return [backward(eqn, atom, cuts[0]) for atom in eqn.invars]
    return none


def _inside(closed: core.ClosedJaxpr, cuts: Targets) -> list[Cut | None]:
    wanted = wanted_cuts(closed.jaxpr, cuts)
    return [wanted.get(var) for var in closed.jaxpr.invars]

"""Prove, before a step runs, that the state it returns is equal on every replica.

`shard_map(check_vma=False)` runs user code as pmap did, and proves nothing. This walk
over the step's jaxpr does: the batch, declared per-replica leaves and `axis_index` vary
over replicas; full reductions and gathers stop that; everything else passes it on
(design law 2). A collective that only some replicas may reach is refused. The walk also
finds other errors between replicas: random numbers that all share and each should have
its own (`shared_noise`), a local sum or its count that was reduced already, global
losses that are used as if each replica had its own, and weights of gradients that
passed between replicas: cotangents of other replicas' losses are in them, each scaled
by a weight that is not this one's.
"""

import dataclasses
import math
from collections.abc import Sequence

from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS
from replicator.collectives.assume_replicated import ASSUME_REPLICATED
from replicator.collectives.markers import (
    GIVEN_GRADIENT,
    GLOBAL,
    LOCAL_SUM,
    REDUCED_GRADIENT,
    WEIGHTED_GRADIENT,
)
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.marks import (
    BATCH,
    CLEAN,
    DECLARED,
    STATE,
    Mark,
    Origin,
    Reduced,
    join,
)
from replicator.engine.analysis.shared_noise import SOURCES, SharedNoise
from replicator.engine.analysis.source_lines import (
    NestedRules,
    innermost_line,
    user_line,
)
from replicator.engine.analysis.summed_gradients import refuse_summed
from replicator.errors import ReplicationError

__all__ = ["BATCH", "CLEAN", "DECLARED", "STATE", "Mark", "prove_replicated"]

_REDUCTIONS = frozenset(
    {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
)
# These return bits of their operands: groups that begin with equal ones end with equal.
_EXACT = _REDUCTIONS - {"psum", "psum_invariant"}
# Their results are not functions of their inputs: each device gets its own.
_IMPURE = frozenset(
    {"rng_uniform", "io_callback", "infeed", "empty", "empty2", "empty_ref"}
)


@dataclasses.dataclass(frozen=True)
class _ReplicationRules(NestedRules[Mark]):
    """Rules for values that vary over replicas, and equations that make them agree.

    Attributes:
      noise: Random numbers found.
      num_replicas: Number of replicas, if that is known.
      everyone: Number of all examples, if no replica counts as many.
      counted: Number of summands of each sum so far.
      given: Whether each gradient that optimizers were given varies.
    """

    clean = CLEAN

    noise: SharedNoise
    num_replicas: int | None
    everyone: int | None = None
    counted: set[int] = dataclasses.field(default_factory=set)
    given: set[bool] = dataclasses.field(default_factory=set)

    def join(self, marks: Sequence[Mark]) -> Mark:
        return join(marks)

    def decide(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> list[Mark] | None:
        name, outs = eqn.primitive.name, len(eqn.outvars)
        if name in _MARKERS:
            return [self._pass_marker(eqn, marks)]
        if dataflow.over_axis(eqn, REPLICA_AXIS):
            return [self._collect(eqn, marks)] * outs
        if name in _IMPURE or eqn.params.get("has_side_effect"):
            return [Mark(varying=self._origin(eqn))] * outs
        if name in _TOTALS and not dataflow.shape_of(eqn.outvars[0]):
            self.counted.add(math.prod(dataflow.shape_of(eqn.invars[0])))
        mark = None
        if name in SOURCES:
            mark = self.noise.draw(eqn, marks, self._origin(eqn))
        elif any([mark.noise for mark in marks]):
            mark = self.noise.through(eqn, marks)
        elif name == "mul" and any([mark.reduced for mark in marks]):
            mark = _multiplied(eqn, self.join(marks))
        return None if mark is None else [mark] * outs

    def check_branch(self, eqn: core.JaxprEqn, predicate: Mark) -> None:
        """Refuse a collective that only some replicas may reach: it would never end."""
        if predicate.varying is None:
            return
        for sub in dataflow.sub_jaxprs(eqn):
            if found := dataflow.find_collective(sub, REPLICA_AXIS):
                way = _WAYS.get(eqn.primitive.name, f"`{eqn.primitive.name}`")
                line = user_line(found, caller=self.line_of(eqn))
                raise ReplicationError(
                    f"`{found.primitive.name}` at {line} must be reached by all "
                    f"replicas, got a {way} that may differ between them (it "
                    f"depends on {predicate.varying.what}). Reduce the condition with "
                    "`replicator.all_reduce` first."
                )

    def _origin(self, eqn: core.JaxprEqn) -> Origin:
        return Origin(eqn.primitive.name, self.line_of(eqn))

    def _collect(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> Mark:
        """Return the mark of the result of an equation over the replicas."""
        name = eqn.primitive.name
        joined = self.join(marks)
        backward = self.is_backward(eqn)
        if name in _REDUCTIONS:
            self.noise.reduce(marks)
        carried = joined.carried
        if name != "axis_index" and backward:
            carried = self._origin(eqn)
        if not joined.varying and self._is_bijective(eqn):
            return joined._replace(carried=carried)
        groups = eqn.params.get("axis_index_groups")
        if name not in _REDUCTIONS or (
            # Groups agree within, not with each other.
            groups is not None and (joined.varying or name not in _EXACT)
        ):
            return Mark(varying=self._origin(eqn), carried=carried)
        if backward:
            return Mark(carried=carried)
        # Anywhere: JAX takes an equation that is the same in all turns out of a loop,
        # and out of the scope of the loss.
        return Mark(reduced=Reduced(self._origin(eqn)))

    def _is_bijective(self, eqn: core.JaxprEqn) -> bool:
        """Return whether every replica sends to one, and every one receives."""
        if eqn.primitive.name != "ppermute" or self.num_replicas is None:
            return False
        everyone = set(range(self.num_replicas))
        return all(
            set(side) == everyone for side in zip(*eqn.params["perm"], strict=True)
        )

    def _pass_marker(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> Mark:
        """Look at a value that we named ourselves; return its mark."""
        name = eqn.primitive.name
        if name == ASSUME_REPLICATED:
            return CLEAN
        mark = marks[0]
        if name == LOCAL_SUM:
            number = _number(eqn.invars[1])
            # An example may have as many numbers as there are replicas.
            if number == self.everyone and number not in (None, *self.counted):
                raise _not_local("count of", Origin("psum", self.line_of(eqn)))
            _check_local(mark, marks[1], number)
        if name == GLOBAL and mark.varying:
            raise _not_global(mark.varying)
        if name == GIVEN_GRADIENT:
            self.given.add(mark.varying is not None)
        if name == REDUCED_GRADIENT:
            return mark if mark.varying else mark._replace(reduced=None)
        if name == WEIGHTED_GRADIENT:
            if mark.carried and marks[1].varying:
                raise _weight_varies(mark.carried)
            self.noise.reduce(marks[:1])
        return mark


_MARKERS = frozenset(
    {
        *(ASSUME_REPLICATED, LOCAL_SUM, GLOBAL),
        *(GIVEN_GRADIENT, WEIGHTED_GRADIENT, REDUCED_GRADIENT),
    }
)
_TOTALS = frozenset({"reduce_sum", "dot_general"})
_WAYS = {"while": "`while` loop", "cond": "branch"}


def _number(atom: core.Var | core.Literal) -> float | None:
    """Return the number of an operand; None if it is not known, or an array."""
    if not isinstance(atom, core.Literal) or getattr(atom.val, "shape", ()):
        return None
    return float(atom.val)


def _multiplied(eqn: core.JaxprEqn, mark: Mark) -> Mark | None:
    """Return the mark of a product of a reduced value, if it is equal everywhere."""
    if mark.varying or mark.reduced is None:
        return None
    factors = mark.reduced.factors | {_number(eqn.invars[0]), _number(eqn.invars[1])}
    if not any(isinstance(atom, core.Literal) for atom in eqn.invars):
        factors |= {None}
    return mark._replace(reduced=mark.reduced._replace(factors=factors))


def _check_local(total: Mark, count: Mark, number: float | None) -> None:
    """Refuse a sum that is not over a replica's own examples, or such a count."""
    for what, mark in (("sum over", total), ("count of", count)):
        if mark.varying or not mark.reduced or number in mark.reduced.factors:
            continue
        raise _not_local(what, mark.reduced.origin)


def _not_local(what: str, origin: Origin) -> ReplicationError:
    return ReplicationError(
        f"`loss_fn` must return the {what} this replica's own examples, got one that "
        f"`{origin.what}` at {origin.where} reduced over replicas already. Return the "
        f"local {what.split()[0]}: the optimizer reduces."
    )


def _not_global(origin: Origin) -> ReplicationError:
    at = f" (`{origin.what}` at {origin.where})" if origin.where else ""
    return ReplicationError(
        "`global_loss` must be differentiated as a whole that is equal on all "
        "replicas, got parameters, or a loss around it, that may differ: they depend "
        f"on {origin.what if not at else 'a value of its own on each' + at}. Move all "
        "of the loss into the function that `global_loss` is given."
    )


def _weight_varies(origin: Origin) -> ReplicationError:
    return ReplicationError(
        "`weight` must be equal on all replicas where gradients pass between them, got "
        f"one that may differ and gradients that `{origin.what}` at {origin.where} "
        "brings from other replicas. Take the gradient of a `LocalSum` by "
        "`replicator.value_and_grad`, and pass `update(..., count=n)`."
    )


def prove_replicated(
    jaxpr: core.Jaxpr,
    in_marks: Sequence[Mark],
    out_paths: Sequence[str | None],
    *,
    num_replicas: int | None = None,
    batch_axis: int = 0,
) -> None:
    """Refuse a step whose returned state may differ between replicas.

    Args:
      jaxpr: Program of one replica.
      in_marks: One mark per input of `jaxpr`: `CLEAN`, `STATE`, `BATCH`, `DECLARED`.
      out_paths: One entry per output: the path of a state leaf that must be equal on
        all replicas, or None for an output that may differ.
      num_replicas: Number of replicas, if that is known.
      batch_axis: Axis of an input marked `BATCH` that counts its examples.

    Raises:
      ReplicationError: A leaf may differ (the message names it, its primitive and the
        user's line), not all replicas may reach a collective, a local sum was reduced
        already, a weight may differ between replicas whose gradients meet, a global
        loss is used as if each had its own, or gradients were summed, not averaged.

    Warns:
      SharedRandomKeyWarning: All replicas draw the same numbers for their own examples.

    >>> jaxpr = jax.make_jaxpr(lambda w, x: w - x.mean())(1.0, jnp.ones(4)).jaxpr
    >>> prove_replicated(jaxpr, [STATE, BATCH], ["w"], num_replicas=2)
    Traceback (most recent call last):
    replicator.errors.ReplicationError: `w` may differ between replicas: ...
    """
    rules, out_marks = _walk(jaxpr, in_marks, num_replicas, batch_axis)
    guilty = [
        (path, mark.varying, variable)
        for path, mark, variable in zip(
            out_paths, out_marks, jaxpr.outvars, strict=True
        )
        if path is not None and mark.varying is not None
    ]
    if guilty:
        raise ReplicationError(_complaint(jaxpr, *guilty[0], more=len(guilty) - 1))
    if (num_replicas or 1) > 1 and rules.given != {True}:
        refuse_summed(
            jaxpr,
            [mark.varying is not None for mark in in_marks],
            [path is not None and not rules.given for path in out_paths],
            num_replicas=num_replicas or 1,
            examples=_num_examples(
                list(map(dataflow.shape_of, jaxpr.invars)), in_marks, batch_axis
            ),
        )
    rules.noise.warn("microbatch" if num_replicas == 1 else "replica")


def warn_of_microbatches(
    jaxpr: core.Jaxpr, in_marks: Sequence[Mark], reduced: slice
) -> None:
    """Warn of random numbers that the microbatches of one replica share.

    Args:
      jaxpr: Program of one microbatch, a function of its number, too.
      in_marks: Marks as in `prove_replicated`; that of the number is `BATCH`.
      reduced: Whether each output is averaged over microbatches.

    Warns:
      SharedRandomKeyWarning: Its examples are given numbers that others get as well.
    """
    rules, out_marks = _walk(jaxpr, in_marks, None, 0)
    rules.noise.reduce(out_marks[reduced])
    rules.noise.warn("microbatch")


def _walk(
    jaxpr: core.Jaxpr,
    in_marks: Sequence[Mark],
    num_replicas: int | None,
    batch_axis: int,
) -> tuple[_ReplicationRules, list[Mark]]:
    """Return the rules after the walk, and the marks of the outputs."""
    shapes = list(map(dataflow.shape_of, jaxpr.invars))
    like = [s for s, mark in zip(shapes, in_marks, strict=True) if mark is STATE]
    noise = SharedNoise(_num_examples(shapes, in_marks, batch_axis), like)
    # A number of the state, such as a count of steps, does not count as weights.
    given = [
        CLEAN if mark is STATE and not shape else mark
        for mark, shape in zip(in_marks, shapes, strict=True)
    ]
    everyone = _everyone(shapes, in_marks, batch_axis, num_replicas or 1)
    rules = _ReplicationRules(noise, num_replicas, everyone)
    return rules, dataflow.flow(jaxpr, given, rules)


def _everyone(
    shapes: Sequence[tuple[int, ...]],
    in_marks: Sequence[Mark],
    batch_axis: int,
    num_replicas: int,
) -> int | None:
    """Return the number of examples of all replicas, the result of `psum(len(x))`.

    None if an example may have as many parts, such as tokens, as there are replicas.
    """
    batches = (s for s, mark in zip(shapes, in_marks, strict=True) if mark is BATCH)
    if num_replicas == 1 or any(num_replicas in s[batch_axis + 1 :] for s in batches):
        return None
    return num_replicas * _num_examples(shapes, in_marks, batch_axis)


def _num_examples(
    shapes: Sequence[tuple[int, ...]], in_marks: Sequence[Mark], batch_axis: int
) -> int:
    """Return the number of examples of a replica at a time; 1 without a batch."""
    return next(
        (
            shape[batch_axis]
            for shape, mark in zip(shapes, in_marks, strict=True)
            if mark is BATCH and len(shape) > batch_axis
        ),
        1,
    )


def _complaint(
    jaxpr: core.Jaxpr,
    path: str,
    origin: Origin,
    variable: core.Var | core.Literal,
    *,
    more: int,
) -> str:
    computed = ""
    if found := dataflow.computing(jaxpr, variable):
        computed = f" at {innermost_line(found)} (`{found[-1].primitive.name}`)"
    others = f" So may {more} more." if more else ""
    if not origin.where:
        cause = f"it was computed from {origin.what}{computed} and not reduced"
        remedy = (
            "Reduce gradients with `rep.wrap_optimizer`, other values with "
            "`replicator.all_reduce`"
        )
    else:
        cause = f"`{origin.what}` at {origin.where} differs on each replica"
        remedy = "Reduce it with `replicator.all_reduce`"
    return (
        f"`{path}` may differ between replicas: {cause}.{others} {remedy}; declare a "
        "leaf that should differ with `PerReplica`, or assert what the proof cannot "
        "see with `replicator.assume_replicated`."
    )

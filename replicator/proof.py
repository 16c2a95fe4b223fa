"""Prove, before a step runs, that the state it returns is equal on every replica.

`shard_map(check_vma=False)` runs user code as pmap did, and proves nothing. This walk
over the step's jaxpr does: the batch, declared per-replica leaves and `axis_index` vary
over replicas; full reductions and gathers stop that; everything else passes it on
(design law 2). The same walk finds a random key that all replicas share, where its bits
meet varying values elementwise: the same dropout mask everywhere.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core

from replicator import dataflow
from replicator.collectives.assume_replicated import ASSUME_REPLICATED
from replicator.errors import ReplicationError
from replicator.mesh import REPLICA_AXIS
from replicator.source_lines import UNKNOWN_LINE, user_line, user_stacklevel

_REDUCTIONS = frozenset(
    {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
)
# What these return is not a function of their inputs: each device gets its own, or it
# is read from a mutable array, whose writes the walk does not follow.
_IMPURE = frozenset(
    {"rng_uniform", "io_callback", "pure_callback", "infeed", "get", "swap", "freeze"}
)
_ELEMENTWISE_MEETINGS = frozenset({"mul", "add", "sub", "div", "select_n"})
_RANDOM_SOURCES = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})


class SharedRandomKeyWarning(UserWarning):
    """Every replica draws the same random numbers where its own were likely meant."""


class Origin(NamedTuple):
    """Where a mark comes from."""

    what: str
    where: str


class Mark(NamedTuple):
    """What is known of one value of the step."""

    varying: Origin | None = None
    shared_random: Origin | None = None


CLEAN = Mark()
BATCH = Mark(varying=Origin("the batch", ""))
DECLARED = Mark(varying=Origin("a `PerReplica` leaf", ""))


class _ReplicationRules:
    """Which equations make values vary over replicas, and which make them agree."""

    clean = CLEAN

    def __init__(self, *, caller: str = UNKNOWN_LINE) -> None:
        self.shared_keys: dict[str, Origin] = {}
        self._caller = caller

    def join(self, marks: Sequence[Mark]) -> Mark:
        varying = next((mark.varying for mark in marks if mark.varying), None)
        shared = next(
            (mark.shared_random for mark in marks if mark.shared_random), None
        )
        return Mark(varying, None if varying else shared)

    def decide(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> list[Mark] | None:
        name, outs = eqn.primitive.name, len(eqn.outvars)
        if name == ASSUME_REPLICATED:
            return [CLEAN] * outs
        if name in _REDUCTIONS and dataflow.over_axis(eqn, REPLICA_AXIS):
            return self._reduce(eqn, marks)
        if name in _IMPURE or dataflow.over_axis(eqn, REPLICA_AXIS):
            return [Mark(varying=self._origin(eqn))] * outs
        # A scalar is a coin thrown for all, and likely meant so.
        drawn = name in _RANDOM_SOURCES and any(
            getattr(var.aval, "shape", ()) for var in eqn.outvars
        )
        if drawn and not self.join(marks).varying:
            return [Mark(shared_random=self._origin(eqn))] * outs
        if name in _ELEMENTWISE_MEETINGS:
            self._note_shared_key(marks)
        return None

    def inside(self, eqn: core.JaxprEqn) -> "_ReplicationRules":
        rules = _ReplicationRules(caller=user_line(eqn, caller=self._caller))
        rules.shared_keys = self.shared_keys
        return rules

    def check_branch(self, eqn: core.JaxprEqn, predicate: Mark) -> None:
        """Refuse a collective that only some replicas may reach: it would never end."""
        if predicate.varying is None:
            return
        for sub in dataflow.sub_jaxprs(eqn):
            found = dataflow.find_equation(
                sub, lambda inner: dataflow.is_collective(inner, REPLICA_AXIS)
            )
            if found is not None:
                way = "loop" if eqn.primitive.name == "while" else "branch"
                line = user_line(found, caller=self._caller)
                raise ReplicationError(
                    f"`{found.primitive.name}` at {line} must be reached by all "
                    f"replicas, got a {way} that may go another way on each (it "
                    f"depends on {predicate.varying.what}). Reduce the condition with "
                    "`replicator.all_reduce` first."
                )

    def _origin(self, eqn: core.JaxprEqn) -> Origin:
        return Origin(eqn.primitive.name, user_line(eqn, caller=self._caller))

    def _reduce(self, eqn: core.JaxprEqn, marks: Sequence[Mark]) -> list[Mark]:
        if eqn.params.get("axis_index_groups") is None:
            return [CLEAN] * len(eqn.outvars)
        # Groups agree within, not with each other.
        return [Mark(varying=self._origin(eqn))] * len(eqn.outvars)

    def _note_shared_key(self, marks: Sequence[Mark]) -> None:
        varying = any(mark.varying for mark in marks)
        for mark in marks:
            if varying and mark.shared_random:
                self.shared_keys[mark.shared_random.where] = mark.shared_random


def prove_replicated(
    jaxpr: core.Jaxpr, in_marks: Sequence[Mark], out_paths: Sequence[str | None]
) -> None:
    """Refuse a step whose returned state may differ between replicas.

    Args:
      jaxpr: What one replica computes.
      in_marks: One mark per input of `jaxpr`: `CLEAN`, `BATCH` or `DECLARED`.
      out_paths: One entry per output: the path of a state leaf that must be equal on
        all replicas, or None for an output that may differ.

    Raises:
      ReplicationError: A leaf may differ; the message names it, the primitive that
        computed it and the user's line.

    Warns:
      SharedRandomKeyWarning: All replicas draw the same numbers for their own examples.
    """
    rules = _ReplicationRules()
    out_marks = dataflow.flow(jaxpr, in_marks, rules)
    guilty = [
        (path, mark.varying, variable)
        for path, mark, variable in zip(
            out_paths, out_marks, jaxpr.outvars, strict=True
        )
        if path is not None and mark.varying is not None
    ]
    if guilty:
        raise ReplicationError(_complaint(jaxpr, *guilty[0], more=len(guilty) - 1))
    for origin in rules.shared_keys.values():
        warnings.warn(
            f"every replica draws the same random numbers at {origin.where}. Use "
            "`replicator.replica_key(key)` or `replicator.example_keys(key, n)` for "
            "numbers of each replica's or each example's own; give an NNX module such "
            "a key with `nnx.reseed`.",
            SharedRandomKeyWarning,
            stacklevel=user_stacklevel(),
        )


def _complaint(
    jaxpr: core.Jaxpr,
    path: str,
    origin: Origin,
    variable: core.Var | core.Literal,
    *,
    more: int,
) -> str:
    computed = _where_computed(jaxpr, variable)
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


def _where_computed(
    jaxpr: core.Jaxpr,
    variable: core.Var | core.Literal,
    *,
    caller: str = UNKNOWN_LINE,
) -> str:
    """Name the line and primitive that compute `variable`, in calls and loops too."""
    for eqn in jaxpr.eqns:
        for position, out in enumerate(eqn.outvars):
            if out is variable:
                line = user_line(eqn, caller=caller)
                for sub in dataflow.sub_jaxprs(eqn):
                    if len(sub.outvars) == len(eqn.outvars):
                        inner = sub.outvars[position]
                        if found := _where_computed(sub, inner, caller=line):
                            return found
                return f" at {line} (`{eqn.primitive.name}`)"
    return ""

"""Find gradients that are not means over a replica's own examples.

A wrapped optimizer takes the mean over replicas. So each replica must give it a mean
over examples that do not meet: a sum, a mean of other things than examples, a statistic
of this replica's examples alone or a clipped gradient make an update that depends on
the number of replicas. The step is traced once more, with a prime number of examples
on a prime number of replicas: an axis of that length counts examples, and a number
that it divides was computed from their number. A step that cannot be traced so, or
that is long, is not judged. Norms are left out: theirs is documented with them.
"""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.collectives.markers import GIVEN_GRADIENT, WEIGHTED_GRADIENT
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.marks import Origin
from replicator.engine.analysis.meeting import MeetingRules
from replicator.engine.analysis.source_lines import NestedRules, user_stacklevel

EXAMPLES, REPLICAS = 47, 53  # few axes have such a length, few numbers are multiples
MOST_EQUATIONS = 3000


class ExampleMeanWarning(UserWarning):
    """A gradient is not the mean over a replica's examples."""


class Pooled(NamedTuple):
    """A reduction over examples, and whether it is of a backward pass."""

    origin: Origin
    gradient: bool


class Share(NamedTuple):
    """Facts about one value.

    Attributes:
      leaf: Leaf of the batch whose single examples it reads; "" for none.
      params: Whether it follows from the state.
      gradient: Whether it follows from a backward pass.
      pooled: A reduction over examples that it follows from.
      met: What it is instead of a sum over examples, and where that began.
      powers: Powers of the numbers of examples and of replicas that multiply it; none
        for a zero.
      counted: A sum of whole numbers over examples that it follows from.
    """

    leaf: str = ""
    params: bool = False
    gradient: bool = False
    pooled: Pooled | None = None
    met: tuple[str, Origin] | None = None
    powers: frozenset[tuple[int, int]] = frozenset({(0, 0)})
    counted: Origin | None = None


_NOTHING = Share()
_LINEAR = frozenset(
    {
        *("reduce_sum", "dot_general", "conv_general_dilated", "scatter-add", "cumsum"),
        *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy"),
        *("convert_element_type", "reduce_precision", "stop_gradient", "neg", "add"),
        *("add_any", "sub", "concatenate", "pad", "rev", "optimization_barrier"),
        *("mul", "div", "select_n", "copy_p", "reduce_window_sum", "slice"),
    }
)
_PICKS = frozenset({"slice", "dynamic_slice", "gather", "squeeze", "select_n"})
_PRODUCTS = frozenset({"mul", "div", "dot_general", "conv_general_dilated"})


def is_short(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program is short enough to be traced once more."""
    few = itertools.islice(dataflow.equations(jaxpr), MOST_EQUATIONS)
    return sum(1 for _ in few) < MOST_EQUATIONS


def warn_of_shares(update: Callable[..., PyTree], state: PyTree, batch: PyTree) -> None:
    """Warn if an optimizer is given another gradient than a mean over examples.

    Args:
      update: `update(state, batch, None)` of one replica, without accumulation.
      state: Shapes of the state of one replica.
      batch: Shapes of its batch, leaves [examples, ...].

    Warns:
      ExampleMeanWarning: One is.
    """

    def many(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((EXAMPLES, *leaf.shape[1:]), leaf.dtype)

    shapes = [leaf.shape for leaf in jax.tree.leaves((state, batch))]
    if any(size and size % EXAMPLES == 0 for shape in shapes for size in shape):
        return
    trace = jax.make_jaxpr(
        lambda *given: update(*given, None),
        axis_env=[(REPLICA_AXIS, REPLICAS)],
        return_shape=True,
    )
    try:
        traced, (_, reported) = trace(state, jax.tree.map(many, batch))
    except Exception:
        return  # not for any number of examples
    marks = [Share(params=True)] * len(jax.tree.leaves(state))
    marks += [Share(leaf=path or "batch") for path, _ in named_leaves(batch)]
    rules = ShareRules(rows=jax.tree.leaves(batch)[0].shape[0])
    after = dataflow.flow(traced.jaxpr, marks, rules)
    found = next(filter(None, map(_fault, rules.given.values())), None)
    if rules.given and all(not each.powers for each in rules.given.values()):
        found = "zeros", next(iter(rules.given.values())).counted or _NOWHERE
    names = named_leaves(reported)
    for (path, _), mark in zip(names, after[len(after) - len(names) :], strict=True):
        if mark.counted and mark.powers == {(1, 0)} and not mark.met:
            found = found or (f"metric {path}", mark.counted)
    if found is not None:
        what, origin = found
        where = f"`{origin.what}` at {origin.where}"
        warnings.warn(
            f"{_WORDS[what.partition(' ')[0]].format(where, what.partition(' ')[2])}",
            ExampleMeanWarning,
            stacklevel=user_stacklevel(),
        )


_NOWHERE = Origin("", "")
_WORDS = {
    "zeros": "`loss_fn` must depend on the parameters that the optimizer updates, got "
    "gradients that are zeros. Use the model, or the parameters, that it is given.",
    "metric": "`{1}` must be declared where it is a sum over examples, got a plain "
    "array, of which the mean over replicas is reported ({0}). Return "
    "`replicator.Sum(value)`, or a mean over examples.",
    "summed": "`loss_fn` must return this replica's own mean, got one that is summed "
    "over replicas ({}). Return the mean: the optimizer averages.",
    "sum": "`loss_fn` must return a mean over this replica's examples, got a sum that "
    "is not divided by their number ({}). Take the mean, or return "
    "`LocalSum(total, count)` to `replicator.value_and_grad`.",
    "replicas": "`loss_fn` must return a mean over this replica's examples, got one "
    "that is divided by the number of replicas, too ({}). Return the mean: the "
    "optimizer divides.",
    "count": "`loss_fn` must return a mean over examples of which all replicas have as "
    "many, got one that is divided by a sum over `{1}` of this replica's ({0}). Return "
    "`LocalSum(total, count)` to `replicator.value_and_grad`.",
    "pairs": "`loss_fn` must compare each example with its own label, got every one "
    "with every other ({}). Give both operands one shape, as by `[:, 0]`.",
    "meets": "`loss_fn` must not use a statistic of this replica's examples alone, got "
    "one ({}). Reduce it over all by `replicator.all_reduce`.",
    "grads": "`grads` must be given to the optimizer as `jax.grad` returns them, got "
    "others ({}). Put what changes them into the optimizer: `rep.wrap_optimizer("
    "optax.chain(optax.clip_by_global_norm(1.0), tx))`.",
}


def _fault(mark: Share) -> tuple[str, Origin] | None:
    if mark.met is not None:
        return mark.met
    if mark.pooled is None or len(mark.powers) != 1:
        return None
    [(examples, replicas)] = mark.powers
    if replicas > 0:
        return "summed", mark.pooled.origin
    if replicas < 0:
        return "replicas", mark.pooled.origin
    return ("sum", mark.pooled.origin) if examples > 0 else None


@dataclasses.dataclass(frozen=True)
class ShareRules(NestedRules[Share]):
    """Rules to follow examples into the gradients that optimizers are given.

    Attributes:
      rows: Number of examples of a replica, for messages.
      given: Mark of each such gradient without a count.
    """

    clean = _NOTHING
    rows: int
    given: dict[Any, Share] = dataclasses.field(default_factory=dict)

    def literal(self, atom: core.Literal) -> Share:
        """Return the mark of a number: the powers in it."""
        powers = None if jnp.ndim(atom.val) else _powers_of(float(atom.val))
        return _NOTHING if powers is None else Share(powers=powers)

    def join(self, marks: Sequence[Share]) -> Share:
        """Return the mark of a value that follows from all of these."""
        return functools.reduce(_both, marks) if marks else _NOTHING

    def decide(self, eqn: core.JaxprEqn, marks: Sequence[Share]) -> list[Share] | None:
        """Return the marks of the results of `eqn`."""
        name = eqn.primitive.name
        marks = marks[1:] if name == "select_n" else marks  # a choice is no summand
        mark = self.join(marks)
        if name == GIVEN_GRADIENT:
            if len(marks) == 1:
                self.given[eqn.outvars[0]] = marks[0]
            return [marks[0]]
        if name == WEIGHTED_GRADIENT:  # means of different numbers of examples
            self.given.pop(eqn.invars[0], None)
            return [marks[0]]
        if dataflow.over_axis(eqn, REPLICA_AXIS):  # of all replicas
            whole = Share(counted=mark.counted)
            if name == "psum" and not mark.met:
                powers = frozenset((n, min(r + 1, 3)) for n, r in mark.powers)
                whole = whole._replace(powers=powers)
            return [whole] * len(eqn.outvars)
        if dataflow.sub_jaxprs(eqn) or not eqn.outvars:
            return None
        origin = Origin(name, self.line_of(eqn))
        if self.is_backward(eqn):
            mark = mark._replace(gradient=True)
        if name in _PRODUCTS:
            mark = mark._replace(powers=_multiplied(eqn, marks))
        if name in _PRODUCTS or name not in _LINEAR:
            mark = self._nonlinear(eqn, marks, mark, origin)
        return [self._reduced(eqn, marks, mark, origin)] * len(eqn.outvars)

    def _nonlinear(
        self, eqn: core.JaxprEqn, marks: Sequence[Share], mark: Share, origin: Origin
    ) -> Share:
        """Look at a product, or a function, of what was reduced over examples."""
        if mark.met or not mark.pooled:
            return mark
        name = eqn.primitive.name
        if name in _PRODUCTS:
            one, other = marks
            meets = any(
                a.pooled and (b.pooled or b.leaf)
                for a, b in ((one, other), (other, one))
            )
            if not meets and not (name == "div" and other.pooled):
                return mark
            if name == "div" and other.pooled and not other.params:
                return mark._replace(met=(f"count {other.leaf or 'batch'}", origin))
        elif self.is_backward(eqn):
            return mark  # linear in the cotangent
        after = all(each.pooled.gradient for each in marks if each.pooled)
        return mark._replace(met=("grads" if after else "meets", origin))

    def _reduced(
        self, eqn: core.JaxprEqn, marks: Sequence[Share], mark: Share, origin: Origin
    ) -> Share:
        """Look at the axes of examples: are they reduced, or crossed?"""
        before = max((_axes(atom) for atom in eqn.invars), default=0)
        after = _axes(eqn.outvars[0])
        if mark.leaf and after > max(before, 1) and not mark.met:
            shapes = " and ".join(_described(each, self.rows) for each in eqn.invars)
            return mark._replace(met=("pairs", origin._replace(what=f"{shapes}")))
        if after or not before:
            return mark
        if eqn.primitive.name in _PICKS:
            return mark
        more = frozenset((min(n + 1, 3), r) for n, r in mark.powers)
        mark = mark._replace(powers=more)
        if not mark.leaf:
            return mark
        if self._is_of_norm(eqn):
            return _NOTHING
        dtype = getattr(eqn.outvars[0].aval, "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
            mark = mark._replace(counted=mark.counted or origin)
        return mark._replace(pooled=mark.pooled or Pooled(origin, mark.gradient))

    def _is_of_norm(self, eqn: core.JaxprEqn) -> bool:
        return MeetingRules(outer=self.outer).is_of_norm(eqn)


def _both(one: Share, other: Share) -> Share:
    if one == other:
        return one
    batch = [
        each.powers for each in (one, other) if each.leaf or each.pooled or each.counted
    ]
    return Share(
        leaf=one.leaf or other.leaf,
        params=one.params or other.params,
        gradient=one.gradient or other.gradient,
        pooled=one.pooled or other.pooled,
        met=one.met or other.met,
        counted=one.counted or other.counted,
        powers=frozenset().union(*(batch or (one.powers, other.powers))),
    )


def _multiplied(eqn: core.JaxprEqn, marks: Sequence[Share]) -> frozenset:
    """Return the powers of a product or a quotient."""
    sign = -1 if eqn.primitive.name == "div" else 1
    left, right = (mark.powers for mark in marks)
    both = {(a + sign * c, b + sign * d) for a, b in left for c, d in right}
    return frozenset((max(-3, min(n, 3)), max(-3, min(r, 3))) for n, r in both)


def _powers_of(value: float) -> frozenset:
    if value == 0:
        return frozenset()
    return frozenset({(_power(value, EXAMPLES), _power(value, REPLICAS))})


def _power(value: float, prime: int) -> int:
    """Return 1 for a multiple of a prime, -1 for the inverse of one, otherwise 0."""
    for number, power in ((value, 1), (1 / value if value else 0.0, -1)):
        times = number / prime
        if 0.999 < times < 1e6 and abs(times - round(times)) < 1e-3 * min(times, 1):
            return power
    return 0


def _axes(atom: core.Var | core.Literal) -> int:
    return sum(size > 0 and size % EXAMPLES == 0 for size in dataflow.shape_of(atom))


def _described(atom: core.Var | core.Literal, rows: int) -> str:
    sizes = (rows if n == EXAMPLES else n for n in dataflow.shape_of(atom))
    shape = ",".join(map(str, sizes))
    return f"{getattr(atom.aval, 'dtype', '')}[{shape}]"

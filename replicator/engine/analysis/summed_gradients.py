"""Find gradients that were added up over replicas where their mean was meant.

The gradient of a mean over a replica's examples, summed by `psum`, is N times that of
the global batch: the answer depends on the number of replicas. It is right once it is
divided by that number (in the loss, or later), or by a count that was summed, too. A
division by a number is recognised by its value; the division of a mean over this
replica's own examples by the sum that goes with it, and it does not count. The gradient
of a plain sum is right as it is.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS
from replicator.collectives.markers import GIVEN_GRADIENT
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.marks import Origin
from replicator.engine.analysis.source_lines import NestedRules
from replicator.errors import ReplicationError


class _Scale(NamedTuple):
    """Facts about one value.

    Attributes:
      own: Whether it may differ between replicas.
      total: Whether it follows from a sum over replicas, other than of gradients.
      gradient: Whether it follows from a backward pass; the others are of gradients.
      divisor: Its divisor, without means over own examples; 0 for none.
      mean: Whether it is of a mean over own examples.
      shared: Whether it was divided by the number of replicas, or by a total.
      summed: Origin of its sum over replicas.
    """

    own: bool = False
    total: bool = False
    gradient: bool = False
    divisor: int = 0
    mean: bool = False
    shared: bool = False
    summed: Origin | None = None


_CLEAN = _Scale()


def refuse_summed(
    jaxpr: core.Jaxpr,
    own: Sequence[bool],
    kept: Sequence[bool],
    *,
    num_replicas: int,
    examples: int,
) -> None:
    """Refuse gradients of means that are summed over replicas, and not divided.

    Args:
      jaxpr: Program of one replica.
      own: Whether each input differs between replicas.
      kept: Whether each output is state that gradients move by hand.
      num_replicas: Number of replicas.
      examples: Number of examples that a replica sees at a time.

    Raises:
      ReplicationError: There are such gradients.
    """
    rules = _Rules(num_replicas, examples)
    outs = dataflow.flow(jaxpr, [_Scale(own=each) for each in own], rules)
    for mark, is_kept in zip(outs, kept, strict=True):
        if is_kept:
            _check(mark, mark.mean)


def _check(mark: _Scale, is_wrong: bool) -> None:
    if mark.summed and is_wrong and not mark.own:
        raise ReplicationError(
            "`grads` must be a mean over replicas, got a sum: "
            f"`{mark.summed.what}` at {mark.summed.where}, with no division by the "
            "number of replicas or by a count of all examples. Pass the result of "
            "`jax.grad` to the wrapped optimizer, or write "
            "`lax.pmean(grads, 'replica')` or `lax.psum(grads, 'replica') / "
            "replicator.num_replicas()`."
        )


@dataclasses.dataclass(frozen=True)
class _Rules(NestedRules[_Scale]):
    clean = _CLEAN

    num_replicas: int
    examples: int

    @property
    def _everyone(self) -> int:
        return self.num_replicas * self.examples

    def _counts_all(self, count: core.Var | core.Literal) -> bool:
        return isinstance(count, core.Literal) and not count.val % self._everyone

    def join(self, marks: Sequence[_Scale]) -> _Scale:
        return functools.reduce(_both, marks, _CLEAN)

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[_Scale]
    ) -> list[_Scale] | None:
        name, outs = eqn.primitive.name, len(eqn.outvars)
        mark = self.join(marks)
        if name == GIVEN_GRADIENT:
            # With a count the optimizer divides: by all, if it was not summed before.
            summed_twice = len(marks) > 1 and not (
                marks[1].total or self._counts_all(eqn.invars[1])
            )
            _check(marks[0], marks[0].mean or summed_twice)
            return [marks[0]]
        backward = self.is_backward(eqn)
        if dataflow.over_axis(eqn, REPLICA_AXIS):
            return [self._collected(eqn, mark, backward)] * outs
        if dataflow.sub_jaxprs(eqn):
            return None
        if name == "sign" or not _is_floating(eqn):
            return [_Scale(own=mark.own)] * outs  # the same of any multiple
        if name in ("mul", "div"):
            mark = self._multiplied(eqn, marks, mark, backward)
        elif backward and mark.divisor:
            mark = self._spread(eqn, mark)
        return [mark._replace(gradient=mark.gradient or backward)] * outs

    def _collected(self, eqn: core.JaxprEqn, mark: _Scale, backward: bool) -> _Scale:
        name = eqn.primitive.name
        if backward:
            return mark._replace(own=False, gradient=True)
        if name == "all_gather":
            return mark._replace(own=False)
        own = name == "reduce_scatter"  # a sum, of which each has a piece
        if not (own or name == "psum") or eqn.params["axis_index_groups"] is not None:
            return _Scale(own=name not in ("pmax", "pmin"))
        if not mark.gradient:
            return _Scale(own=own, total=True)
        if not mark.mean and mark.divisor and mark.divisor % self.examples == 0:
            mark = mark._replace(mean=True, divisor=mark.divisor // self.examples)
        if mark.shared or (mark.divisor and mark.divisor % self.num_replicas == 0):
            return _Scale(own=own, gradient=True)
        return mark._replace(own=own, summed=Origin(name, self.line_of(eqn)))

    def _multiplied(
        self,
        eqn: core.JaxprEqn,
        marks: Sequence[_Scale],
        mark: _Scale,
        backward: bool,
    ) -> _Scale:
        """Look at a product or a quotient: was a gradient divided by how many?"""
        is_quotient = eqn.primitive.name == "div"
        scalar = not dataflow.shape_of(eqn.outvars[0])
        if backward and not scalar:
            return mark
        number = max(_whole(atom, is_quotient) for atom in eqn.invars[is_quotient:])
        if not is_quotient and number not in (self.num_replicas, self._everyone):
            number = 0  # any rate or factor, whose inverse may be a multiple of it
        replicas = self.num_replicas
        if not (backward or mark.gradient):
            shared = scalar and not mark.own and number and number % replicas == 0
            return mark._replace(divisor=number) if shared else mark
        # A rate that was divided counts as a division of its product.
        if not (backward or is_quotient) and any(map(self._is_shared_rate, marks)):
            return _Scale(own=mark.own, gradient=True, mean=mark.mean, shared=True)
        if number:
            if mark.summed:
                shared = number % self.num_replicas == 0
                return _Scale(gradient=True) if shared else mark
            first = is_quotient and mark.own and not (backward or mark.mean)
            if first and number == self.examples:
                return mark._replace(mean=True)
            if (backward and is_quotient) or number % self.num_replicas == 0:
                return mark._replace(divisor=max(mark.divisor, 1) * number)
            return mark
        by = marks[1] if is_quotient or marks[1].total else marks[0]
        if by.gradient or isinstance(eqn.invars[1], core.Literal):
            return mark
        if by.total or (is_quotient and mark.summed):
            return mark._replace(shared=True, summed=None)
        if is_quotient and by.own and scalar:
            return mark._replace(mean=True)  # divided by a count of this replica's
        return mark

    def _is_shared_rate(self, mark: _Scale) -> bool:
        free = not (mark.own or mark.summed)
        return free and mark.divisor > 0 and mark.divisor % self.num_replicas == 0

    def _spread(self, eqn: core.JaxprEqn, mark: _Scale) -> _Scale:
        """Look at a cotangent that goes to many examples: is it divided by them?"""
        smallest = min(math.prod(dataflow.shape_of(atom)) for atom in eqn.invars)
        outer = eqn.primitive.name == "dot_general" and smallest == 1
        if mark.mean or not (outer or eqn.primitive.name == "broadcast_in_dim"):
            return mark
        size = math.prod(dataflow.shape_of(eqn.outvars[0]))
        times = size // max(smallest, 1)
        if not times or times % self.examples or mark.divisor % times:
            return mark
        return mark._replace(mean=True, divisor=mark.divisor // times)


def _both(one: _Scale, other: _Scale) -> _Scale:
    if one == other or other is _CLEAN:
        return one
    both = one.gradient and other.gradient
    return _Scale(
        own=one.own or other.own,
        total=one.total or other.total,
        gradient=one.gradient or other.gradient,
        divisor=math.gcd(one.divisor, other.divisor),
        mean=one.mean or other.mean,
        shared=(one.shared and other.shared) if both else one.shared or other.shared,
        summed=one.summed or other.summed,
    )


def _is_floating(eqn: core.JaxprEqn) -> bool:
    dtype = getattr(eqn.outvars[0].aval, "dtype", None) if eqn.outvars else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _whole(atom: core.Var | core.Literal, is_divisor: bool) -> int:
    """Return the whole number that an operand divides by; 0 if it is not one."""
    if not isinstance(atom, core.Literal):
        return 0
    value = float(atom.val)
    value = value if is_divisor or not value else 1 / value
    whole = round(value) if math.isfinite(value) else 0
    return whole if whole > 0 and abs(value - whole) < 1e-6 * whole else 0

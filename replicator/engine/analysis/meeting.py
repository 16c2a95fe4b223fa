"""Find collectives in a loss that reduce a microbatch where the batch is meant.

With several microbatches a collective sees the examples of one. That is right where
its result only adds to the loss or scales it: the gradient then is a sum over examples,
whatever the cut. It is another loss where single examples meet the result: the other
rows of a contrastive loss, a mean that advantages are whitened by. The walk follows
reduced values to the gradients that optimizers are given. A norm's own collectives are
left out: their effect under accumulation is documented with the norm. Examples that
meet without a collective are not seen.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.tracebacks import is_library
from replicator.collectives.markers import ALONE, MARKERS, NORM
from replicator.engine.analysis import dataflow
from replicator.engine.analysis.marks import Origin
from replicator.engine.analysis.source_lines import NestedRules


class MicrobatchCollectiveWarning(UserWarning):
    """A collective in a loss reduces a microbatch, not the batch."""


class Meeting(NamedTuple):
    """Facts about one value.

    Attributes:
      own: Whether it reads single examples.
      params: Whether it follows from parameters.
      scale: A reduction of data alone (a count) that it is, or is a multiple of.
      part: A reduction that it is, or that is a summand in it.
      meets: A reduction that single examples met.
    """

    own: bool = False
    params: bool = False
    scale: Origin | None = None
    part: Origin | None = None
    meets: Origin | None = None


NOTHING, PARAMS, EXAMPLES = Meeting(), Meeting(params=True), Meeting(own=True)

_PRODUCTS = frozenset({"mul", "div", "dot_general", "conv_general_dilated"})
_SUMS = frozenset({"add", "sub", "concatenate", "select_n", "pad"})
# They move their first operand; the other operands, which choose, may be of examples.
_MOVES = frozenset(
    {
        *("neg", "reduce_sum", "cumsum", "broadcast_in_dim", "reshape", "squeeze"),
        *("expand_dims", "transpose", "convert_element_type", "slice", "gather"),
        *("dynamic_slice", "rev", "copy", "reduce_precision", "stop_gradient"),
        *("add_any", "optimization_barrier", "real", "imag"),
    }
)
_REDUCTIONS = frozenset({"psum", "pmax", "pmin", "all_reduce"})


@dataclasses.dataclass(frozen=True)
class MeetingRules(NestedRules[Meeting]):
    """Rules to follow reductions over a microbatch into a loss."""

    clean = NOTHING

    def join(self, marks: Sequence[Meeting]) -> Meeting:
        """Return the mark of a value that follows from all of these."""
        first, *others = marks or [NOTHING]
        for mark in others:
            if mark != first:
                first = Meeting._make(a or b for a, b in zip(first, mark, strict=True))
        return first

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[Meeting]
    ) -> list[Meeting] | None:
        """Return the marks of the results of `eqn`."""
        name, mark = eqn.primitive.name, self.join(marks)
        if name in MARKERS:
            return [marks[0]]
        if name == ALONE:
            name = eqn.params["name"]
        elif not dataflow.over_axis(eqn, REPLICA_AXIS):
            # Most of a program has nothing to do with a reduction.
            if not (mark.scale or mark.part) or dataflow.sub_jaxprs(eqn):
                return None
            return [self._combined(eqn, marks, mark)] * len(eqn.outvars)
        if not mark.own or name == "axis_index" or self.is_of_norm(eqn):
            return [mark] * len(eqn.outvars)
        origin = Origin(name, self.line_of(eqn))
        is_count = name in _REDUCTIONS and not (mark.params or mark.part)
        reduced = mark._replace(own=False, scale=None)
        reduced = reduced._replace(**{"scale" if is_count else "part": origin})
        return [reduced] * len(eqn.outvars)

    def _combined(
        self, eqn: core.JaxprEqn, marks: Sequence[Meeting], mark: Meeting
    ) -> Meeting:
        """Return the mark of the result of `eqn` for a reduced operand."""
        name = eqn.primitive.name
        if name == "select_n":  # a choice is not a product
            marks = marks[1:]
            mark = self.join(marks)
        number = not dataflow.shape_of(eqn.outvars[0])
        if name == "stop_gradient" and number and not mark.own:
            return Meeting(scale=mark.scale or mark.part, meets=mark.meets)
        if name in ("gather", "dot_general") and any(
            one.scale and not one.own and other.own and dataflow.shape_of(atom)
            for one, other, atom in zip(marks, marks[::-1], eqn.invars, strict=False)
        ):
            return mark._replace(part=mark.scale)  # each example has its own number
        if name in _MOVES:
            return mark
        if name in _SUMS:
            mixed = mark.scale and any(each.own and not each.scale for each in marks)
            backward = self.is_backward(eqn)
            return mark._replace(part=mark.scale) if mixed and not backward else mark
        if name in _PRODUCTS:
            met = [bool(each.part) for each in marks]
            others = [each.own or each.part for each in reversed(marks)]
            if any(a and b for a, b in zip(met, others, strict=True)):
                return mark._replace(meets=mark.meets or mark.part)
            return mark
        # All but the products of a backward pass is linear in the cotangent.
        if mark.own and not self.is_backward(eqn):
            return mark._replace(meets=mark.meets or mark.part or mark.scale)
        return mark

    def is_of_norm(self, eqn: core.JaxprEqn) -> bool:
        """Return whether a collective is of a norm: ours, a library's, or named so."""
        for each in (*self.outer, eqn):
            if NORM in str(each.source_info.name_stack):
                return True
            traceback = each.source_info.traceback
            for frame in traceback.frames if traceback else ():
                file = frame.file_name.rpartition("/")[2]
                if "norm" in file and is_library(frame.file_name):
                    return True
                if "batchnorm" in frame.function_name.lower().replace("_", ""):
                    return True
        return False


def is_weights(leaf: jax.Array) -> bool:
    """Return whether a leaf of a state may be parameters: more than a number."""
    return jnp.ndim(leaf) > 0 and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)

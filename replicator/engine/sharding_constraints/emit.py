"""Emit a step's program again, with each variable whole only where it is multiplied.

A mark follows a variable that is stored in pieces through casts, transposes, reshapes,
slices and elementwise arithmetic to its uses: a product, a convolution, a gather, and
unknown equations. There, and inside loops and rematerialised bodies, it is constrained
to the partition in which it is computed. A target goes the other way, from new state
back to the products that make gradients: only those are constrained to the gradient's
partition. (With partitions of arguments alone the partitioner also gathers
activations.)

All of this decides where values lie, and never their bits: operands of an unknown
equation are whole. An operation that XLA would partition wrongly is kept whole along
the dimensions that matter (`guards`).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from replicator.engine.analysis import dataflow
from replicator.engine.analysis.evaluator import (
    CALLS,
    REMAT,
    bind,
    evaluate,
    held_program,
)
from replicator.engine.analysis.source_lines import user_line
from replicator.engine.sharding_constraints import guards
from replicator.engine.sharding_constraints.moves import (
    forward,
    is_elementwise,
    is_reduction,
)
from replicator.engine.sharding_constraints.targets import (
    BARRIER,
    Targets,
    wanted_cuts,
)
from replicator.strategies.rule import Cut

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Partitioned:
    """Mark of a value that lies in pieces.

    Attributes:
      stored: Mesh axis of each of its dimensions.
      computed: Mesh axis of each where it is multiplied.
    """

    stored: Cut
    computed: Cut


Constrain = Callable[[jax.Array, Cut], jax.Array]
Marks = Sequence[Partitioned | None]


def reemit(
    traced: core.ClosedJaxpr,
    args: Sequence[jax.Array],
    *,
    marks: Marks,
    targets: Targets,
    constrain: Constrain,
    pieces: int,
    is_shared: bool,
) -> list[jax.Array]:
    """Run a traced program with its constraints in it; call it while tracing.

    Args:
      traced: The program.
      args: Its arguments, flat.
      marks: Mark of each argument that lies in pieces.
      targets: Partition of the gradient of each result that is new state.
      constrain: Constrains an array to a partition.
      pieces: Number of pieces that a batch is cut into.
      is_shared: Whether several devices have the same piece.

    Returns:
      Its results, flat; those computed from pieces lie in pieces.
    """
    outs, found = _Emitter(constrain, pieces, is_shared).run(
        traced, args, marks, targets
    )
    # Values that move in pieces are put together once, at the end.
    return [
        out if mark is None else constrain(out, mark.stored)
        for out, mark in zip(outs, found, strict=True)
    ]


@dataclass(frozen=True)
class _Emitter:
    constrain: Constrain
    pieces: int
    is_shared: bool

    def run(
        self, closed: core.ClosedJaxpr, args: Sequence, marks: Marks, targets: Targets
    ) -> tuple[list[Any], list[Partitioned | None]]:
        """Bind the equations of a jaxpr one by one; return results and their marks."""
        wanted, filled = wanted_cuts(closed.jaxpr, targets), set[Any]()

        def apply(eqn: core.JaxprEqn, operands: list) -> Iterable:
            cuts = [wanted.get(var) for var in eqn.outvars]
            if eqn.primitive.name == "broadcast_in_dim" and not dataflow.shape_of(
                eqn.invars[0]
            ):
                filled.update(eqn.outvars)
            is_right = guards.adds_rows(eqn, self.pieces) and eqn.invars[0] in filled
            guard = None if is_right else guards.guard_of(eqn, is_shared=self.is_shared)
            values, marks = _apart(operands)
            return zip(*self._emit(eqn, values, marks, cuts, guard), strict=True)

        pairs = zip(args, marks, strict=True)
        return _apart(evaluate(closed, pairs, apply, constant=lambda x: (x, None)))

    def _emit(
        self,
        eqn: core.JaxprEqn,
        values: list,
        marks: Marks,
        cuts: Targets,
        guard: guards.Guard | None,
    ) -> tuple[list, Marks]:
        none = [None] * len(eqn.outvars)
        name = eqn.primitive.name
        if guard is not None:
            return self._guarded(eqn, values, marks, cuts, guard)
        is_plain = not any(marks) and all(cut is None for cut in cuts)
        if is_plain and not _holds_guarded(eqn):
            return bind(eqn, values), none
        if name in CALLS and (held := held_program(eqn)) is not None:
            return self.run(held, values, marks, cuts)
        if name in _LOOPS and not any(dataflow.is_mutable(atom) for atom in eqn.invars):
            return _LOOPS[name](self, eqn, values, marks, cuts)
        if name == BARRIER:
            return bind(eqn, values), marks
        if len(eqn.outvars) == 1:
            if is_elementwise(eqn):
                return bind(eqn, values), [next(filter(None, marks), None)]
            if marks and marks[0] and (moved := _moved(eqn, marks[0])) is not None:
                return bind(eqn, values), [moved]
            if is_reduction(eqn):
                return bind(eqn, values), none
        return self._use(eqn, values, marks, cuts)

    def _use(
        self, eqn: core.JaxprEqn, values: list, marks: Marks, cuts: Targets
    ) -> tuple[list, Marks]:
        """Bind an equation with whole operands, and the results wanted in pieces."""
        if any(m and any(m.stored) for m in marks) and _holds_program(eqn):
            _log.warning(
                "`%s` at %s gets variables whole that are stored in pieces: its inside "
                "is not known.",
                *(eqn.primitive.name, user_line(eqn)),
            )
        whole = [
            value if mark is None else self.constrain(value, mark.computed)
            for value, mark in zip(values, marks, strict=True)
        ]
        return self._wanted_results(bind(eqn, whole), cuts)

    def _guarded(
        self,
        eqn: core.JaxprEqn,
        values: list,
        marks: Marks,
        cuts: Targets,
        guard: guards.Guard,
    ) -> tuple[list, Marks]:
        """Bind an equation that XLA may not cut as it likes."""
        known = marks[0].stored if marks[0] else cuts[0] or ()
        is_cut = any(
            axis and kept is None
            for axis, kept in zip(known, guard.result, strict=False)
        )
        if is_cut and (chosen := guards.chosen_write(eqn, values)) is not None:
            outs, after = self._wanted_results([chosen], cuts)
            return outs, [after[0] or marks[0]]
        whole = [
            self._lie(value, mark and mark.computed, kept)
            for value, mark, kept in zip(values, marks, guard.operands, strict=True)
        ]
        outs = [self._lie(out, None, guard.result) for out in bind(eqn, whole)]
        return self._wanted_results(outs, cuts)

    def _lie(self, value: Any, cut: Cut | None, guard: guards.GuardedCut) -> Any:
        """Constrain the dimensions of a guard to be whole, others to `cut`, if any."""
        lies = tuple(
            axis if kept is guards.FREE else None
            for axis, kept in zip(cut or guard, guard, strict=True)
        )
        return (
            value
            if all(axis is guards.FREE for axis in lies)
            else self.constrain(value, lies)
        )

    def _wanted_results(self, outs: list, cuts: Targets) -> tuple[list, Marks]:
        return [
            out if cut is None else self.constrain(out, cut)
            for out, cut in zip(outs, cuts, strict=True)
        ], [_target_mark(cut) for cut in cuts]

    def _body(
        self, closed: core.ClosedJaxpr, marks: Marks, cuts: Targets, pinned: int = 0
    ) -> core.ClosedJaxpr:
        """Trace the body of a loop again; its first `pinned` results stay in pieces."""

        def again(*args: Any) -> list:
            outs, _ = self.run(closed, args, marks, cuts)
            return [
                self.constrain(out, cut) if number < pinned and cut is not None else out
                for number, (out, cut) in enumerate(zip(outs, cuts, strict=True))
            ]

        shapes = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in closed.in_avals
        ]
        return jax.make_jaxpr(again)(*shapes)

    def _scan(
        self, eqn: core.JaxprEqn, values: list, marks: Marks, cuts: Targets
    ) -> tuple[list, Marks]:
        num_consts, num_carry = dataflow.scan_sizes(eqn)
        start = num_consts + num_carry
        values, marks = list(values), list(marks)
        for number in range(start, len(marks)):
            mark = marks[number]
            if mark is not None and mark.stored[0] is not None:
                # Pieces of the axis that the loop turns over: no slice is whole.
                values[number] = self.constrain(values[number], mark.computed)
                marks[number] = None
        carry = _carried(marks[num_consts:start], cuts[:num_carry])
        rows = [cut[1:] if cut and cut[0] is None else None for cut in cuts[num_carry:]]
        slices = [
            m and Partitioned(m.stored[1:], m.computed[1:]) for m in marks[start:]
        ]
        body = self._body(
            eqn.params["jaxpr"],
            [*marks[:num_consts], *carry, *slices],
            [*_pieces(carry, cuts), *rows],
            pinned=num_carry,
        )
        outs = bind(eqn, values, jaxpr=body)
        stacked = [None if row is None else _target_mark((None, *row)) for row in rows]
        return outs, [*carry, *stacked]

    def _while(
        self, eqn: core.JaxprEqn, values: list, marks: Marks, cuts: Targets
    ) -> tuple[list, Marks]:
        split = eqn.params["cond_nconsts"]
        start = split + eqn.params["body_nconsts"]
        carry = _carried(marks[start:], cuts)
        asked = self._body(eqn.params["cond_jaxpr"], [*marks[:split], *carry], [None])
        body = self._body(
            eqn.params["body_jaxpr"],
            [*marks[split:start], *carry],
            _pieces(carry, cuts),
            pinned=len(carry),
        )
        return bind(eqn, values, cond_jaxpr=asked, body_jaxpr=body), carry

    def _cond(
        self, eqn: core.JaxprEqn, values: list, marks: Marks, cuts: Targets
    ) -> tuple[list, Marks]:
        ways = tuple(
            self._body(way, marks[1:], cuts, pinned=len(cuts))
            for way in eqn.params["branches"]
        )
        after = [_target_mark(cut) for cut in cuts]
        return bind(eqn, values, branches=ways), after

    def _remat(
        self, eqn: core.JaxprEqn, values: list, marks: Marks, cuts: Targets
    ) -> tuple[list, Marks]:
        body = self._body(core.ClosedJaxpr(eqn.params["jaxpr"], ()), marks, cuts)
        after = [_target_mark(cut) for cut in cuts]
        return bind(eqn, values, jaxpr=body.jaxpr), after


_LOOPS: dict[str, Callable] = {
    "scan": _Emitter._scan,
    "while": _Emitter._while,
    "cond": _Emitter._cond,
    **dict.fromkeys(REMAT, _Emitter._remat),
}


def _apart(
    pairs: Sequence[tuple[Any, Partitioned | None]],
) -> tuple[list, list[Partitioned | None]]:
    return [value for value, _ in pairs], [mark for _, mark in pairs]


def _target_mark(cut: Cut | None) -> Partitioned | None:
    if cut is None or not any(cut):
        return None
    return Partitioned(stored=cut, computed=(None,) * len(cut))


def _carried(marks: Marks, cuts: Targets) -> list[Partitioned | None]:
    """Return the marks of values that a loop carries: as they came, or as wanted."""
    return [
        mark if mark is not None or cut is None else _target_mark(cut)
        for mark, cut in zip(marks, cuts, strict=True)
    ]


def _pieces(carry: Marks, cuts: Targets) -> list[Cut | None]:
    return [
        cut if mark is None else mark.stored
        for mark, cut in zip(carry, cuts, strict=False)
    ]


def _moved(eqn: core.JaxprEqn, mark: Partitioned) -> Partitioned | None:
    stored, computed = forward(eqn, mark.stored), forward(eqn, mark.computed)
    if stored is None or computed is None:
        return None
    return Partitioned(stored, computed)


def _holds_guarded(eqn: core.JaxprEqn) -> bool:
    return any(
        dataflow.find_equation(sub, lambda each: guards.guard_of(each) is not None)
        for sub in dataflow.sub_jaxprs(eqn)
    )


def _holds_program(eqn: core.JaxprEqn) -> bool:
    """Return whether it runs a program on arrays, not on two numbers as a scatter."""
    held = [var for inner in dataflow.sub_jaxprs(eqn) for var in inner.invars]
    return any(getattr(var.aval, "shape", ()) for var in held)

"""Plan a dataflow: computations, and moves between slices, as orders for each island.

A value is made in one layout on one slice. Where another slice takes it, its shards are
sent as soon as it is dispatched, and received just before they are taken. Orders have
positions: all islands execute them in this order, so none waits for what comes later.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from replicator.controller.computations import (
    alike,
    asked_specs,
    computation_of,
    of_host,
    reshard,
)
from replicator.controller.islands.protocol import (
    Call,
    Computation,
    Island,
    Order,
    Put,
    Receive,
    Send,
)
from replicator.controller.layouts import SliceLayout, plan_move
from replicator.controller.orders import Step, behind, with_drops
from replicator.controller.scheduling.planned import Plan, PlannedValue
from replicator.controller.slices import Slice
from replicator.controller.step_calls import StepCall
from replicator.controller.tracing.groups import Grouped, OpGroup, variables
from replicator.controller.tracing.trace import Functions, OpFunction, op_of, shape_of
from replicator.engine.analysis.source_lines import user_line
from replicator.errors import ArgumentError


def plan(
    closed: core.ClosedJaxpr,
    grouped: Grouped,
    functions: Functions,
    *,
    inputs: Sequence[tuple[Slice, SliceLayout] | None],
    islands: Mapping[str, Island],
) -> Plan:
    """Compile the computations of a dataflow, and plan its orders.

    Args:
      closed: Its equations.
      grouped: Its computations.
      functions: The functions that are ops.
      inputs: Where each input is; None for values of the host.
      islands: The islands.

    Raises:
      ArgumentError: A spec does not fit, an op donates what is used later, or a result
        is no op's.
    """
    planner = _Planner(closed, grouped, functions, islands)
    for position, (var, at) in enumerate(zip(closed.jaxpr.invars, inputs, strict=True)):
        planner.add_input(position, var, at)
    for number, group in enumerate(grouped.groups):
        planner.add_group(number, group)
    return planner.finished()


class _Planner:
    """Orders so far, with their positions, and where each value is."""

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        grouped: Grouped,
        functions: Functions,
        islands: Mapping[str, Island],
    ) -> None:
        self._closed = closed
        self._grouped = grouped
        self._functions = functions
        self._islands = islands
        self._constants = dict(
            zip(closed.jaxpr.constvars, map(of_host, closed.consts), strict=True)
        )
        self._steps: list[tuple[float, Step]] = []
        self._count = 0
        self._held: dict[core.Var, dict[str, list[PlannedValue]]] = {}
        self._made_at: dict[core.Var, float] = {}
        self._host: dict[core.Var, int] = {}
        self._inputs: dict[int, int] = {}
        self._puts: dict[int, list[int]] = {}
        self._donated: set[int] = set()
        self._moved_bytes = 0
        self._slices: dict[str, Slice] = {}
        self._sizes: dict[int, tuple[str, int]] = {}
        # What results or other computations take.
        self._needed = set(variables(closed.jaxpr.outvars))
        self._needed.update(*(group.taken for group in grouped.groups))
        self._computations: dict[Any, Computation] = {}
        self._layouts: dict[Computation, Sequence[SliceLayout]] = {}

    def add_input(
        self, position: int, var: core.Var, at: tuple[Slice, SliceLayout] | None
    ) -> None:
        """Note where an input is."""
        if at is None:
            self._host[var] = position
            return
        slice_, layout = at
        number = self._inputs[position] = self._next()
        self._keep(
            var, PlannedValue(number=number, slice=slice_, layout=layout), at=-1.0
        )

    def add_group(self, number: int, group: OpGroup) -> None:
        """Compile a computation; order it, and what brings its operands."""
        invars = [var for var in group.taken if var not in self._constants]
        outvars = [var for var in group.made if var in self._needed]
        if group.step is not None and not outvars:  # it is called for its effect
            outvars = group.made[:1]
        asked = self._asked(group)
        held = [self._there(v, group, asked.get(v), number) for v in invars]
        donated = tuple(
            at for at, var in enumerate(invars) if self._is_donated(var, group)
        )
        taken = {held[at][0] for at in donated}
        self._donated.update(at for at, n in self._inputs.items() if n in taken)
        given = {v: layout for v, (_, layout) in zip(invars, held, strict=True)}
        computation = self._computation(group, given, outvars, donated)
        outputs = [self._next() for _ in outvars]
        call = Call(
            computation=computation,
            inputs=tuple(each for each, _ in held),
            outputs=tuple(outputs),
        )
        text = f"{computation.name} on {_devices(group.slice)}"
        self._order(number, group.slice.island, call, text)
        layouts = self._layouts[computation]
        for var, value, layout in zip(outvars, outputs, layouts, strict=True):
            here = PlannedValue(number=value, slice=group.slice, layout=layout)
            self._keep(var, here, at=number)

    def _asked(self, group: OpGroup) -> dict[core.Var, SliceLayout]:
        """Return the layouts in which a computation wants values."""
        step = group.step
        if isinstance(step, StepCall) and not self._is_here(group):
            wanted = zip(group.eqns[0].invars, step.inputs, strict=True)
            return {var: at for var, at in wanted if isinstance(var, core.Var)}
        specs = asked_specs(group.eqns, self._functions)
        return {var: group.slice.layout(spec) for var, spec in specs.items()}

    def _is_here(self, group: OpGroup) -> bool:
        return self._islands[group.slice.island].is_here

    def finished(self) -> Plan:
        """Return the plan, in which values are dropped after their last use."""
        outputs = [self._result(atom) for atom in self._closed.jaxpr.outvars]
        steps = [step for _, step in sorted(self._steps, key=lambda each: each[0])]
        kept = {held.number for held in outputs}
        kept |= {n for at, n in self._inputs.items() if at not in self._donated}
        return Plan(
            steps=list(with_drops(steps, kept)),
            inputs=self._inputs,
            puts=self._puts,
            outputs=outputs,
            donated=frozenset(self._donated),
            behind=behind(steps, {held.number for held in outputs}),
            moved_bytes=self._moved_bytes,
            slices=self._slices,
            homes={name: each.island for name, each in self._slices.items()},
            sizes=self._sizes,
        )

    def _computation(
        self,
        group: OpGroup,
        given: Mapping[core.Var, SliceLayout | None],
        outvars: Sequence[core.Var],
        donated: tuple[int, ...],
    ) -> Computation:
        """Return the computation of a group, compiled once for calls that are alike."""
        key = alike(group.eqns, self._functions, given, outvars, donated)
        if key in self._computations:
            return self._computations[key]
        made = computation_of(
            group,
            whole=self._closed,
            functions=self._functions,
            constants=self._constants,
            inputs=given,
            outputs=outvars,
            donated=donated,
            is_here=self._is_here(group),
        )
        try:
            self._layouts[made] = self._islands[group.slice.island].load(made)
        except ArgumentError:
            raise
        except ValueError as failure:  # of JAX: a sharding that does not divide
            raise ArgumentError(
                f"op `{made.name}` must fit {group.slice}, got: "
                f"{str(failure).splitlines()[0]} ({made.line}). Change its "
                "function, or its specs."
            ) from failure
        if key is not None:
            self._computations[key] = made
        return made

    def _result(self, atom: core.Var | core.Literal) -> PlannedValue:
        home = None
        if not isinstance(atom, core.Literal):
            home = self._grouped.homes.get(atom)
        if home is None:
            raise ArgumentError(
                "`pw.program` must be given a function that returns results of ops, "
                "got one that returns an argument or an array from outside of it. "
                "Return it outside of the dataflow."
            )
        return self._held[atom][home.name][0]  # pyright: ignore[reportArgumentType]

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _order(self, at: float, island: str, order: Order, text: str) -> None:
        self._steps.append((at, Step(island=island, order=order, text=text)))

    def _keep(self, var: core.Var, held: PlannedValue, at: float) -> None:
        self._held.setdefault(var, {}).setdefault(held.slice.name, []).append(held)
        self._made_at.setdefault(var, at)
        self._slices[held.slice.name] = held.slice
        elements = held.layout.most_elements(shape_of(var).shape)
        size = elements * np.dtype(_bits(var.aval)).itemsize
        self._sizes[held.number] = held.slice.name, size

    def _there(
        self, var: core.Var, group: OpGroup, layout: SliceLayout | None, number: int
    ) -> tuple[int, SliceLayout | None]:
        """Return number and layout of a value on a slice; order what brings it."""
        slice_, at = group.slice, number - 0.5
        shape = shape_of(var).shape
        here = self._held.get(var, {}).get(slice_.name, [])
        if not here and var in self._host:
            return self._put(var, group, layout, at)
        if not here:
            here = [self._moved(var, slice_, layout, at)]
        wanted = here[0].layout if layout is None else layout
        boxes = wanted.boxes(shape)
        found = next((h for h in here if h.layout.boxes(shape) == boxes), None)
        if found is None:
            found = self._resharded(var, here[0], wanted, at)
        return found.number, found.layout

    def _put(
        self, var: core.Var, group: OpGroup, layout: SliceLayout | None, at: float
    ) -> tuple[int, SliceLayout | None]:
        slice_, number = group.slice, self._next()
        if layout is None and group.step is None:
            layout = slice_.layout()
        self._puts.setdefault(self._host[var], []).append(number)
        order = Put(output=number, places=slice_.places, layout=layout)
        text = f"put {var.aval.str_short()} on {_devices(slice_)}"
        self._order(at, slice_.island, order, text)
        if layout is not None:
            held = PlannedValue(number=number, slice=slice_, layout=layout)
            self._keep(var, held, at)
        return number, layout

    def _moved(
        self, var: core.Var, slice_: Slice, wanted: SliceLayout | None, at: float
    ) -> PlannedValue:
        """Move a value from the slice where it was made."""
        home = self._grouped.homes[var]
        source, made_at = self._held[var][home.name][0], self._made_at[var] + 0.25
        if wanted is None:
            axes = tuple(slice_.axes.items())
            wanted = source.layout if source.layout.axes == axes else slice_.layout()
        moves = plan_move(shape_of(var).shape, source.layout, wanted)
        if moves.before is not None:
            source = self._resharded(var, source, moves.before, made_at)
        number = self._next()
        size = moves.size * np.dtype(_bits(var.aval)).itemsize
        self._moved_bytes += size
        where = f"{_devices(home)} to {_devices(slice_)}"
        text = f"{var.aval.str_short()}, {size} bytes, {where}"
        send = Send(
            input=source.number,
            output=number,
            places=home.places,
            target=slice_.island,
            sources=moves.sources,
            targets=self._processes(slice_, range(len(slice_.places))),
        )
        self._order(made_at, home.island, send, f"send {text}")
        receive = Receive(
            source=home.island,
            output=number,
            places=slice_.places,
            senders=self._processes(home, moves.sources),
            layout=moves.arrived,
            shape=shape_of(var).shape,
        )
        self._order(at, slice_.island, receive, f"receive {text}")
        held = PlannedValue(number=number, slice=slice_, layout=moves.arrived)
        if moves.after is None:
            self._keep(var, held, at)
            return held
        return self._resharded(var, held, moves.after, at)

    def _processes(self, slice_: Slice, numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of the processes that have devices of a slice."""
        devices = self._islands[slice_.island].devices
        return tuple(devices[slice_.places[number]].process for number in numbers)

    def _resharded(
        self, var: core.Var, held: PlannedValue, layout: SliceLayout, at: float
    ) -> PlannedValue:
        slice_ = held.slice
        computation = reshard(var, slice_, held.layout, layout)
        self._islands[slice_.island].load(computation)
        result = PlannedValue(number=self._next(), slice=slice_, layout=layout)
        order = Call(
            computation=computation, inputs=(held.number,), outputs=(result.number,)
        )
        layouts = f"{_text(held.layout)} to {_text(layout)}"
        text = f"reshard {var.aval.str_short()} from {layouts} on {_devices(slice_)}"
        self._order(at, slice_.island, order, text)
        self._keep(var, result, at)
        return result

    def _is_donated(self, var: core.Var, group: OpGroup) -> bool:
        """Return whether an op of a computation takes the memory of a value."""
        for eqn in group.eqns:
            op = op_of(eqn, self._functions)
            if op is None or not _donates(eqn, var, op):
                continue
            uses = [
                other for other in self._grouped.eqns if var in variables(other.invars)
            ]
            if uses != [eqn] or var in variables(self._closed.jaxpr.outvars):
                later = next((each for each in uses if each is not eqn), eqn)
                raise ArgumentError(
                    f"op `{op.label}` must donate what nothing else uses, got "
                    f"{var.aval.str_short()} that is used again at "
                    f"{user_line(later)}. "
                    "Leave it out of `donate`, or use what the op returns."
                )
            return True
        return False


def _devices(slice_: Slice) -> str:
    return f"{slice_.island}:{','.join(map(str, slice_.places))}"


def _text(layout: SliceLayout) -> str:
    return f"{layout.spec} of {dict(layout.axes)}"


def _donates(eqn: core.JaxprEqn, var: core.Var, op: OpFunction) -> bool:
    pairs = zip(eqn.invars, eqn.params["donated_invars"], strict=True)
    return any(atom is var and donated for atom, donated in pairs)


def _bits(aval: Any) -> Any:
    is_plain = isinstance(aval.dtype, np.dtype)
    return aval.dtype if is_plain else np.dtype("uint64")

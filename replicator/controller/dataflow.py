"""Dataflows: traced and planned, to be called, printed and drawn."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicator.base.types import PyTree
from replicator.controller.islands.protocol import Drop
from replicator.controller.scheduling.planned import Plan
from replicator.controller.tracing.groups import Grouped, variables
from replicator.controller.tracing.trace import Functions, Traced, op_of, shape_of
from replicator.engine.analysis.source_lines import user_line
from replicator.errors import ArgumentError
from replicator.monitoring.drawing.graph import Graph, GraphEdge, Vertex
from replicator.monitoring.drawing.layout import lay_out
from replicator.monitoring.drawing.svg import svg_of


class Dataflow:
    """A traced function: ops on slices, and the moves between them.

    Call it with arguments of the shapes that it was traced for. Its text has a line for
    each op, however many devices it runs on.

    Attributes:
      name: Name of the function.
    """

    def __init__(
        self,
        name: str,
        traced: Traced,
        grouped: Grouped,
        plan: Plan,
        *,
        functions: Functions,
        signature: Any,
        current: Callable[[Plan], Plan],
        run: Callable[["Dataflow", Sequence[Any]], list[Any]],
        look: Callable[[Sequence[PyTree]], tuple[Sequence[Any], Any]],
    ) -> None:
        self.name = name
        self._plan = plan
        self._current = current
        self._traced = traced
        self._grouped = grouped
        self._functions = functions
        self._signature = signature
        self._run = run
        self._look = look

    def __call__(self, *args: Any) -> PyTree:
        """Run it; return futures at once.

        Raises:
          ArgumentError: The arguments are not those that it was traced for.
        """
        leaves, signature = self._look(args)
        if signature != self._signature:
            raise ArgumentError(
                f"dataflow `{self.name}` must be called with the structure, shapes, "
                f"dtypes and slices that it was traced for, got "
                f"{_difference(self._signature, signature)}. Call the function itself, "
                "which is traced for each."
            )
        return self.run(leaves)

    def run(self, leaves: Sequence[Any]) -> PyTree:
        """Run it on the leaves of its arguments, which were looked at."""
        return jax.tree.unflatten(self._traced.out_tree, self._run(self, leaves))

    @property
    def plan(self) -> Plan:
        """What islands do for it; planned again here, if a slice of it has moved.

        Raises:
          IslandLostError: A slice of it has no island any more.
        """
        self._plan = self._current(self._plan)
        return self._plan

    @functools.cached_property
    def result_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each result."""
        return list(map(shape_of, self._traced.closed.jaxpr.outvars))

    @property
    def moved_bytes(self) -> int:
        """Bytes that a run moves from slice to slice."""
        return self.plan.moved_bytes

    def __str__(self) -> str:
        """Return its virtual form: an op a line, by slices."""
        jaxpr = self._traced.closed.jaxpr
        names = {var: f"%in{n}" for n, var in enumerate(jaxpr.invars)}
        lines = [f"dataflow {self.name}({', '.join(names.values())})"]
        for number, group in enumerate(self._grouped.groups):
            names.update({v: f"%{len(names) + n}" for n, v in enumerate(group.made)})
            for eqn in group.eqns:
                op = op_of(eqn, self._functions)
                label = op.label if op is not None else eqn.primitive.name
                taken = ", ".join(names.get(v, "const") for v in variables(eqn.invars))
                results = ", ".join(names[v] for v in eqn.outvars)
                what = ", ".join(v.aval.str_short() for v in eqn.outvars)
                call = f"{results} = {label}({taken}): {what}"
                lines.append(f"  {group.slice.name} [{number}] {call}")
        outs = ", ".join(names.get(v, "const") for v in variables(jaxpr.outvars))
        return "\n".join([*lines, f"  return {outs}"])

    def physical(self) -> str:
        """Return its physical form: an order a line, with devices and bytes."""
        orders = (s for s in self.plan.steps if not isinstance(s.order, Drop))
        return "\n".join(f"  {n} {step.text}" for n, step in enumerate(orders))

    def to_svg(self) -> str:
        """Return its picture: an op a box, in a frame for each slice."""
        return svg_of(lay_out(self._graph()))

    def _graph(self) -> Graph:
        named = {
            f"{n} {' + '.join(group.names)}": group
            for n, group in enumerate(self._grouped.groups)
        }
        named = dict(sorted(named.items(), key=lambda each: each[1].slice.name))
        maker = {var: name for name, group in named.items() for var in group.made}
        vertices = [
            Vertex(
                name=name,
                label=f"{group.slice.name} on {group.slice.island}",
                kind="op",
                text=user_line(group.eqns[0]).rpartition("/")[2],
            )
            for name, group in named.items()
        ]
        edges = [
            GraphEdge(source=maker[var], target=name, argument=var.aval.str_short())
            for name, group in named.items()
            for var in group.taken
            if var in maker
        ]
        return Graph(
            program=self.name,
            vertices=vertices,
            edges=edges,
            kind="dataflow",
            edges_are="values",
        )


def _difference(traced: Any, given: Any) -> str:
    if traced[0] != given[0]:
        return f"{given[0]}, where {traced[0]} was traced"
    pairs = zip(traced[1], given[1], strict=True)
    position, (was, now) = next(
        (n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1]
    )
    return f"{_text(now)} where leaf {position} was {_text(was)}"


def _text(look: Any) -> str:
    where = f" on {look.slice}" if look.slice else ""
    return f"{look.dtype}{list(look.shape)}{where}"

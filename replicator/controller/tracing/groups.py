"""Give every equation a slice, and fuse neighbours into one computation.

A stray operation goes with the op that takes its result, on each slice that does; one
whose result only the caller takes stays where its operands are. An op joins the
computation before it on its slice, if that makes nobody wait: neither it for another
slice, nor another slice for it.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jax.extend import core

from replicator.controller.slices import Slice
from replicator.controller.step_calls import StepCall
from replicator.controller.tracing.host_calls import HostCall
from replicator.controller.tracing.trace import Functions, OpFunction, op_of
from replicator.engine.analysis.source_lines import user_line
from replicator.errors import ArgumentError


@dataclasses.dataclass(kw_only=True, eq=False)
class OpGroup:
    """Equations that become one computation of a slice.

    Attributes:
      slice: Where it runs.
      eqns: Its equations.
      names: Labels of its ops; of its operations, if it has no op.
      step: A step of `rep.compile`, or a function of `pw.host`: a computation alone.
      waits_for: Values of other slices that it, or what is before it, takes.
    """

    slice: Slice
    eqns: list[core.JaxprEqn]
    names: list[str]
    step: StepCall | HostCall | None
    waits_for: set[core.Var] = dataclasses.field(default_factory=set)

    @property
    def made(self) -> list[core.Var]:
        """Values that it makes."""
        return [var for eqn in self.eqns for var in eqn.outvars]

    @property
    def taken(self) -> list[core.Var]:
        """Values that it takes, and does not make."""
        used = dict.fromkeys(var for eqn in self.eqns for var in variables(eqn.invars))
        made = set(self.made)
        return [var for var in used if var not in made]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """All computations of a dataflow.

    Attributes:
      eqns: Equations that something needs.
      groups: Computations, each after those whose values it takes.
      homes: Slice on which each value is made.
    """

    eqns: Sequence[core.JaxprEqn]
    groups: Sequence[OpGroup]
    homes: Mapping[core.Var, Slice]


def grouped(
    closed: core.ClosedJaxpr,
    homes: Sequence[Slice | None],
    functions: Functions,
    *,
    fuse: bool,
) -> Grouped:
    """Return the computations of a traced function.

    Args:
      closed: Its equations.
      homes: Slice of each input; None for values of the host.
      functions: The functions that are ops.
      fuse: Whether neighbours become one computation.

    Raises:
      ArgumentError: An operation belongs to no slice.
    """
    eqns = _live(closed.jaxpr)
    ops = [op_of(eqn, functions) for eqn in eqns]
    given = dict(zip(closed.jaxpr.invars, homes, strict=True))
    places, wanted = _places(eqns, ops, given)
    leaders = _leaders(eqns, ops, places)
    groups = _joined(eqns, ops, places, leaders, wanted if fuse else None)
    made = {
        var: places[number][0] for number, eqn in enumerate(eqns) for var in eqn.outvars
    }
    held = {var: home for var, home in given.items() if home is not None}
    return Grouped(eqns=eqns, groups=groups, homes={**held, **made})


def variables(atoms: Sequence[core.Var | core.Literal]) -> list[core.Var]:
    """Return the variables among operands."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _live(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """Return the equations that results or effects need."""
    needed, kept = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or needed.intersection(eqn.outvars):
            kept.append(eqn)
            needed.update(variables(eqn.invars))
    return kept[::-1]


_Places = list[list[Slice]]
_Wanted = dict[core.Var, dict[str, Slice]]


def _places(
    eqns: Sequence[core.JaxprEqn],
    ops: Sequence[OpFunction | None],
    given: Mapping[core.Var, Slice | None],
) -> tuple[_Places, _Wanted]:
    """Return the slices of each equation, and those that take each value."""
    origins: dict[core.Var, dict[str, Slice]] = {
        var: {} if home is None else {home.name: home} for var, home in given.items()
    }
    for eqn, op in zip(eqns, ops, strict=True):
        found = _known(eqn.invars, origins)
        for var in eqn.outvars:
            origins[var] = found if op is None else {op.slice.name: op.slice}
    first = next((op.slice for op in ops if op is not None), None)
    wanted: _Wanted = {}
    places: _Places = []
    for eqn, op in zip(reversed(eqns), reversed(ops), strict=True):
        if op is not None:
            here = [op.slice]
        elif takers := _known(eqn.outvars, wanted):
            here = list(takers.values())
        else:
            here = [_home(eqn, origins, first)]
        places.append(here)
        for var in variables(eqn.invars):
            wanted.setdefault(var, {}).update({each.name: each for each in here})
    return places[::-1], wanted


def _known(
    atoms: Sequence[core.Var | core.Literal],
    slices: Mapping[core.Var, Mapping[str, Slice]],
) -> dict[str, Slice]:
    """Return the slices of all of some values, by name."""
    every = (slices.get(var, {}) for var in variables(atoms))
    return {name: each for some in every for name, each in some.items()}


def _home(
    eqn: core.JaxprEqn,
    origins: Mapping[core.Var, Mapping[str, Slice]],
    first: Slice | None,
) -> Slice:
    """Return the slice of an operation whose result no op takes."""
    found = _known(eqn.invars, origins)
    if not found and not variables(eqn.invars) and first is not None:
        return first
    if len(found) == 1:
        return next(iter(found.values()))
    what = (
        f"values of {' and '.join(sorted(found))}" if found else "no value of a slice"
    )
    raise ArgumentError(
        f"`{eqn.primitive.name}` must belong to a slice, got {what} at "
        f"{user_line(eqn)}. Do it inside of a function of `pw.fn`, or after "
        "`result()`."
    )


_At = tuple[int, str]
"""Number of an equation, and a slice on which it runs."""


def _leaders(
    eqns: Sequence[core.JaxprEqn], ops: Sequence[OpFunction | None], places: _Places
) -> dict[_At, _At]:
    """Return, for each equation, the op that it goes with: the first that needs it."""
    alone = {n for n, op in enumerate(ops) if op is not None and op.step is not None}
    firsts: dict[tuple[core.Var, str], _At] = {}  # that need a value, on a slice
    leaders: dict[_At, _At] = {}
    for number in reversed(range(len(eqns))):
        for each in places[number]:
            at = number, each.name
            made = ((var, each.name) for var in eqns[number].outvars)
            first = min((firsts[one] for one in made if one in firsts), default=at)
            is_stray = ops[number] is None and first[0] not in alone
            leader = leaders[at] = first if is_stray else at
            for var in variables(eqns[number].invars):
                taken = var, each.name
                firsts[taken] = min(firsts.get(taken, leader), leader)
    return leaders


def _joined(
    eqns: Sequence[core.JaxprEqn],
    ops: Sequence[OpFunction | None],
    places: _Places,
    leaders: Mapping[_At, _At],
    wanted: _Wanted | None,
) -> list[OpGroup]:
    """Make the computations; with `wanted`, neighbours are fused."""
    made_by = {var: number for number, eqn in enumerate(eqns) for var in eqn.outvars}
    members: dict[_At, list[int]] = {}
    for at, leader in leaders.items():
        members.setdefault(leader, []).append(at[0])
    groups: dict[_At, OpGroup] = {}
    for leader in sorted(members):
        number, name = leader
        op = ops[number]
        group = OpGroup(
            slice=next(each for each in places[number] if each.name == name),
            eqns=[eqns[each] for each in sorted(members[leader])],
            names=[op.label if op is not None else eqns[number].primitive.name],
            step=op.step if op is not None else None,
        )
        before: set[OpGroup] = set()
        for var in group.taken:
            at = leaders.get((made_by[var], name)) if var in made_by else None
            if at is not None:
                before.add(groups[at])
            elif var in made_by:
                group.waits_for.add(var)
        group.waits_for.update(*(each.waits_for for each in before))
        if wanted is not None and len(before) == 1:
            (one,) = before
            if _may_join(group, one, wanted):
                one.eqns.extend(group.eqns)
                one.names.extend(group.names if op is not None else ())
                group = one
        groups[leader] = group
    found = list(dict.fromkeys(groups.values()))
    number_of = {id(eqn): number for number, eqn in enumerate(eqns)}
    for group in found:
        group.eqns.sort(key=lambda eqn: number_of[id(eqn)])
    return found


def _may_join(group: OpGroup, before: OpGroup, wanted: _Wanted) -> bool:
    others = (set(wanted.get(var, ())) - {group.slice.name} for var in before.made)
    is_awaited = any(others)
    is_step = group.step is not None or before.step is not None
    return not is_step and not is_awaited and group.waits_for <= before.waits_for

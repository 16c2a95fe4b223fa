"""Follow marks forward through a jaxpr: what does each output depend on?

A mark says something about a value ("may differ between replicas", "depends on the
summed gradients"). `flow` walks the equations in order: a rule may decide an equation;
otherwise calls are entered, loops are walked until nothing changes, branches are joined
with their predicate, and an equation that nobody knows joins all its inputs. Marks only
ever grow, so the walk ends.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jax.extend import core

Mark = TypeVar("Mark")


class Rules(Protocol, Generic[Mark]):
    """What one analysis knows: its bottom, its join, and its own equations."""

    clean: Mark

    def join(self, marks: Sequence[Mark]) -> Mark:
        """Return the mark of a value computed from values with `marks`."""
        ...

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[Mark]
    ) -> Sequence[Mark] | None:
        """Return the marks of the outputs of `eqn`, or None to leave it to `flow`."""
        ...

    def inside(self, eqn: core.JaxprEqn) -> "Rules[Mark]":
        """Return the rules for the equations inside `eqn`."""
        ...

    def check_branch(self, eqn: core.JaxprEqn, predicate: Mark) -> None:
        """Look at a branch or loop whose way `predicate` decides; may raise."""
        ...


class DependsOn:
    """Which of some marked inputs, by number, a value depends on."""

    clean: frozenset[int] = frozenset()

    def join(self, marks: Sequence[frozenset[int]]) -> frozenset[int]:
        """Return all the inputs that `marks` name."""
        return frozenset().union(*marks)

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[frozenset[int]]
    ) -> Sequence[frozenset[int]] | None:
        """Leave every equation to `flow`."""

    def inside(self, eqn: core.JaxprEqn) -> "DependsOn":
        """Look at equations inside `eqn` as at all others."""
        return self

    def check_branch(self, eqn: core.JaxprEqn, predicate: frozenset[int]) -> None:
        """Accept any branch."""


def flow(jaxpr: core.Jaxpr, in_marks: Sequence[Mark], rules: Rules[Mark]) -> list[Mark]:
    """Return the marks of the outputs of `jaxpr`.

    Args:
      jaxpr: An open jaxpr; its constants are clean.
      in_marks: One mark per input variable.
      rules: The analysis.

    Returns:
      One mark per output variable.
    """
    env: dict[core.Var, Mark] = {var: rules.clean for var in jaxpr.constvars}
    env.update(zip(jaxpr.invars, in_marks, strict=True))

    def read(atom: core.Var | core.Literal) -> Mark:
        return rules.clean if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        marks = [read(atom) for atom in eqn.invars]
        decided = rules.decide(eqn, marks)
        outs = _walk(eqn, marks, rules) if decided is None else decided
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def sub_jaxprs(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """List the jaxprs that the parameters of `eqn` hold, opened."""
    return [
        _open(value)
        for param in eqn.params.values()
        for value in (param if isinstance(param, tuple) else (param,))
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
    ]


def find_equation(
    jaxpr: core.Jaxpr, predicate: Callable[[core.JaxprEqn], bool]
) -> core.JaxprEqn | None:
    """Return an equation of `jaxpr`, however deep, that satisfies `predicate`."""
    for eqn in jaxpr.eqns:
        if predicate(eqn):
            return eqn
        for sub in sub_jaxprs(eqn):
            if (found := find_equation(sub, predicate)) is not None:
                return found
    return None


def is_collective(eqn: core.JaxprEqn, axis_name: str) -> bool:
    """Tell whether a device waits for others in `eqn`, over the axis `axis_name`."""
    # Asking for its own place, it waits for nobody.
    return eqn.primitive.name != "axis_index" and over_axis(eqn, axis_name)


def over_axis(eqn: core.JaxprEqn, axis_name: str) -> bool:
    """Tell whether `eqn` speaks of the mesh axis `axis_name`."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axis_name in (axes if isinstance(axes, (tuple, list)) else (axes,))


def _open(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _walk(eqn: core.JaxprEqn, marks: list, rules: Rules) -> Sequence:
    structural = _STRUCTURAL.get(eqn.primitive.name)
    if structural is not None:
        return structural(eqn, marks, rules.inside(eqn))
    subs = sub_jaxprs(eqn)
    if not subs:  # nearly all: looking up its line for what is inside takes time
        return [rules.join(marks)] * len(eqn.outvars)
    rules = rules.inside(eqn)
    if len(subs) == 1 and _is_call(eqn, subs[0]):
        return flow(subs[0], marks, rules)
    # What an unknown primitive does inside is not known: whatever marks it could make
    # from clean inputs reach all its outputs, with those of its own inputs.
    inside = [
        mark
        for sub in subs
        for mark in flow(sub, [rules.clean] * len(sub.invars), rules)
    ]
    return [rules.join([*marks, *inside])] * len(eqn.outvars)


def _is_call(eqn: core.JaxprEqn, sub: core.Jaxpr) -> bool:
    return len(sub.invars) == len(eqn.invars) and len(sub.outvars) == len(eqn.outvars)


def _scan(eqn: core.JaxprEqn, marks: list, rules: Rules) -> list:
    num_consts, num_carry = _scan_sizes(eqn)
    consts, xs = marks[:num_consts], marks[num_consts + num_carry :]
    body = functools.partial(flow, _open(eqn.params["jaxpr"]), rules=rules)
    carry = marks[num_consts : num_consts + num_carry]
    carry, outs = _fixed_point(lambda c: body([*consts, *c, *xs]), carry, rules)
    return [*carry, *outs[num_carry:]]


def _scan_sizes(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Return how many of the inputs of a `scan` are constants, and how many carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def _while(eqn: core.JaxprEqn, marks: list, rules: Rules) -> list:
    split = eqn.params["cond_nconsts"]
    start = split + eqn.params["body_nconsts"]
    cond_consts, body_consts, carry = marks[:split], marks[split:start], marks[start:]
    cond, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])

    def turn(carry: list) -> list:
        # How often the loop turns decides every value that it carries.
        [again] = flow(cond, [*cond_consts, *carry], rules)
        rules.check_branch(eqn, again)
        outs = flow(body, [*body_consts, *carry], rules)
        return [rules.join([out, again]) for out in outs]

    return _fixed_point(turn, carry, rules)[0]


def _cond(eqn: core.JaxprEqn, marks: list, rules: Rules) -> list:
    index, *operands = marks
    rules.check_branch(eqn, index)
    outs = [flow(_open(b), operands, rules) for b in eqn.params["branches"]]
    return [rules.join([index, *column]) for column in zip(*outs, strict=True)]


_STRUCTURAL = {"scan": _scan, "while": _while, "cond": _cond}


def _fixed_point(
    turn: Callable[[list], list], carry: list, rules: Rules
) -> tuple[list, list[Any]]:
    """Repeat `turn` until the carry no longer grows; return it and the last outputs."""
    while True:
        outs = turn(carry)
        grown = [rules.join([old, new]) for old, new in zip(carry, outs, strict=False)]
        if grown == carry:
            return carry, outs
        carry = grown

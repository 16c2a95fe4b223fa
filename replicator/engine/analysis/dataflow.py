"""Follow marks forward through a jaxpr: the dependences of each output.

A mark is a fact about a value ("may differ between replicas", "depends on the summed
gradients"). `flow` walks the equations in order: a rule may decide an equation;
otherwise calls are entered, loops are walked until nothing changes, branches are joined
with their predicate, and an unknown equation joins all its inputs with all results that
the jaxprs inside it could have. The mark of a mutable array is that of its content: a
write changes it, also from inside a call. Marks only ever grow, so the walk ends.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeGuard, TypeVar

from jax.extend import core

from replicator.engine.analysis.evaluator import CALLS, REMAT

Mark = TypeVar("Mark")
Extra = TypeVar("Extra")


class Rules(abc.ABC, Generic[Mark]):
    """Rules of one analysis: its bottom, its join, and its own equations, if any."""

    clean: Mark

    def literal(self, atom: core.Literal) -> Mark:
        """Return the mark of a number that an equation holds."""
        return self.clean

    @abc.abstractmethod
    def join(self, marks: Sequence[Mark]) -> Mark:
        """Return the mark of a value computed from values with `marks`."""

    def decide(
        self, eqn: core.JaxprEqn, marks: Sequence[Mark]
    ) -> Sequence[Mark] | None:
        """Return the marks of the outputs of `eqn`, or None to leave it to `flow`."""

    def inside(self, eqn: core.JaxprEqn) -> "Rules[Mark]":
        """Return the rules for the equations inside `eqn`."""
        return self

    def check_branch(self, eqn: core.JaxprEqn, predicate: Mark) -> None:
        """Look at an equation whose way inside `predicate` decides; may raise."""


class DependsOn(Rules[frozenset[int]]):
    """Rules to find the marked inputs, by number, that a value depends on."""

    clean: frozenset[int] = frozenset()

    def join(self, marks: Sequence[frozenset[int]]) -> frozenset[int]:
        """Return all the inputs that `marks` name."""
        return frozenset().union(*marks)


def flow(
    jaxpr: core.Jaxpr,
    in_marks: Sequence[Mark],
    rules: Rules[Mark],
    *,
    constants: Sequence[Mark] = (),
) -> list[Mark]:
    """Return the marks of the outputs of `jaxpr`.

    Args:
      jaxpr: An open jaxpr.
      in_marks: One mark per input variable.
      rules: The analysis.
      constants: One mark per constant; clean by default.

    Returns:
      One mark per output variable.

    >>> jaxpr = jax.make_jaxpr(lambda a, b, c: (a + b, jnp.sin(c)))(1.0, 2.0, 3.0).jaxpr
    >>> marks = [frozenset({n}) for n in range(3)]
    >>> [sorted(mark) for mark in flow(jaxpr, marks, DependsOn())]
    [[0, 1], [2]]
    """
    return _run(jaxpr, in_marks, rules, constants)[0]


def sub_jaxprs(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    """List the jaxprs that the parameters of `eqn` hold, opened."""
    # jax 0.12 keeps those of `custom_root` in an object.
    hidden = getattr(eqn.params.get("_prim"), "params", {})
    return [
        *core.jaxprs_in_params(eqn.params),
        *core.jaxprs_in_params(hidden),
    ]


def find_equation(
    jaxpr: core.Jaxpr,
    predicate: Callable[[core.JaxprEqn], bool],
    *,
    but_in: str | None = None,
) -> core.JaxprEqn | None:
    """Return an equation of `jaxpr`, however deep, that satisfies `predicate`.

    Args:
      jaxpr: The program.
      predicate: Whether an equation is the one.
      but_in: A name scope whose equations are left out.

    >>> jaxpr = jax.make_jaxpr(jax.jit(jnp.sin))(1.0).jaxpr
    >>> find_equation(jaxpr, lambda eqn: eqn.primitive.name == "sin").primitive
    sin
    """
    return next(filter(predicate, equations(jaxpr, but_in=but_in)), None)


def equations(
    jaxpr: core.Jaxpr, *, but_in: str | None = None
) -> Iterator[core.JaxprEqn]:
    """Yield all equations of `jaxpr`, however deep, as `find_equation` walks them."""
    for eqn in jaxpr.eqns:
        if but_in is not None and but_in in str(eqn.source_info.name_stack):
            continue  # with all equations inside, which may not be in the scope
        yield eqn
        for sub in sub_jaxprs(eqn):
            yield from equations(sub, but_in=but_in)


def find_collective(
    jaxpr: core.Jaxpr, axis_name: str, *, but_in: str | None = None
) -> core.JaxprEqn | None:
    """Return an equation in which a device waits for others, as `find_equation`."""

    def waits(eqn: core.JaxprEqn) -> bool:
        # To ask for its own place takes no waiting.
        return eqn.primitive.name != "axis_index" and over_axis(eqn, axis_name)

    return find_equation(jaxpr, waits, but_in=but_in)


def computing(
    jaxpr: core.Jaxpr, variable: core.Var | core.Literal
) -> list[core.JaxprEqn]:
    """Return the equation that computes `variable`, after those that hold it."""
    for eqn in jaxpr.eqns:
        for place, out in enumerate(eqn.outvars):
            if out is variable:
                for sub in sub_jaxprs(eqn):
                    alike = len(sub.outvars) == len(eqn.outvars)
                    if alike and (inside := computing(sub, sub.outvars[place])):
                        return [eqn, *inside]
                return [eqn]
    return []


def shape_of(atom: core.Var | core.Literal) -> tuple[int, ...]:
    """Return the shape of a value; () for a value without one."""
    return getattr(atom.aval, "shape", ())


def over_axis(eqn: core.JaxprEqn, axis_name: str) -> bool:
    """Return whether `eqn` names the mesh axis `axis_name`."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return axis_name in (axes if isinstance(axes, (tuple, list)) else (axes,))


_NARROWING_TURNS = 4

# They run the one jaxpr that they hold once, on their inputs, and return its outputs.
# Its form alone is not enough: `reduce` and `run_state` look alike.
_CALLS = (
    CALLS
    | REMAT
    | {
        *("call", "eval_jaxpr", "remat_opt", "custom_vmap_call", "linear_call"),
        *("composite", "compute_on"),
        "program_order",  # jax 0.12: keeps the order of effects
        # Whole programs are followed, too, for reads of a batch's mask.
        *("xla_metadata_call", "shard_map"),
    }
)


def _open(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _run(
    jaxpr: core.Jaxpr,
    in_marks: Sequence[Mark],
    rules: Rules[Mark],
    constants: Sequence[Mark] = (),
) -> tuple[list[Mark], list[Mark]]:
    """Return the marks of outputs, and those of inputs after all writes."""
    clean, literal = rules.clean, rules.literal
    env: dict[core.Var, Mark] = {var: clean for var in jaxpr.constvars}
    env.update(zip(jaxpr.constvars, constants, strict=False))
    env.update(zip(jaxpr.invars, in_marks, strict=True))

    def read(atom: core.Var | core.Literal) -> Mark:
        return literal(atom) if type(atom) is core.Literal else env[atom]

    for eqn in jaxpr.eqns:
        marks = [literal(x) if type(x) is core.Literal else env[x] for x in eqn.invars]
        outs = rules.decide(eqn, marks)
        if outs is None:
            outs, after = _walk(eqn, marks, rules)
            if eqn.effects:
                for atom, mark in zip(eqn.invars, after, strict=True):
                    if is_mutable(atom):
                        env[atom] = mark
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], [env[var] for var in jaxpr.invars]


def is_mutable(atom: core.Var | core.Literal) -> TypeGuard[core.Var]:
    """Return whether a value is a mutable array, which an equation may write into."""
    return hasattr(atom.aval, "inner_aval")


def _walk(
    eqn: core.JaxprEqn, marks: list[Mark], rules: Rules[Mark]
) -> tuple[Sequence[Mark], Sequence[Mark]]:
    """Return the marks of the outputs of `eqn`, and those of its inputs after it."""
    name = eqn.primitive.name
    if (structural := _STRUCTURAL.get(name)) is not None:
        return structural(eqn, marks, rules.inside(eqn))
    if (leaf := _LEAVES.get(name)) is not None:
        return leaf(eqn, marks, rules)
    subs = sub_jaxprs(eqn)
    if not subs:  # nearly all
        joined = rules.join(marks)
        return [joined] * len(eqn.outvars), [joined] * len(marks)
    taken = len(subs[0].invars)
    if (name in _CALLS and len(subs) == 1 and taken == len(marks)) or _is_root(eqn):
        outs, after = _run(subs[0], marks[:taken], rules.inside(eqn))
        return outs, [*after, *marks[taken:]]
    return _unknown(eqn, marks, rules)


def _is_root(eqn: core.JaxprEqn) -> bool:
    """Return whether `eqn` is a `custom_root` of jax 0.12, which runs only `solve`.

    Its first inputs are those of `solve`; the others are for derivatives.
    """
    return type(eqn.params.get("_prim")).__name__ == "CustomRoot"


def _unknown(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    """Join all inputs with all results that the bodies could have, in any order."""
    joined = rules.join(marks)
    rules.check_branch(eqn, joined)
    inner = rules.inside(eqn)
    while True:
        made = [joined]
        for sub in sub_jaxprs(eqn):
            outs, after = _run(sub, [joined] * len(sub.invars), inner)
            made += outs + after
        grown = rules.join(made)
        if grown == joined:
            return [joined] * len(eqn.outvars), [joined] * len(marks)
        joined = grown


def _scan(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    num_consts, num_carry = scan_sizes(eqn)
    start = num_consts + num_carry
    body, xs = _open(eqn.params["jaxpr"]), marks[start:]

    def turn(state: list) -> tuple[list, list]:
        outs, after = _run(body, [*state, *xs], rules)
        return [*after[:num_consts], *outs[:num_carry]], outs

    state, (after, outs) = _fixed_point(turn, marks[:start], rules)
    length = eqn.params["length"]
    if not length:
        return [*marks[num_consts:start], *outs[num_carry:]], marks
    # The loop returns results of its last turn: its first values, and with more turns
    # those of the first turns, are replaced.
    for _ in range(min(length, _NARROWING_TURNS) - 1):
        if after == state:
            break
        state, (after, _) = after, turn(after)
    return [*after[num_consts:], *outs[num_carry:]], [*after, *xs]


def scan_sizes(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a `scan`."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(consts), len(carry)


def _while(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    split = eqn.params["cond_nconsts"]
    start = split + eqn.params["body_nconsts"]
    cond, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])

    def turn(state: list) -> tuple[list, None]:
        [again], seen = _run(cond, [*state[:split], *state[start:]], rules)
        rules.check_branch(eqn, again)
        outs, after = _run(body, state[split:], rules)
        consts = [*seen[:split], *after[: start - split]]
        # The number of turns decides every value that the loop carries.
        carry = [rules.join([out, again]) for out in outs]
        return [*_decided(eqn.invars, consts, again, rules), *carry], None

    state, _ = _fixed_point(turn, marks, rules)
    return state[start:], state


def _cond(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    index, *operands = marks
    rules.check_branch(eqn, index)
    ways = [_run(_open(b), operands, rules) for b in eqn.params["branches"]]
    outs, after = (
        [rules.join(column) for column in zip(*rows, strict=True)]
        for rows in zip(*ways, strict=True)
    )
    after = _decided(eqn.invars[1:], after, index, rules)
    return [rules.join([index, out]) for out in outs], [index, *after]


def _decided(atoms: Sequence, marks: Sequence, predicate: Any, rules: Rules) -> list:
    """Add `predicate` to the marks of mutable arrays: it decides about writes."""
    return [
        rules.join([mark, predicate]) if is_mutable(atom) else mark
        for atom, mark in zip(atoms, marks, strict=False)
    ]


def _linear_solve(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    # Only `solve` runs; the other three are there for derivatives.
    sizes = eqn.params["const_lengths"]
    start, end = sizes.matvec + sizes.vecmat, sum(sizes)
    consts = marks[start : start + sizes.solve]
    solve = _open(eqn.params["jaxprs"].solve)
    return _run(solve, [*consts, *marks[end:]], rules)[0], marks


def _run_state(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    body = _open(eqn.params["jaxpr"])
    if len(body.invars) != len(marks) or any(map(is_mutable, eqn.invars)):
        return _unknown(eqn, marks, rules)
    _, after = _run(body, marks, rules)  # it returns the contents of its arrays
    return after, marks


_STRUCTURAL = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "run_state": _run_state,
}


def _each_its_own(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    return marks, marks


def _read(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    return [rules.join(marks)], marks


def _swap(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    array, value, *indices = eqn.invars
    joined = rules.join(marks)
    shapes = [getattr(atom.aval, "shape", None) for atom in (array, value)]
    whole = not indices and shapes[0] == shapes[1]
    content = marks[1] if whole else joined
    return [rules.join([marks[0], *marks[2:]])], [content, *marks[1:]]


def _sort(eqn: core.JaxprEqn, marks: list, rules: Rules) -> tuple[list, list]:
    order = rules.join(marks[: eqn.params["num_keys"]])
    return [rules.join([order, mark]) for mark in marks], marks


_LEAVES = {
    "optimization_barrier": _each_its_own,
    "get": _read,
    "freeze": _read,
    "swap": _swap,
    "sort": _sort,
}


def _fixed_point(
    turn: Callable[[list], tuple[list, Extra]], state: list, rules: Rules
) -> tuple[list, tuple[list, Extra]]:
    """Repeat `turn` until the state no longer grows; return it and the last turn's."""
    while True:
        made = turn(state)
        grown = [rules.join(pair) for pair in zip(state, made[0], strict=True)]
        if grown == state:
            return state, made
        state = grown

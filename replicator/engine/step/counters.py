"""Find leaves that read no batch and yet move with each microbatch.

A leaf that follows from state and key alone moves once per update. Three kinds of such
leaves move with the leaves that read the batch:

- a count whose new value weighs it (`count` in `mean + (x - mean) / count`);
- a count of examples, or a pointer (`seen + len(x)`, `(ptr + n) % K`), which adds a
  constant in a traced step: the step is traced once more with all examples of an update
  in one microbatch, to see whether the constant grows;
- a leaf that asks `is_last_microbatch`, and so chooses itself when it moves.

A leaf that meets the batch otherwise, and does not choose, is refused. All this is
decided by the values that equations compute: `1 + n` is `n + 1.0` and a cast of it.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from replicator.engine.analysis import dataflow
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaves:
    """Properties of the leaves of a state.

    Attributes:
      paths: Paths of the leaves.
      updated: Whether each follows from an update, or is an optimizer's own.
      batch: Whether each reads the batch.
      gated: Whether each asks if this microbatch is the last.
    """

    paths: list[str]
    updated: list[bool]
    batch: list[bool]
    gated: list[bool]


class TracedUpdate(NamedTuple):
    """A traced update.

    Attributes:
      closed: The program; its first outputs are the leaves of the state.
      state: Position of the first leaf of the state among the inputs.
      known: Positions of other inputs that are the same for any batch.
    """

    closed: core.ClosedJaxpr
    state: int
    known: Set[int]


class _Mark(NamedTuple):
    """Facts about one value.

    Attributes:
      value: The number of its expression; None if it follows from more than state, key
        and constants.
      reads: Its operands: `("old", leaf)`, `("new", leaf)`; `("bare", leaf)` the old
        value as a divisor or index; `("batch", -1)` and `("update", -1)` a leaf
        that the batch, or an update, moves. And leaves that met one that the batch
        moves, other than by a sum: `("met", leaf)`, `("weighs", leaf)`, `("places",
        leaf)`.
    """

    value: int | None = None
    reads: frozenset[tuple[str, int]] = frozenset()


_Ways = set[tuple[float | None, ...]]
_BATCH, _UPDATE = ("batch", -1), ("update", -1)
_MEETING = {"old": "met", "new": "weighs", "bare": "places"}


def find_moving(
    leaves: Leaves,
    traced: TracedUpdate,
    whole: Callable[[], TracedUpdate],
    *,
    lone: bool,
) -> set[int]:
    """Return the leaves that read no batch and move with each microbatch.

    Args:
      leaves: Leaves of the state.
      traced: The update.
      whole: Traces it with all examples of an update in one microbatch.
      lone: Whether a microbatch has a single example: then `n + 1` may count it.

    Raises:
      ArgumentError: A leaf would be moved once, and be read by one that moves with each
        microbatch, where it may not.
    """
    jaxpr, count = traced.closed.jaxpr, len(leaves.paths)
    places = [
        n
        for n in range(count)
        if not (leaves.updated[n] or leaves.batch[n])
        and jaxpr.outvars[n] is not jaxpr.invars[traced.state + n]
    ]
    if not places:
        return set()
    expressions = _Expressions()
    values = [each.value for each in _flow(traced, leaves, expressions, {})]
    new: dict[int | None, frozenset] = {}
    for n in places:
        for value in expressions.new(values[n], n):
            new[value] = new.get(value, frozenset()) | {("new", n)}
    reads = [each.reads for each in _flow(traced, leaves, expressions, new)]
    moving = {n for n in places if leaves.gated[n]}
    rest = [n for n in places if n not in moving and _UPDATE not in reads[n]]
    readers = [n for n in range(count) if leaves.batch[n] and not leaves.gated[n]]
    pulled = frozenset().union(*(reads[n] for n in readers))
    steps = {n: expressions.steps(values[n], n) for n in rest}
    units = {n for n, own in steps.items() if own is not None and {*own} <= {1, -1}}
    met = {n for n in rest if {("met", n), ("weighs", n)} & pulled}
    adds = {n for n in rest if expressions.ways(values[n], n)}
    asked = (met | adds) - units | (units if lone else set())
    wide, failure = values, None
    if asked:
        try:
            wide = [each.value for each in _flow(whole(), leaves, expressions, {})]
        except Exception as raised:  # a step may be written for one size
            failure = raised
    for n in rest:
        differs = n in asked and values[n] != wide[n]
        few, many = steps[n], expressions.steps(wide[n], n)
        shrinks = few and many and sum(map(abs, many)) < sum(map(abs, few))
        places = n in units and ("places", n) in pulled
        if (differs and not shrinks) or (n in units and ("weighs", n) in pulled):
            moving.add(n)
        elif places or (n in asked - units and not differs and (failure or n in met)):
            raise _refusal(n, leaves, readers, reads) from failure
    follow = {n: {m for kind, m in reads[n] if kind == "new"} - {n} for n in rest}
    while more := {n for n in rest if follow[n] & moving} - moving:
        moving |= more
    return moving


def _refusal(
    n: int, leaves: Leaves, readers: Sequence[int], reads: Sequence[frozenset]
) -> ArgumentError:
    met = {(kind, n) for kind in _MEETING.values()}
    reader = next((leaves.paths[each] for each in readers if met & reads[each]), None)
    by = (
        f"and `{reader}`, which reads it, with each microbatch"
        if reader
        else "or with each microbatch, as what it adds may count examples"
    )
    return ArgumentError(
        f"`accumulate` must be 1 where `{leaves.paths[n]}` of the returned state moves "
        f"once per update {by}, got more. Gate one: "
        "`jnp.where(replicator.is_last_microbatch(), new, old)`."
    )


def _flow(
    traced: TracedUpdate, leaves: Leaves, expressions: "_Expressions", new: Mapping
) -> list[_Mark]:
    """Return the marks of the new leaves."""
    marks = []
    for place in range(len(traced.closed.jaxpr.invars)):
        n = place - traced.state
        if place in traced.known:
            marks.append(_Mark(expressions.number("input", (place,))))
        elif not 0 <= n < len(leaves.paths):
            marks.append(_Mark())
        elif leaves.updated[n]:
            marks.append(_Mark(None, frozenset({_UPDATE})))
        else:
            reads = _BATCH if leaves.batch[n] else ("old", n)
            marks.append(_Mark(expressions.number("leaf", (n,)), frozenset({reads})))
    constants = [_Mark(expressions.constant(x)) for x in traced.closed.consts]
    rules = _Reading(expressions, new)
    outs = dataflow.flow(traced.closed.jaxpr, marks, rules, constants=constants)
    return outs[: len(leaves.paths)]


_RENAMES = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient"})
_OF_ONE = frozenset(  # the same value where there is one number before and after
    {
        *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose"),
        *("slice", "dynamic_slice", "gather", "reduce_sum", "reduce_max", "reduce_min"),
    }
)
_LIMITS = frozenset({"min", "max", "rem", "and", "clamp", "select_n"})
_SCATTERS = frozenset({"scatter", "scatter-add"})
_ANY_ORDER = frozenset({"add", "mul", "min", "max"})
_FOLDED = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


class _Expressions:
    """Numbers of expressions of state, key and constants, equal for equal values.

    Attributes:
      nodes: By number, what is computed, and of which numbers.
      added: By number, the amounts that it adds to each leaf that it reads, by each way
        that it may take; None instead of ways if it is not a counter, and in them for
        an unknown amount.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple] = []
        self.added: list[dict[int, _Ways | None]] = []
        self._numbers: dict[tuple, int] = {}

    def number(self, name: str, operands: Sequence, *how: Any) -> int:
        """Return the number of `name` of `operands`."""
        node = (name, tuple(operands), *how)
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
            self.added.append(self._added(name, node[1]))
        return self._numbers[node]

    def constant(self, value: Any) -> int | None:
        """Return the number of a lone constant; None for any other."""
        try:
            number = float(np.asarray(value).reshape(()))
        except (TypeError, ValueError):
            return None
        return self.number("constant", (number,))

    def of(
        self, eqn: core.JaxprEqn, name: str, operands: list, place: int
    ) -> int | None:
        """Return the number of an output of an equation; None if it has none."""
        ends = (*eqn.invars[:1], eqn.outvars[place])
        sizes = [np.prod(getattr(each.aval, "shape", 0)) for each in ends]
        if name in _RENAMES or (name in _OF_ONE and sizes == [1, 1]):
            return operands[0]
        if name == "scatter-add" and sizes == [1, 1]:
            name, operands = "add", [operands[0], operands[2]]
        if None in operands:
            return None
        constants = [self._constant_of(each) for each in operands]
        if name in _FOLDED and None not in constants:
            return self.constant(_FOLDED[name](*constants))
        if name == "sub" and constants[1] is not None:
            name, operands = "add", [operands[0], self.constant(-constants[1])]
        if name in _ANY_ORDER:
            return self.number(name, sorted(operands))
        how = "" if name == "rem" else str(eqn.params)
        # Text with a function in it differs from trace to trace.
        return None if " at 0x" in how else self.number(name, operands, how, place)

    def new(self, value: int | None, leaf: int) -> set[int]:
        """Return the expressions that stand for the new value of a leaf."""
        if value is None or leaf not in self.added[value]:
            return set()
        name, operands, *_ = self.nodes[value]
        if name == "leaf":
            return set()
        ways = _cases(name, operands) if name in _LIMITS else ()
        return {value}.union(*(self.new(each, leaf) for each in ways))

    def ways(self, value: int | None, leaf: int) -> "_Ways | None":
        """Return `added` of a value and a leaf; None if it is not a counter of that."""
        return None if value is None else self.added[value].get(leaf)

    def steps(self, value: int | None, leaf: int) -> list[float] | None:
        """Return all that a value adds to a leaf; None if that is not known."""
        ways = self.ways(value, leaf)
        found = [each for way in ways or () for each in way]
        return [each for each in found if each] if ways and None not in found else None

    def _added(self, name: str, operands: tuple) -> dict[int, "_Ways | None"]:
        if name in ("leaf", "input", "constant"):
            return {operands[0]: {()}} if name == "leaf" else {}
        found = {}
        for leaf in set().union(*(self.added[each] for each in operands)):
            cases = [x for x in _cases(name, operands) if leaf in self.added[x]]
            ways = [self.added[each][leaf] for each in cases]
            found[leaf] = None
            if name in _LIMITS and None not in ways:
                found[leaf] = set().union(*(way for way in ways if way))
            elif name == "add" and len(ways) == 1 and ways[0] is not None:
                [other] = set(operands) - set(cases)
                step = self._constant_of(other)
                found[leaf] = {(*way, step) for way in ways[0]}
        return found

    def _constant_of(self, value: int) -> float | None:
        name, parts, *_ = self.nodes[value]
        return parts[0] if name == "constant" else None


def _cases(name: str, operands: tuple) -> tuple:
    # The first operand of a `select_n` chooses a case, and is not one.
    return operands[1:] if name == "select_n" else operands


@dataclasses.dataclass(frozen=True)
class _Reading(dataflow.Rules[_Mark]):
    """Rules to find the leaves that are read, and that meet leaves of the batch.

    Attributes:
      expressions: Numbers of the values.
      new: By the number of an expression, marks of the leaves whose new value it is.
    """

    expressions: _Expressions
    new: Mapping[int | None, frozenset[tuple[str, int]]]
    clean = _Mark()

    def literal(self, atom: core.Literal) -> _Mark:
        return _Mark(self.expressions.constant(atom.val))

    def join(self, marks: Sequence[_Mark]) -> _Mark:
        values = {mark.value for mark in marks}
        reads = frozenset().union(*(mark.reads for mark in marks))
        # They may be joined in any way: by a predicate, for example.
        pairs = [(one, other) for one in marks for other in marks if one is not other]
        met = frozenset().union(*(_met(a.reads, b.reads) for a, b in pairs))
        return _Mark(values.pop() if len(values) == 1 else None, reads | met)

    def decide(self, eqn: core.JaxprEqn, marks: Sequence[_Mark]) -> list[_Mark] | None:
        name = eqn.primitive.name
        is_call = name not in _SCATTERS and dataflow.sub_jaxprs(eqn)
        if eqn.params.get("name") == "remainder":  # jax.numpy's, of several equations
            name = "rem"
        elif eqn.effects or is_call or name == "optimization_barrier":
            return None
        reads = frozenset().union(*(mark.reads for mark in marks))
        if name.startswith(("random_", "threefry", "rng_")):
            reads = frozenset()  # randomness of the n-th update: not an average over n
        else:
            reads |= self._meetings(name, marks)
        operands = [mark.value for mark in marks]
        values = [
            self.expressions.of(eqn, name, operands, place)
            for place in range(len(eqn.outvars))
        ]
        return [
            _Mark(value, reads | self.new.get(value, frozenset())) for value in values
        ]

    def _meetings(self, name: str, marks: Sequence[_Mark]) -> frozenset:
        """Return the leaves that meet one that the batch moves, other than by a sum."""
        reads = [mark.reads for mark in marks]
        found = frozenset()
        if name == "div":
            old = {n for kind, n in reads[1] if kind == "old"}
            value, ways = marks[1].value, self.expressions.ways
            found |= {("bare", n) for n in old if ways(value, n) == {()}}
            reads[1] |= found
        if name in ("mul", "div", "pow", "dot_general"):
            pairs = [(0, 1), (1, 0)]
        elif name == "select_n":
            pairs = [(case, 0) for case in range(1, len(marks))]
        elif name in _SCATTERS or name == "dynamic_update_slice":
            indices = range(1, 2) if name in _SCATTERS else range(2, len(marks))
            pairs = [(0, index) for index in indices]
            for index in indices:
                old = {n for kind, n in reads[index] if kind == "old"}
                reads[index] |= {("bare", n) for n in old}
        else:
            return found
        return found.union(*(_met(reads[a], reads[b]) for a, b in pairs))


def _met(held: frozenset, other: frozenset) -> frozenset:
    """Return the leaves that a value meets, if it holds one that the batch moves."""
    if _BATCH not in held:
        return frozenset()
    return frozenset(
        (_MEETING[kind], n) for kind, n in other - held if kind in _MEETING
    )

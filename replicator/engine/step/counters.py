"""Tell which leaves that read no batch move with the microbatches all the same.

What follows from state and key alone moves once per update. Three kinds of such leaves
go with what the batch moves:

- a count whose new value weighs it (`count` in `mean + (x - mean) / count`);
- a count of examples, or a pointer (`seen + len(x)`, `(ptr + n) % K`), which adds what
  is a constant to a traced step: the step is traced once more with all examples of an
  update in one microbatch, to see whether the constant grows;
- what asks `is_last_microbatch` has said itself when it moves.

What meets it otherwise, and does not tell, is refused. All this is asked of the values
that equations compute, whatever their spelling: `1 + n` is `n + 1.0` and a cast of it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from replicator.engine.analysis import dataflow
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaves:
    """What is known of the leaves of a state.

    Attributes:
      paths: Their names.
      updated: Which follow from an update, or are an optimizer's own.
      batch: Which read the batch.
      gated: Which ask whether this microbatch is the last.
    """

    paths: list[str]
    updated: list[bool]
    batch: list[bool]
    gated: list[bool]


class Traced(NamedTuple):
    """A traced update.

    Attributes:
      closed: Its first outputs are the leaves of the state.
      state: Where the leaves of the state begin among the inputs.
      known: Which other inputs are the same for any batch.
    """

    closed: core.ClosedJaxpr
    state: int
    known: Set[int]


class _Mark(NamedTuple):
    """What is known of one value.

    Attributes:
      value: The number of its expression; None if it follows from more than state, key
        and constants.
      reads: What it reads: `("old", leaf)`, `("new", leaf)`; `("bare", leaf)` the old
        value as a divisor or index; `("batch", -1)` and `("update", -1)` a leaf that
        the batch, or an update, moves. And what met a leaf that the batch moves, other
        than by a sum: `("met", leaf)`, `("weighs", leaf)`, `("places", leaf)`.
    """

    value: int | None = None
    reads: frozenset[tuple[str, int]] = frozenset()


_BATCH, _UPDATE = ("batch", -1), ("update", -1)
_MEETING = {"old": "met", "new": "weighs", "bare": "places"}


def find_moving(
    leaves: Leaves, traced: Traced, whole: Callable[[], Traced], *, lone: bool
) -> set[int]:
    """Return which leaves that read no batch move with each microbatch.

    Args:
      leaves: Of the state.
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
    added = {n: expressions.added(values[n], n) for n in rest}
    units = {n for n in rest if expressions.is_unit(added[n])}
    met = {n for n in rest if {("met", n), ("weighs", n)} & pulled}
    asked = {n for n in rest if (lone if n in units else n in met or added[n])}
    wide, failure = values, None
    if asked:
        try:
            wide = [each.value for each in _flow(whole(), leaves, expressions, {})]
        except Exception as raised:  # a step may be written for one size
            failure = raised
    for n in rest:
        is_same, by_ones = n not in asked or values[n] == wide[n], n in units
        grows = not is_same and expressions.adds_more(n, values[n], wide[n])
        if grows or (by_ones and ("weighs", n) in pulled):
            moving.add(n)
        elif by_ones and ("places", n) in pulled:
            raise _refusal(n, leaves, readers, reads)
        elif not by_ones and n in asked and is_same and (failure or n in met):
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
    traced: Traced, leaves: Leaves, expressions: "_Expressions", new: Mapping
) -> list[_Mark]:
    """Return the marks of the new leaves."""
    marks = []
    for place in range(len(traced.closed.jaxpr.invars)):
        n = place - traced.state
        if place in traced.known:
            marks.append(_Mark(expressions.number("input", place)))
        elif not 0 <= n < len(leaves.paths):
            marks.append(_Mark())
        elif leaves.updated[n]:
            marks.append(_Mark(None, frozenset({_UPDATE})))
        else:
            reads = _BATCH if leaves.batch[n] else ("old", n)
            marks.append(_Mark(expressions.number("leaf", n), frozenset({reads})))
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
_LIMITS = frozenset({"min", "max", "rem", "clamp", "select_n"})
_FOLDED = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}
_ANY_ORDER = frozenset({"add", "mul", "min", "max"})


class _Expressions:
    """Numbers of expressions of state, key and constants, equal for equal values."""

    def __init__(self) -> None:
        self.nodes: list[tuple] = []
        self._leaves: list[frozenset[int]] = []  # that a node reads
        self._numbers: dict[tuple, int] = {}
        self._added: dict[tuple[int, int], set | None] = {}

    def number(self, name: str, *parts: Any) -> int:
        """Return the number of `name` of `parts`; of an equation, operands first."""
        node = (name, *parts)
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
            below = [self._leaves[each] for each in self._operands(node)]
            own = frozenset(parts if name == "leaf" else ())
            self._leaves.append(own.union(*below))
        return self._numbers[node]

    def constant(self, value: Any) -> int | None:
        """Return the number of a lone constant; None for any other."""
        try:
            return self.number("constant", float(np.asarray(value).reshape(())))
        except (TypeError, ValueError):
            return None

    def of(self, eqn: core.JaxprEqn, name: str, operands: Sequence, place: int):
        """Return the number of an output of an equation; None if it has none."""
        ends = (*eqn.invars[:1], eqn.outvars[place])
        sizes = [np.prod(getattr(x.aval, "shape", 0)) for x in ends]
        if name in _RENAMES or (name in _OF_ONE and sizes == [1, 1]):
            return operands[0]
        if None in operands:
            return None
        constants = [self._constant_of(each) for each in operands]
        if name in _FOLDED and None not in constants:
            return self.constant(_FOLDED[name](*constants))
        if name == "sub" and constants[1] is not None:
            name, operands = "add", [operands[0], self.constant(-constants[1])]
        if name in _ANY_ORDER or name == "rem":
            text, ordered = "", sorted(operands) if name != "rem" else operands
        else:
            text, ordered = str(eqn.params), operands
        known = " at 0x" not in text  # a function, which is another in another trace
        return self.number(name, tuple(ordered), text, place) if known else None

    def added(self, value: int | None, leaf: int) -> set[tuple[int, ...]] | None:
        """Return what a value adds to a leaf, by each way; None if it is no counter."""
        if value is None:
            return None
        if (value, leaf) not in self._added:
            self._added[value, leaf] = self._find_added(value, leaf)
        return self._added[value, leaf]

    def _find_added(self, value: int, leaf: int) -> set[tuple[int, ...]] | None:
        if self.nodes[value] == ("leaf", leaf):
            return {()}
        if leaf not in self._leaves[value]:
            return set()
        name, operands = self.nodes[value][0], self._operands(self.nodes[value])
        if name == "add":
            other, one = sorted(operands, key=lambda each: leaf in self._leaves[each])
            before = None if leaf in self._leaves[other] else self.added(one, leaf)
            return before and {(*each, other) for each in before}
        ways = [self.added(each, leaf) for each in self._ways(name, operands)]
        if name not in _LIMITS or None in ways:
            return None
        return set().union(*(way for way in ways if way))

    def new(self, value: int | None, leaf: int) -> set[int]:
        """Return the expressions that stand for the new value of a leaf."""
        if value is None or leaf not in self._leaves[value]:
            return set()
        name, operands = self.nodes[value][0], self._operands(self.nodes[value])
        if name == "leaf":
            return set()
        ways = self._ways(name, operands) if name in _LIMITS else ()
        return {value}.union(*(self.new(each, leaf) for each in ways))

    def is_unit(self, added: set[tuple[int, ...]] | None) -> bool:
        """Tell whether a counter moves by ones."""
        return bool(added) and all(x in (1, -1) for x in self._constants(added))

    def adds_more(self, leaf: int, few: int | None, many: int | None) -> bool:
        """Tell whether `many` moves a leaf by more than `few`, as far as is known."""
        less, more = (self._total(self.added(each, leaf)) for each in (few, many))
        return less is None or more is None or more > less

    def _total(self, added: set[tuple[int, ...]] | None) -> float | None:
        found = self._constants(added)
        known = [abs(each) for each in found if each is not None]
        return sum(known) if added and len(known) == len(found) else None

    def _constants(self, added: set[tuple[int, ...]] | None) -> list[float | None]:
        return [self._constant_of(x) for way in added or () for x in way]

    def _operands(self, node: tuple) -> tuple[int, ...]:
        return node[1] if isinstance(node[-1], int) and len(node) == 4 else ()

    def _ways(self, name: str, operands: Sequence[int]) -> Sequence[int]:
        # Which of its cases a `select_n` takes is another question than what they are.
        return operands[1:] if name == "select_n" else operands

    def _constant_of(self, value: int) -> float | None:
        name, *parts = self.nodes[value]
        return parts[0] if name == "constant" else None


@dataclasses.dataclass(frozen=True)
class _Reading(dataflow.Rules[_Mark]):
    """Follow which leaves are read, and what meets leaves that the batch moves.

    Attributes:
      expressions: Numbers values.
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
        # How these are joined nobody knows here: by a predicate, say.
        pairs = [(one, other) for one in marks for other in marks if one is not other]
        met = frozenset().union(*(_met(a.reads, b.reads) for a, b in pairs))
        return _Mark(values.pop() if len(values) == 1 else None, reads | met)

    def decide(self, eqn: core.JaxprEqn, marks: Sequence[_Mark]) -> list[_Mark] | None:
        name = eqn.primitive.name
        if eqn.params.get("name") == "remainder":  # jax.numpy's, of several equations
            name = "rem"
        elif eqn.effects or name == "optimization_barrier" or dataflow.sub_jaxprs(eqn):
            return None
        reads = frozenset().union(*(mark.reads for mark in marks))
        if name.startswith(("random_", "threefry", "rng_")):
            reads = frozenset()  # randomness of the n-th update is no average over n
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
        """Return what meets a leaf that the batch moves, other than by a sum."""
        reads = [mark.reads for mark in marks]
        found = frozenset()
        if name == "div":
            leaves = {n for kind, n in reads[1] if kind == "old"}
            value = marks[1].value
            found |= {
                ("bare", n) for n in leaves if self.expressions.added(value, n) == {()}
            }
            reads[1] |= found
        if name in ("mul", "div", "pow", "dot_general"):
            pairs = [(0, 1), (1, 0)]
        elif name == "select_n":
            pairs = [(case, 0) for case in range(1, len(marks))]
        elif name in ("scatter", "dynamic_update_slice"):
            indices = [1] if name == "scatter" else range(2, len(marks))
            pairs = [(0, index) for index in indices]
            for index in indices:
                reads[index] |= {
                    ("bare", n) for kind, n in reads[index] if kind == "old"
                }
        else:
            return found
        return found.union(*(_met(reads[a], reads[b]) for a, b in pairs))


def _met(held: frozenset, other: frozenset) -> frozenset:
    """Return what a value meets that holds a leaf which the batch moves."""
    if _BATCH not in held:
        return frozenset()
    return frozenset(
        (_MEETING[kind], n) for kind, n in other - held if kind in _MEETING
    )

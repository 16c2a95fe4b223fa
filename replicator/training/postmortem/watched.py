"""Run a function, and find the equation that first made a NaN or an infinity.

The function's jaxpr is evaluated equation by equation inside one traced function, with
jitted functions opened and loops of `scan` watched turn by turn; each equation gives
two small numbers: the turn at which its results first held a NaN, and an infinity. So
it compiles, exports and runs as any function does. A `while`, a `cond` or a loop in a
loop is one equation.

A NaN begins where results hold one and no argument does. An infinity may be meant: a
mask of `-inf` is not a fault. It is reported for the NaN that follows from it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from replicator.engine.analysis.dataflow import scan_sizes
from replicator.engine.analysis.evaluator import bind, evaluate, held_program
from replicator.engine.analysis.source_lines import UNKNOWN_LINE, user_line

NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An equation of a program.

    Attributes:
      primitive: Name of its primitive: `log`.
      line: The user's line that made it.
      turns: Number of its runs: the length of the loop that it is in.
      order: Its position: (in the program, in its loop).
      needs: Numbers of the places that gave its arguments.
      given_inf: Whether one of its arguments is an infinity in the code.
    """

    primitive: str
    line: str
    turns: int
    order: tuple[int, int]
    needs: tuple[int, ...]
    given_inf: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FirstBad:
    """Equation where a number first went bad.

    Attributes:
      place: The equation.
      turn: Turn of its loop; 0 outside of loops.
    """

    place: Place
    turn: int

    def describe(self) -> str:
        """Return a line: "`log` at train.py:12 in loss_fn"."""
        turn = f", turn {self.turn} of {self.place.turns}"
        return (
            f"`{self.place.primitive}` at {self.place.line}"
            f"{turn if self.place.turns > 1 else ''}"
        )


def watched(
    fn: Callable[..., Any], *arguments: Any
) -> tuple[Callable[..., tuple[list, jax.Array]], list[Place], core.ClosedJaxpr]:
    """Return a version of `fn` that reports at which turns its equations went bad.

    Args:
      fn: A function of pytrees, traced once.
      *arguments: Arrays or shapes that it is traced for.

    Returns:
      `run(*leaves) -> (leaves of the result, when)`, where `leaves` are those of
      `arguments` and `when[p]` holds the first turn in which place p gave a NaN, and an
      infinity, or `NEVER`; the places; the jaxpr of `fn`.

    >>> run, places, _ = watched(lambda x: jnp.log(x) * 0.0, jnp.float32(0.0))
    >>> _, when = run(jnp.float32(0.0))
    >>> first_bad(places, np.asarray(when), kind=0).place.primitive
    'mul'
    """
    closed = jax.make_jaxpr(fn)(*arguments)
    places: list[Place] = []

    def run(*leaves: Any) -> tuple[list, jax.Array]:
        places.clear()  # traced anew: the same places again
        outs, whens = _Evaluation(places).run(closed, leaves)
        stacked = jnp.stack(whens) if whens else jnp.zeros((0, 2), jnp.int32)
        return outs, stacked

    jax.eval_shape(run, *closed.in_avals)
    return run, places, closed


def first_bad(places: Sequence[Place], when: np.ndarray, kind: int) -> FirstBad | None:
    """Find where the first NaN (`kind` 0) or infinity (1) began.

    Args:
      places: The equations.
      when: [places, 2], the second result of `run` of `watched`.
      kind: 0 or 1.

    Returns:
      The first place whose results were bad while no argument was, or None.
    """
    turns = when[:, kind]
    origins = [
        ((place.order[0], int(turns[number]), place.order[1]), place)
        for number, place in enumerate(places)
        if turns[number] != NEVER
        and not (kind == 1 and place.given_inf)
        and not any(turns[need] <= turns[number] for need in place.needs)
    ]
    if not origins:
        return None
    (_, turn, _), place = min(origins, key=lambda origin: origin[0])
    return FirstBad(place=place, turn=turn)


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """A traced value, and the place that made it; None for inputs and constants."""

    array: Any
    made_by: int | None = None
    is_inf: bool = False


class _Evaluation:
    """Evaluates equations in order, adding places as it meets them."""

    def __init__(
        self, places: list[Place], *, turns: int = 1, above: int | None = None
    ) -> None:
        self._places = places
        self._turns = turns
        self._above = above  # the order of the loop that this lies in
        self._whens: list[jax.Array] = []

    def run(
        self, closed: core.ClosedJaxpr, leaves: Sequence
    ) -> tuple[list, list[jax.Array]]:
        values = self._open(closed, list(map(_Value, leaves)))
        return [value.array for value in values], self._whens

    def _open(
        self,
        closed: core.ClosedJaxpr,
        arguments: Sequence[_Value],
        caller: str = UNKNOWN_LINE,
    ) -> list[_Value]:
        apply = functools.partial(self._evaluate, caller=caller)
        return evaluate(closed, arguments, apply, constant=_constant)

    def _evaluate(
        self, eqn: core.JaxprEqn, arguments: list[_Value], caller: str
    ) -> list[_Value]:
        line = user_line(eqn, caller=caller)
        if (inner := held_program(eqn)) is not None:
            return self._open(inner, arguments, line)
        arrays = [value.array for value in arguments]
        if eqn.primitive.name == "scan" and self._above is None:
            return self._scan(eqn, arrays)
        return self._note(eqn, line, arguments, bind(eqn, arrays))

    def _note(
        self, eqn: core.JaxprEqn, line: str, arguments: list[_Value], outs: list
    ) -> list[_Value]:
        number = len(self._places)
        flags = [_bad(out) for out in outs if _is_float(out)]
        if not flags:
            # An integer is never bad, and what is made of it begins anew.
            return [_Value(out) for out in outs]
        top = self._above if self._above is not None else number
        self._places.append(
            Place(
                primitive=eqn.primitive.name,
                line=line,
                turns=self._turns,
                order=(top, number if self._above is not None else 0),
                needs=tuple(
                    sorted({v.made_by for v in arguments if v.made_by is not None})
                ),
                given_inf=any(value.is_inf for value in arguments),
            )
        )
        bad = jnp.stack(flags).any(0)
        self._whens.append(jnp.where(bad, 0, NEVER).astype(jnp.int32))
        return [_Value(out, made_by=number) for out in outs]

    def _scan(self, eqn: core.JaxprEqn, arrays: list) -> list[_Value]:
        """Run a loop with its body watched, turn by turn."""
        body: core.ClosedJaxpr = eqn.params["jaxpr"]
        length, order = eqn.params["length"], len(self._places)
        num_consts, num_carry = scan_sizes(eqn)
        consts = arrays[:num_consts]
        carry = arrays[num_consts : num_consts + num_carry]

        def turn(carry: list, xs: list) -> tuple[list, tuple[list, jax.Array]]:
            del self._places[order:]  # the body may be traced more than once
            inner = _Evaluation(self._places, turns=length, above=order)
            outs, whens = inner.run(body, [*consts, *carry, *xs])
            stacked = jnp.stack(whens) if whens else jnp.zeros((0, 2), jnp.int32)
            return outs[:num_carry], (outs[num_carry:], stacked)

        carry, (ys, whens) = lax.scan(
            turn,
            carry,
            arrays[num_consts + num_carry :],
            length=length,
            reverse=eqn.params["reverse"],
        )
        self._whens += list(_first_turns(whens, length, eqn.params["reverse"]))
        last = len(self._places) - 1
        made_by = last if last >= order else None
        return [_Value(out, made_by=made_by) for out in [*carry, *ys]]


def _first_turns(whens: jax.Array, length: int, reverse: bool) -> jax.Array:
    """Return the first turn in which each place was bad, from [turns, places, 2]."""
    turns = jnp.arange(length, dtype=jnp.int32)
    turns = turns[::-1] if reverse else turns
    when = jnp.where(whens != NEVER, turns[:, None, None], NEVER)
    return when.min(0, initial=NEVER)


def _constant(value: Any) -> _Value:
    is_inf = _is_float(value) and bool(np.isinf(np.asarray(value)).any())
    return _Value(value, is_inf=is_inf)


def _is_float(value: Any) -> bool:
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _bad(out: jax.Array) -> jax.Array:
    return jnp.stack([jnp.isnan(out).any(), jnp.isinf(out).any()])

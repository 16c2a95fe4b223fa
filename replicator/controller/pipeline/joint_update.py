"""One optimizer's update of all stages, cut into ops of their slices.

The update is traced once, as one device would make it. An equation runs where its
arrays are; where numbers of several stages meet (the norms of clipping), each stage
gets them from the others and goes on by itself. So the result is one device's, for any
optimizer but those in which whole arrays of several stages meet.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from replicator.base.types import PyTree
from replicator.controller.tracing.trace import shape_of
from replicator.engine.analysis.evaluator import CALLS, bind, evaluate, held_program
from replicator.errors import ArgumentError

BindAt = Callable[[int, Callable[..., PyTree]], Callable[..., PyTree]]
"""Makes an op of a function, on the slice of a stage."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a value is made: in a stage, or in each; after so many exchanges."""

    stage: int | None
    level: int


class JointUpdate:
    """A function of the values of all stages, cut into an op for each.

    Args:
      fn: The function, of flat arrays.
      shapes: Of its arguments.
      homes: Stage of each argument; None for numbers that every stage needs.
      outputs: Stage on which each result is wanted.

    Raises:
      ArgumentError: Arrays of several stages meet.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[jax.Array]],
        shapes: Sequence[jax.ShapeDtypeStruct],
        *,
        homes: Sequence[int | None],
        outputs: Sequence[int],
        stages: int,
    ) -> None:
        closed = jax.make_jaxpr(fn)(*shapes)
        self._closed = jax.make_jaxpr(lambda *flat: _opened(closed, flat))(*shapes)
        jaxpr = self._closed.jaxpr
        self._stages = range(stages)
        self._places = _places(jaxpr, homes)
        self._last = max((place.level for place in self._places.values()), default=0)
        self._maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._exchanged = self._meeting()
        self._outputs = [
            self._home(v, at) for v, at in zip(jaxpr.outvars, outputs, strict=True)
        ]

    def __call__(self, flat: Sequence[jax.Array], bind_at: BindAt) -> list[jax.Array]:
        """Call the ops of an update; return the results in the order of `fn`."""
        jaxpr = self._closed.jaxpr
        values = dict(zip(jaxpr.invars, flat, strict=True))
        packs: dict[tuple[int, int], tuple[jax.Array, ...]] = {}
        for level in range(self._last):
            for stage in self._stages:
                if made := self._exchanged.get((stage, level)):
                    packs[stage, level] = self._call(
                        (stage, level), made, values, packs, bind_at
                    )
        results: list[Any] = [None] * len(jaxpr.outvars)
        for stage in self._stages:
            at = [n for n, home in enumerate(self._outputs) if home == stage]
            if at:
                wanted = [jaxpr.outvars[n] for n in at]
                outs = self._call(
                    (stage, self._last), wanted, values, packs, bind_at, is_last=True
                )
                for n, value in zip(at, outs, strict=True):
                    results[n] = value
        return results

    def _call(
        self,
        at: tuple[int, int],
        wanted: Sequence[Any],
        values: Mapping[core.Var, jax.Array],
        packs: Mapping[tuple[int, int], Sequence[jax.Array]],
        bind_at: BindAt,
        *,
        is_last: bool = False,
    ) -> tuple[jax.Array, ...]:
        """Call the op of a stage that computes values from what is there."""
        stage, level = at
        known = {
            v: key for key in packs if key[1] < level for v in self._exchanged[key]
        }
        eqns, taken = self._part(wanted, values.keys() | known.keys())
        used = list(dict.fromkeys(known[v] for v in taken if v in known))
        plain = [v for v in taken if v not in known]
        unpacked = [v for key in used for v in self._exchanged[key]]
        jaxpr = self._closed.jaxpr.replace(
            invars=[*plain, *unpacked], outvars=list(wanted), eqns=eqns
        )
        run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self._closed.consts))
        counts = [self._exchanged[key] for key in used]

        def update(arrays: Sequence[jax.Array], packed: Sequence[Any]) -> Any:
            numbers = [
                number
                for variables, pack in zip(counts, packed, strict=True)
                for number in _unpacked(variables, pack)
            ]
            results = run(*arrays, *numbers)
            return tuple(results) if is_last else _packed(results)

        update.__name__ = f"update{stage}" if is_last else f"partial_update{stage}"
        return bind_at(stage, update)(
            [values[v] for v in plain], [packs[key] for key in used]
        )

    def _part(
        self, wanted: Iterable[Any], known: Iterable[core.Var]
    ) -> tuple[list[core.JaxprEqn], list[core.Var]]:
        """Return the equations of values, and those of the known that they take."""
        jaxpr, known = self._closed.jaxpr, set(known)
        needed = {v for v in wanted if not isinstance(v, core.Literal)}
        eqns = []
        for eqn in reversed(jaxpr.eqns):
            if any(v in needed and v not in known for v in eqn.outvars):
                eqns.append(eqn)
                needed.update(v for v in eqn.invars if isinstance(v, core.Var))
        return eqns[::-1], [v for v in _ordered(jaxpr) if v in needed & known]

    def _meeting(self) -> dict[tuple[int, int], list[core.Var]]:
        """Return the numbers that other stages take, by where they are made."""
        found: dict[tuple[int, int], list[core.Var]] = {}
        for eqn in self._closed.jaxpr.eqns:
            here = self._places[eqn.outvars[0]].stage
            for v in eqn.invars:
                place = self._places.get(v) if isinstance(v, core.Var) else None
                if place is None or place.stage in (None, here) or v not in self._maker:
                    continue
                made = found.setdefault((place.stage, place.level), [])
                if v not in made:
                    made.append(v)
        return found

    def _home(self, v: Any, wanted: int) -> int:
        place = None if isinstance(v, core.Literal) else self._places.get(v)
        return wanted if place is None or place.stage is None else place.stage


def _opened(closed: core.ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Evaluate a program without calls; a `cond` computes both and chooses."""

    def apply(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name == "cond":
            index, *rest = operands
            cases = [_opened(branch, rest) for branch in eqn.params["branches"]]
            return [jax.lax.select_n(index, *case) for case in zip(*cases, strict=True)]
        held = held_program(eqn) if eqn.primitive.name in CALLS else None
        return bind(eqn, operands) if held is None else _opened(held, operands)

    return evaluate(closed, values, apply, constant=lambda value: value)


def _places(jaxpr: core.Jaxpr, homes: Sequence[int | None]) -> dict[core.Var, _Place]:
    places = {
        v: _Place(stage=home, level=0)
        for v, home in zip(jaxpr.invars, homes, strict=True)
    }
    for eqn in jaxpr.eqns:
        taken = [v for v in eqn.invars if isinstance(v, core.Var) and v in places]
        place = _place_of(eqn, [(v, places[v]) for v in taken])
        places.update(dict.fromkeys(eqn.outvars, place))
    return places


def _place_of(eqn: core.JaxprEqn, taken: Sequence[tuple[core.Var, _Place]]) -> _Place:
    arrays = {p.stage for v, p in taken if p.stage is not None and shape_of(v).size > 1}
    owners = {p.stage for _, p in taken if p.stage is not None}
    if len(arrays) > 1:
        first, second = sorted(arrays)[:2]
        raise ArgumentError(
            "`optimizer` must combine no arrays of several stages, only numbers such "
            f"as norms, got `{eqn.primitive.name}` of arrays of stages {first} and "
            f"{second}. Use one that keeps parameters apart."
        )
    # A number that went through an exchange is every stage's, and what it meets, too.
    is_shared = any(p.stage is None and p.level for _, p in taken)
    stage = None
    if arrays:
        (stage,) = arrays
    elif len(owners) == 1 and not is_shared:
        (stage,) = owners
    levels = [p.level + (p.stage not in (None, stage)) for _, p in taken]
    return _Place(stage=stage, level=max(levels, default=0))


def _ordered(jaxpr: core.Jaxpr) -> list[core.Var]:
    return [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]


def _packed(numbers: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return numbers as one array for each dtype, so that few are sent."""
    dtypes = dict.fromkeys(number.dtype for number in numbers)
    return tuple(
        jnp.stack([n.reshape(()) for n in numbers if n.dtype == dtype])
        for dtype in dtypes
    )


def _unpacked(
    variables: Sequence[core.Var], pack: Sequence[jax.Array]
) -> list[jax.Array]:
    of: dict[Any, Any] = {array.dtype: iter(array) for array in pack}
    return [
        next(of[shape.dtype]).reshape(shape.shape) for shape in map(shape_of, variables)
    ]

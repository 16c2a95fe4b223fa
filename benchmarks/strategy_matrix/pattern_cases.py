"""The table of pattern cases: a group of patterns, along a route, in a body.

A case holds all patterns of a group, of two sizes, with a mover behind each and
without. Its name says all that: `rows/state/scan/roll/odd`.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.strategy_matrix.cases import CASES, Case
from benchmarks.strategy_matrix.convolutions import CONVOLUTIONS
from benchmarks.strategy_matrix.routes import BODIES, MOVERS, ROUTES, Steps, batch
from benchmarks.strategy_matrix.shifts import SHIFTS
from benchmarks.strategy_matrix.writes import WRITES, Pattern

GROUPS: Mapping[str, Mapping[str, Pattern]] = {**WRITES, **SHIFTS, **CONVOLUTIONS}
"""All patterns, by group and name."""

OTHER_SIZES = ("odd", "wide")
"""Beside sizes that divide."""

OTHER_MOVERS = tuple(name for name in MOVERS if name != "still")
_ON_KERNELS = {
    "of-each": ("parameter to loss", "parameter to gradient", "state"),
    "grouped": ("parameter to loss", "state"),
}


class Context(NamedTuple):
    """Parts of a pattern case."""

    group: str
    route: str
    body: str
    mover: str
    size: str

    def __str__(self) -> str:
        """Write it as `rows/state/scan/roll/odd`."""
        return "/".join(self)


def is_possible(group: str, route: str, body: str = "plain") -> bool:
    """Return whether patterns of a group make sense along a route, in a body."""
    if group == "of-each" and body == "vmap":
        return False  # JAX maps no convolution whose batch is in groups
    if group in _ON_KERNELS:
        return route in _ON_KERNELS[group]
    if group == "pads-inside-crop" and route in ("gradient", "parameter"):
        return False  # of another shape
    return route != "parameter to gradient"


def contexts() -> Iterator[Context]:
    """List each group along each route in each body; movers and sizes take turns."""
    every = itertools.product(GROUPS, ROUTES, BODIES)
    for number, (group, route, body) in enumerate(every):
        if is_possible(group, route, body):
            mover = OTHER_MOVERS[number % len(OTHER_MOVERS)]
            yield Context(group, route, body, mover, OTHER_SIZES[number % 2])


def named(name: str) -> Case:
    """Return a case by its name: a model, or the patterns of a context."""
    if "/" in name:
        return pattern_case(Context(*name.split("/")))
    return next(case for case in CASES if case.name == name)


@functools.cache
def pattern_case(context: Context) -> Case:
    """Return the case of a context."""
    group, route, body, mover, size = context
    sizes = ("kernel", "kernel-odd") if group in _ON_KERNELS else ("even", size)
    steps = Steps(
        patterns=GROUPS[group],
        route=route,
        body=body,
        movers=("still", mover),
        sizes=sizes,
    )
    return Case(
        name=str(context),
        parts=steps.parts,
        batch=batch(),
        tensor=_tensor(route, sizes[0]),
        steps=(0, 1),
        each=True,
    )


def _tensor(route: str, size: str) -> Mapping[str, tuple[str | None, ...]]:
    """Cut the rows of arrays that divide over `model`, else columns that do."""
    lines = ("model", None) if size == "even" else (None, "model")
    match route.split()[0]:
        case "batch":
            return {"params/*": (None, "model")}
        case "activation":
            return {f"params/*.{size}.*": (None, "model")}
        case "state":
            return {f"kept/*.{size}.*": lines}
    return {f"params/*.{size}.*": lines}

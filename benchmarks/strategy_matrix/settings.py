"""Settings to run: a cover of models and patterns, or all of them."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.strategy_matrix.builders import (
    ACCUMULATED,
    BUILDERS,
    OPTIMIZERS,
    PADDED,
    PLAIN,
)
from benchmarks.strategy_matrix.cases import CASES
from benchmarks.strategy_matrix.cover import Row, cover
from benchmarks.strategy_matrix.law import Setting
from benchmarks.strategy_matrix.pattern_cases import (
    GROUPS,
    OTHER_MOVERS,
    OTHER_SIZES,
    Context,
    contexts,
    is_possible,
)
from benchmarks.strategy_matrix.routes import BODIES, ROUTES

_UNEVEN = "uneven"
_MODELS = [case.name for case in CASES]
# Nothing is in pieces under `data_parallel`: the compiler has nothing to do wrong.
_PARTITION = tuple(name for name in BUILDERS if name != "data_parallel")
# Of a batch there are the rows of a microbatch, of another shape than what is kept; and
# what an update made is not to be written into from a batch.
_NOT_ACCUMULATED = ("batch to state", "activation to state", "parameter")
_MANY, _FEWER = (8,), (4, 2, 1)


def settings(*, full: bool) -> list[Setting]:
    """List what is run: a cover, or all.

    The cover holds each pair of ideas: on eight devices each of a case (or what a
    pattern case is made of), a builder and an optimizer with each of another; then each
    with each smaller number of devices.
    """
    if full:
        return [*_all_models(), *_all_patterns()]
    models = {"case": _MODELS, "builder": [*BUILDERS, *PADDED]}
    optimizers = {"optimizer": list(OPTIMIZERS)}
    patterns = {
        "group": list(GROUPS),
        "builder": [*_PARTITION, *ACCUMULATED, *PADDED],
        **{"route": ROUTES, "body": list(BODIES)},
        **{"mover": OTHER_MOVERS, "size": OTHER_SIZES},
    }
    return [
        *(_of_model(row) for row in _covered({**models, **optimizers}, _is_model)),
        *(_of_pattern(row) for row in _covered(patterns, _is_pattern)),
    ]


def _covered(
    ideas: Mapping[str, Sequence], allowed: Callable[[Row], bool]
) -> list[Row]:
    many = cover({**ideas, "devices": _MANY}, allowed)
    return [*many, *cover({**ideas, "devices": _FEWER}, allowed, held=many)]


def _of_model(row: Row) -> Setting:
    return Setting(row["case"], row["builder"], row["devices"], row["optimizer"])


def _of_pattern(row: Row) -> Setting:
    context = Context(*(row[idea] for idea in Context._fields))
    return Setting(str(context), row["builder"], row["devices"], *PLAIN)


def _is_model(row: Row) -> bool:
    """Return whether a model fits a builder: padding is for those that need it."""
    if row.get("builder") not in PADDED:
        return True
    return row.get("case", _UNEVEN) == _UNEVEN and row.get("devices") != 1


def _is_pattern(row: Row) -> bool:
    builder, route = row.get("builder"), row.get("route")
    if builder in PADDED and (row.get("devices") == 1 or row.get("size") == "wide"):
        return False
    group, body = row.get("group"), row.get("body", "plain")
    by_rows = (group, route) == ("grouped", "state")  # of a kernel: of as many results
    if builder in ACCUMULATED and (by_rows or route in _NOT_ACCUMULATED):
        return False
    # Where the route is not known yet: one that fits all groups.
    return group is None or is_possible(group, route or "state", body)


def _all_models() -> list[Setting]:
    def product(
        cases: Sequence[str], devices: Sequence[int], builders: Iterable[str]
    ) -> list[Setting]:
        every = itertools.product(devices, builders, cases, OPTIMIZERS)
        return [Setting(case, b, n, tx) for n, b, case, tx in every]

    return [
        *product(_MODELS, (8, 4, 2, 1), BUILDERS),
        *product([_UNEVEN], (8, 4, 2), PADDED),
    ]


def _all_patterns() -> list[Setting]:
    """List all contexts under all builders; those without a body on fewer, too."""
    rows = [
        {**context._asdict(), "builder": builder, "devices": devices}
        for context in contexts()
        for builder in (*_PARTITION, *ACCUMULATED, *PADDED)
        for devices in (_MANY if context.body != "plain" else (*_MANY, *_FEWER))
    ]
    return [_of_pattern(row) for row in rows if _is_pattern(row)]

"""Tell how often a loop of a compiled program turns, where the program says so.

Compilers for CPU and GPU note it. That for TPU does not, so there it is read from the
loop itself, if it counts as `lax.scan` does: from a constant to a constant.
"""

import re

from replicator.engine.inspection.hlo_text import (
    Computation,
    HloText,
    Instruction,
    source_of,
)

_NOTED = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def loop_turns(program: HloText, inside: str, loop: Instruction) -> int | None:
    """Return how often a `while` turns; None where the program does not say.

    Args:
      program: It.
      inside: Name of the computation in which the loop stands.
      loop: The `while`.
    """
    if found := _NOTED.search(loop.attributes):
        return int(found[1])
    around = program.computations[inside]
    asked = program.computations.get(loop.names("condition"), {})
    body = program.computations.get(loop.names("body"), {})
    test = _root(asked)
    if test is None or "direction=LT" not in test.attributes:
        return None
    counter, end = (source_of(asked, name) for name in test.operands)
    place, last = _place(counter), _constant(end)
    if place is None or last is None:
        return None
    start = _constant(_element(around, around.get(loop.operands[0]), place))
    moved = _element(body, _root(body), place)
    if start is None or moved is None or moved.opcode != "add":
        return None
    terms = [source_of(body, name) for name in moved.operands]
    own = [_place(each) for each in terms].count(place)
    [step] = [_constant(each) for each in terms if _place(each) != place] or [None]
    if own != 1 or step is None or step < 1:
        return None
    return max(-(-(last - start) // step), 0)


def _root(computation: Computation) -> Instruction | None:
    return next((each for each in computation.values() if each.is_root), None)


def _element(
    computation: Computation, whole: Instruction | None, place: int
) -> Instruction | None:
    if whole is None or whole.opcode != "tuple" or place >= len(whole.operands):
        return None
    return source_of(computation, whole.operands[place])


def _place(value: Instruction | None) -> int | None:
    """Return which element of what the loop carries a value is."""
    if value is None or value.opcode != "get-tuple-element":
        return None
    found = re.search(r"\bindex=(\d+)", value.attributes)
    return int(found[1]) if found else None


def _constant(value: Instruction | None) -> int | None:
    if value is None or value.opcode != "constant":
        return None
    return int(value.given) if re.fullmatch(r"-?\d+", value.given) else None

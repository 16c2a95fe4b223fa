"""Walk through all instructions that a call of a compiled program runs, and count them.

Compilers for CPU and GPU note the number of turns of a loop. That for TPU does not, so
there it is read from the loop itself, if it counts as `lax.scan` does: from a constant
to a constant.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from replicator.engine.inspection.hlo_text import (
    Computation,
    HloText,
    Instruction,
    source_of,
)


class Visit(NamedTuple):
    """An instruction in its computation.

    Attributes:
      instruction: The instruction.
      around: Computation that it is in.
      turns: Number of its runs in a call of the program.
      is_counted: Whether the number of turns of all loops around it is known; a loop
        without counts once.
    """

    instruction: Instruction
    around: Computation
    turns: int
    is_counted: bool


def walk(program: HloText) -> Iterator[Visit]:
    """Yield each instruction as often as it is reached, both ways of conditionals too.

    An operation that is started and awaited apart is reached only by its start.
    """
    return _walk(program, program.entry, 1, is_counted=True)


def _walk(
    program: HloText, name: str, turns: int, *, is_counted: bool
) -> Iterator[Visit]:
    around = program.computations.get(name, {})
    for each in around.values():
        if each.opcode.endswith(("-done", "-update")):
            continue
        yield Visit(each, around, turns, is_counted)
        times = _loop_turns(program, around, each) if each.opcode == "while" else 1
        for called in _called(each.attributes):
            yield from _walk(
                program,
                called,
                turns * (1 if times is None else times),
                is_counted=is_counted and times is not None,
            )


_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_NOTED = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def _called(attributes: str) -> list[str]:
    lists = ",".join(_CALLED_LIST.findall(attributes))
    return _CALLED.findall(attributes) + re.findall(r"[\w.\-]+", lists)


def _loop_turns(program: HloText, around: Computation, loop: Instruction) -> int | None:
    """Return the number of turns of a `while`; None if the program does not have it."""
    if found := _NOTED.search(loop.attributes):
        return int(found[1])
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
    steps = [_constant(each) for each in terms if _place(each) != place]
    if len(steps) != 1 or steps[0] is None or steps[0] < 1:
        return None
    return max(-(-(last - start) // steps[0]), 0)


def _root(computation: Computation) -> Instruction | None:
    return next((each for each in computation.values() if each.is_root), None)


def _element(
    computation: Computation, whole: Instruction | None, place: int
) -> Instruction | None:
    if whole is None or whole.opcode != "tuple" or place >= len(whole.operands):
        return None
    return source_of(computation, whole.operands[place])


def _place(value: Instruction | None) -> int | None:
    """Return the number of a value among those that the loop carries."""
    if value is None or value.opcode != "get-tuple-element":
        return None
    found = re.search(r"\bindex=(\d+)", value.attributes)
    return int(found[1]) if found else None


def _constant(value: Instruction | None) -> int | None:
    if value is None or value.opcode != "constant":
        return None
    return int(value.given) if re.fullmatch(r"-?\d+", value.given) else None

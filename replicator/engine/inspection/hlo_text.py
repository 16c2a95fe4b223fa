"""Read the text of a compiled program: computations, and the lines they come from.

It is the one view of a compiled program that JAX offers on every backend. These parts
of it are the same from jax 0.10 to 0.12:

    FileNames … FunctionNames … FileLocations … StackFrames …
    %name (parameters) -> shape {
      ROOT %name = shape opcode(%operand, …), attributes, metadata={…}
    }
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from replicator.base.tracebacks import is_library


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(given), attributes`.

    Attributes:
      name: Name of its result.
      shape: Shape of its result.
      opcode: Its operation.
      given: Text in its parentheses: operands, or the value of a constant.
      attributes: Text after them.
      is_root: Whether its result is that of the computation.
    """

    name: str
    shape: str
    opcode: str
    given: str
    attributes: str
    is_root: bool = False

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.given)

    def names(self, attribute: str) -> str:
        """Return the computation that an attribute names; empty for none."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]
"""Instructions by name, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFrame:
    """One frame of a Python stack in the program's text.

    Attributes:
      file: Its path.
      line: Its line.
      function: Its qualified name.
      parent: Number of the frame that called it; 0 for none.
    """

    file: str
    line: int
    function: str
    parent: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HloText:
    """A compiled program.

    Attributes:
      entry: Name of the computation that a call runs; empty if there is no text.
      num_devices: Number of devices that run it.
      computations: Computations that it calls, and the entry, by name.
      frames: Frames by number, from 1.
    """

    entry: str
    num_devices: int
    computations: dict[str, Computation]
    frames: dict[int, SourceFrame]

    def user_line(self, instruction: Instruction) -> str:
        """Return the user's innermost line behind an instruction; empty for none.

        Returns:
          The file as Python knows it, line and function: "train.py:12 in step_fn".
        """
        if found := _STACK_FRAME.search(instruction.attributes):
            return self._user_line(int(found[1]))
        found = _SOURCE.search(instruction.attributes)
        if found and not is_library(found[1]):
            return f"{found[1]}:{found[2]}"
        return ""

    def _user_line(self, number: int) -> str:
        while (frame := self.frames.get(number)) is not None:
            # The caller of the step is the user's, too, and made none of its equations.
            if frame.function.startswith(("shard_step.", "CompiledStep.")):
                return ""
            if not is_library(frame.file):
                function = frame.function.rpartition("<locals>.")[2]
                return f"{frame.file}:{frame.line} in {function}"
            number = frame.parent
        return ""


def parse(text: str) -> HloText:
    """Read the text of `jax.stages.Compiled.as_text`, which may be empty.

    >>> parse(jax.jit(jnp.sin).lower(1.0).compile().as_text()).num_devices
    1
    """
    entry = _ENTRY.search(text)
    partitions = re.search(r"\bnum_partitions=(\d+)", text.partition("\n")[0])
    return HloText(
        entry=entry[1] if entry else "",
        num_devices=int(partitions[1]) if partitions else 1,
        computations=dict(_computations(text)),
        frames=_frames(text),
    )


def source_of(computation: Computation, name: str) -> Instruction | None:
    """Return the instruction that makes a value, through those that only pass it on."""
    found = computation.get(name)
    while found is not None and found.opcode in ("copy", "bitcast", "convert"):
        found = computation.get(found.operands[0])
    return found


_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\d\-]*)\(")
_STACK_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_SOURCE = re.compile(r'\bsource_file="([^"]*)" source_line=(\d+)')


def _computations(text: str) -> Iterator[tuple[str, Computation]]:
    name, instructions = "", {}
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name, instructions = start[1], {}
        elif found := _INSTRUCTION.match(line):
            instructions[found[1]] = _instruction(found, line)
        elif line.startswith("}") and name:
            yield name, instructions


def _instruction(found: re.Match[str], line: str) -> Instruction:
    end = _closing(line, found.end())
    return Instruction(
        name=found[1],
        shape=found[2],
        opcode=found[3],
        given=line[found.end() : end],
        attributes=line[end + 1 :],
        is_root=line.lstrip().startswith("ROOT "),
    )


def _closing(line: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one before `start`."""
    depth = 1
    for place in re.finditer(r"[()]", line[start:]):
        depth += 1 if place[0] == "(" else -1
        if not depth:
            return start + place.start()
    return len(line)


def _frames(text: str) -> dict[int, SourceFrame]:
    files, functions, locations, frames = (
        _table(text, title)
        for title in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    )
    if not frames:
        return {}
    places = {number: _fields(row) for number, row in locations.items()}
    rows = {number: _fields(row) for number, row in frames.items()}
    # XLA writes the number of a parent plus one (jaxlib 0.10 to 0.12), and 1 for none.
    offset = min(row.get("parent_frame_id", 0) for row in rows.values())
    found = {}
    for number, row in rows.items():
        place = places.get(row.get("file_location_id", 0), {})
        found[number] = SourceFrame(
            file=files.get(place.get("file_name_id", 0), '""').strip('"'),
            line=place.get("line", 0),
            function=functions.get(place.get("function_name_id", 0), '""').strip('"'),
            parent=row.get("parent_frame_id", 0) - offset,
        )
    return found


def _table(text: str, title: str) -> dict[int, str]:
    start = text.find(f"\n{title}\n")
    if start < 0:
        return {}
    start += len(title) + 2
    rows = text[start : text.find("\n\n", start)].splitlines()
    return {
        int(number): row for number, _, row in (each.partition(" ") for each in rows)
    }


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}


_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """List dtype and sizes of the arrays of a shape.

    >>> arrays("(f32[8,2]{1,0}, s32[])")
    [('f32', (8, 2)), ('s32', ())]
    """
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shape)
    ]


def array_bytes(array: tuple[str, tuple[int, ...]]) -> int:
    """Return the bytes of an array, as `arrays` lists it.

    >>> array_bytes(("bf16", (8, 4))), array_bytes(("s4", (3,)))
    (64, 2)
    """
    dtype, shape = array
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return -(-math.prod(shape) * (int(bits[1]) if bits else 8) // 8)

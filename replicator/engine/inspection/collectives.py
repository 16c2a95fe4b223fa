"""Count the collectives of a compiled program, and the bytes of each on the wire."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replicator.engine.inspection.device_groups import device_groups, mesh_axes
from replicator.engine.inspection.hlo_text import (
    Computation,
    HloText,
    Instruction,
    array_bytes,
    arrays,
    parse,
    source_of,
)
from replicator.engine.inspection.walk import Visit, walk

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collectives of one kind in a program, of the same arrays, from one line.

    Attributes:
      kind: Name of the kind: `"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, ...
      count: Number of them in one call of the program, the turns of loops included.
      wire_bytes: Number of bytes that one device sends in all of them, over a ring.
      axes: Mesh axes along which its devices lie.
      devices: Number of devices in one.
      arrays: Operands of a device, or results of an all-gather: `f32[64,64]`, one for
        each array.
      source: The user's line, `train.py:12 in step_fn`; empty if XLA lost it, or the
        step has no part in it.
      variable: Path of the variable of the state that is its operand as it is stored;
        empty for any other operand.
      op_name: JAX's name of the operation, transformations included.
      is_counted: Whether the number of turns of all loops around it is known. A loop
        without counts as one turn.
    """

    kind: str
    count: int
    wire_bytes: int
    axes: tuple[str, ...]
    devices: int
    arrays: tuple[str, ...]
    source: str
    variable: str
    op_name: str
    is_counted: bool = True

    @property
    def name(self) -> str:
        """Its kind and axes: `"all-reduce replica,shard"`."""
        return f"{self.kind} {','.join(self.axes)}".strip()


def ring_bytes(kind: str, handed_bytes: int, devices: int) -> int:
    """Return the bytes that one device sends in a collective over a ring.

    No algorithm sends less (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", §3).

    Args:
      kind: One of `KINDS`.
      handed_bytes: Number of bytes of a device's operand.
      devices: Number of devices.

    >>> ring_bytes("all-reduce", 800, 8), ring_bytes("all-gather", 100, 8)
    (1400, 700)
    """
    if devices <= 1:
        return 0
    match kind:
        case "all-gather":
            return handed_bytes * (devices - 1)
        case "all-reduce":
            return 2 * handed_bytes * (devices - 1) // devices
        case "collective-broadcast" | "collective-permute":
            return handed_bytes
    return handed_bytes * (devices - 1) // devices


def collectives_of(
    text: str, sizes: dict[str, int], variables: Sequence[str] = ()
) -> tuple[Collective, ...]:
    """List the collectives of a compiled program, the most bytes first.

    Both ways of a conditional count. A collective that is started and awaited apart
    counts once, and so does one that the TPU compiler does bit by bit in a chain of
    fusions. Its fusion of an `all-reduce` and a slice runs as a `reduce-scatter`.

    Args:
      text: The text of `jax.stages.Compiled.as_text`.
      sizes: Sizes of the axes of the program's mesh, in their order; without them
        collectives have no axes.
      variables: Paths of the leaves of the state, in their order.
    """
    program = _with_reduce_scatters(parse(text))
    counts: Counter[Collective] = Counter()
    chained = set()
    for visit in walk(program):
        if _kind(visit.instruction) not in KINDS:
            continue
        chain = (_chain(visit.instruction), visit.turns)
        if chain[0] and chain in chained:
            continue
        chained.add(chain)
        one = _collective(program, visit, sizes, variables)
        if one.devices > 1:
            counts[one] += visit.turns
    found = [
        replace(one, count=count, wire_bytes=one.wire_bytes * count)
        for one, count in counts.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.wire_bytes, one.kind)))


def _with_reduce_scatters(program: HloText) -> HloText:
    """Write each `reduce-scatter` that the TPU compiler fuses as one instruction."""
    computations = {
        name: {each.name: _as_one(program, each) for each in computation.values()}
        for name, computation in program.computations.items()
    }
    return replace(program, computations=computations)


def _as_one(program: HloText, fusion: Instruction) -> Instruction:
    called = fusion.names("calls")
    if not called.startswith("all-reduce-scatter"):
        return fusion
    inside = program.computations.get(called, {}).values()
    reduction = next((each for each in inside if each.opcode == "all-reduce"), None)
    if reduction is None:
        return fusion
    # The fusion has the line, and the groups of devices.
    alone = re.sub(r"\bcalls=%?[\w.\-]+", "", fusion.attributes)
    attributes = f"{alone}, {reduction.attributes}"
    return replace(fusion, opcode="reduce-scatter", attributes=attributes)


def _chain(instruction: Instruction) -> str:
    """Return the channel of a collective that is in each fusion of a chain."""
    if "chain_id=" not in instruction.attributes:
        return ""
    found = re.search(r"\bchannel_id=(\d+)", instruction.attributes)
    return found[1] if found else ""


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _collective(
    program: HloText,
    visit: Visit,
    sizes: dict[str, int],
    variables: Sequence[str],
) -> Collective:
    instruction, around = visit.instruction, visit.around
    kind = _kind(instruction)
    operands = [around[name] for name in instruction.operands if name in around]
    handed = [array for each in operands for array in arrays(each.shape)]
    groups = device_groups(instruction, program.num_devices)
    devices = max(map(len, groups), default=1)
    return Collective(
        kind=kind,
        count=1,
        wire_bytes=ring_bytes(kind, sum(map(array_bytes, handed)), devices),
        axes=mesh_axes(groups, sizes),
        devices=devices,
        arrays=tuple(
            f"{dtype}[{','.join(map(str, shape))}]"
            for dtype, shape in _put_together(kind, handed, instruction, devices)
        ),
        source=program.user_line(instruction),
        variable=_variable(around, instruction, variables),
        op_name=_op_name(instruction),
        is_counted=visit.is_counted,
    )


def _op_name(instruction: Instruction | None) -> str:
    found = instruction and re.search(r'\bop_name="([^"]*)"', instruction.attributes)
    return found[1] if found else ""


def _variable(
    around: Computation, instruction: Instruction, variables: Sequence[str]
) -> str:
    """Return the leaf of the `FlatTree` that a program takes, by its path."""
    made = [source_of(around, name) for name in instruction.operands]
    found = [re.fullmatch(r"flat\[(\d+)\]", _op_name(each)) for each in made]
    places = [int(each[1]) for each in found if each]
    return ", ".join(variables[place] for place in places if place < len(variables))


Arrays = list[tuple[str, tuple[int, ...]]]


def _put_together(
    kind: str, handed: Arrays, instruction: Instruction, devices: int
) -> Arrays:
    """Return the operands; of an all-gather the results."""
    found = re.search(r"\bdimensions=\{(\d+)\}", instruction.attributes)
    if kind != "all-gather" or found is None:
        return handed
    cut = int(found[1])
    return [
        (dtype, (*shape[:cut], shape[cut] * devices, *shape[cut + 1 :]))
        for dtype, shape in handed
    ]

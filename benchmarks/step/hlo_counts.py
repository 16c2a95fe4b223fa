"""Count what a program does: matrix products, convolutions, and bytes on the wire.

Twice, because each view hides something. The lowered program (StableHLO) has the dtypes
that go over the wire on an accelerator; a CPU promotes bfloat16 collectives. The
compiled one (HLO text) has what is left after fusion and dead code, and says how often
its loops turn.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from replicator.engine.inspection.hlo_text import array_bytes, arrays, parse
from replicator.engine.inspection.walk import Visit, walk

_COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "ragged_all_to_all",
        "reduce_scatter",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Counts of the operations of a program that cost time.

    Attributes:
      dots: Matrix products.
      convolutions: Convolutions.
      collectives: Collectives; one may carry many arrays.
      wire_bytes: What one device hands to collectives, in bytes.
    """

    dots: int = 0
    convolutions: int = 0
    collectives: int = 0
    wire_bytes: int = 0

    def __add__(self, other: "Operations") -> "Operations":
        """Do both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Operations(**dict(zip(_FIELDS, map(sum, pairs), strict=True)))

    def __mul__(self, times: int) -> "Operations":
        """Do it so many times."""
        values = (value * times for value in dataclasses.astuple(self))
        return Operations(**dict(zip(_FIELDS, values, strict=True)))


_FIELDS = [field.name for field in dataclasses.fields(Operations)]


def lowered_operations(lowered: jax.stages.Lowered) -> Operations:
    """Count the operations of a program before XLA sees it.

    A function counts at each of its calls; the body of a loop counts once.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    functions = {op.name.value: op for op in module.body if _kind(op) == "func.func"}
    return _operations_of(functions["main"], functions)


def compiled_operations(compiled: jax.stages.Compiled) -> Operations:
    """Count the operations that one run of a compiled program executes.

    The body of a loop counts as often as the loop turns. All branches of a conditional
    count, so with one in the program this is an upper bound.

    Raises:
      ValueError: A loop holds such operations and does not say how often it turns.
    """
    return hlo_operations(compiled.as_text() or "")


def hlo_operations(text: str) -> Operations:
    """Count as `compiled_operations`, from the HLO text of the program."""
    program = parse(text)
    if not program.entry:
        raise ValueError("`text` must hold an ENTRY computation, got none.")
    total = Operations()
    for visit in walk(program):
        found = _compiled_operation(visit)
        if found != Operations() and not visit.is_counted:
            raise ValueError(
                "`text` must say how often its loops turn, got none for one around "
                f"`{visit.instruction.name}`. Count a program without such a loop."
            )
        total += found * visit.turns
    return total


def _compiled_operation(visit: Visit) -> Operations:
    name = visit.instruction.opcode.removesuffix("-start").replace("-", "_")
    if name not in _COLLECTIVES:
        return _local_operation(name)
    operands = (visit.around[each].shape for each in visit.instruction.operands)
    sent = sum(array_bytes(each) for shape in operands for each in arrays(shape))
    return Operations(collectives=1, wire_bytes=sent)


def _operations_of(op: Any, functions: dict[str, Any]) -> Operations:
    """Count what an MLIR operation does, with all that is nested in it or called."""
    found = _lowered_operation(op)
    if _kind(op) == "func.call":
        callee = op.attributes["callee"].value
        found += _operations_of(functions[callee], functions)
    for region in op.operation.regions:
        for block in region:
            for inner in block:
                found += _operations_of(inner, functions)
    return found


def _lowered_operation(op: Any) -> Operations:
    dialect, _, name = _kind(op).partition(".")
    if dialect != "stablehlo":
        return Operations()
    if name in _COLLECTIVES:
        sent = sum(_tensor_bytes(operand.type) for operand in op.operands)
        return Operations(collectives=1, wire_bytes=sent)
    return _local_operation({"dot_general": "dot"}.get(name, name))


def _kind(op: Any) -> str:
    return op.operation.name


def _tensor_bytes(tensor: Any) -> int:
    return math.prod(tensor.shape) * _element_bytes(str(tensor.element_type))


def _local_operation(name: str) -> Operations:
    match name:
        case "dot":
            return Operations(dots=1)
        case "convolution":
            return Operations(convolutions=1)
    return Operations()


def _element_bytes(dtype: str) -> int:
    """Return the bytes of one element: `f32` has 4, `pred` and `i1` have 1."""
    if dtype.startswith("complex"):  # StableHLO: complex<f32>
        return 2 * _element_bytes(dtype[len("complex<") : -1])
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1

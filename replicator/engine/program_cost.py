"""Cost of one call of a compiled program: arithmetic, bytes on the wire, memory.

Arithmetic is counted in the program as it was traced: there a loop has its number of
turns, while the compiler's own reports count its body once. Where replicas have
collectives of their own, wire bytes are counted there, too, as a collective has the
dtype that goes over the wire; a CPU's program shows bfloat16 as float32 (jaxlib 0.10).
Collectives that the partitioner adds, and memory, only the compiled program shows.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.extend import core

from replicator.engine.analysis.dataflow import shape_of, sub_jaxprs
from replicator.engine.inspection.collectives import collectives_of, ring_bytes
from replicator.engine.memory import MemoryNeed, memory_need
from replicator.strategies.cost import Traffic, together, traffic_over

# Name of XLA for each primitive.
_COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "pbroadcast": "collective-broadcast",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "ragged_all_to_all": "ragged-all-to-all",
    "reduce_scatter": "reduce-scatter",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramCost:
    """Cost of one call of a program.

    Attributes:
      flops: Number of operations of its matrix products and convolutions on all devices
        together, recomputation in the backward pass included. A loop without a known
        number of turns counts once, a branch as its dearest way.
      collective_bytes: Number of bytes that one device sends in collectives, if they
        are rings. Where the partitioner adds them, both ways of a branch count, and on
        a CPU bfloat16 has four bytes.
      bytes_accessed: Number of bytes that one device reads and writes, by the
        compiler's estimate; None without one, or if the program has a loop, whose body
        the estimate counts once.
      memory: Memory on each device; None if the backend does not report it.
      work: The same as the traced program has it: by dtype, and collective by
        collective.
    """

    flops: int
    collective_bytes: int
    bytes_accessed: float | None
    memory: MemoryNeed | None
    work: "TracedWork" = dataclasses.field(default_factory=lambda: TracedWork())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """One compilation of a step.

    Attributes:
      seconds: Time to trace, prove, lower and compile it; 0 if nobody timed it.
      steps_per_call: Number of updates of a call.
      cost: Cost of a call.
    """

    seconds: float
    steps_per_call: int
    cost: ProgramCost

    def per_step(self) -> dict[str, float]:
        """Return the costs of one step, by name; `memory_bytes` only if known."""
        numbers: dict[str, float] = {
            "flops": self.cost.flops / self.steps_per_call,
            "collective_bytes": self.cost.collective_bytes / self.steps_per_call,
        }
        if self.cost.memory is not None:
            numbers["memory_bytes"] = self.cost.memory.total_bytes
        return numbers

    def __str__(self) -> str:
        """Return one line: `compiled in 3.2 s · 1.4 GFLOP/step · …`."""
        units = {
            "flops": "FLOP/step",
            "collective_bytes": "B on the wire/step",
            "memory_bytes": "B/device",
        }
        costs = [
            f"{engineering(cost)}{units[name]}"
            for name, cost in self.per_step().items()
            if cost
        ]
        return " · ".join([f"compiled in {self.seconds:.1f} s", *costs])


def program_cost(
    traced: core.ClosedJaxpr, compiled: jax.stages.Compiled, copy_bytes: int = 0
) -> ProgramCost:
    """Return the cost of a call of a program.

    Args:
      traced: The program's jaxpr, `jax.stages.Traced.jaxpr`. With a `shard_map` in it
        the collectives are its own; else they are those of the partitioner.
      compiled: The same, compiled.
      copy_bytes: Size of the copy of its state that a save makes; 0 for none.

    >>> traced = jax.jit(lambda x: x @ x).trace(jnp.ones((4, 4)))
    >>> program_cost(traced.jaxpr, traced.lower().compile()).flops
    128
    """
    work = traced_work(traced)
    wire_bytes = sum(each.wire_bytes for each in work.traffic)
    if not work.replicates:
        found = collectives_of(compiled.as_text() or "", {})
        wire_bytes = sum(each.wire_bytes for each in found)
    return ProgramCost(
        flops=sum(work.flops.values()),
        collective_bytes=wire_bytes,
        bytes_accessed=None if work.loops else _bytes_accessed(compiled),
        memory=memory_need(compiled, copy_bytes),
        work=work,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TracedWork:
    """Work of a program, counted in its jaxpr.

    Attributes:
      flops: Number of operations of its matrix products and convolutions on all
        devices together, by dtype of the operands.
      product_bytes: Number of bytes of their operands and results, likewise: what goes
        through memory if all else is fused with them.
      traffic: Collectives of replicas of its own, which each device takes part in.
      loops: Whether it has a loop.
      replicates: Whether it has replicas: a `shard_map`.
    """

    flops: Mapping[str, int] = dataclasses.field(default_factory=dict)
    product_bytes: int = 0
    traffic: tuple[Traffic, ...] = ()
    loops: bool = False
    replicates: bool = False


def traced_work(traced: core.ClosedJaxpr) -> TracedWork:
    """Return the work of a traced program; nothing is compiled.

    Args:
      traced: Its jaxpr, `jax.stages.Traced.jaxpr` or from `jax.make_jaxpr`.

    >>> traced_work(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((4, 4)))).flops
    {'float32': 128}
    """
    work = _work(traced.jaxpr, {})
    return dataclasses.replace(
        work,
        replicates=any(e.primitive.name == "shard_map" for e in traced.jaxpr.eqns),
    )


def _work(jaxpr: core.Jaxpr, sizes: Mapping[str, int]) -> TracedWork:
    return _sum(_equation_work(eqn, sizes) for eqn in jaxpr.eqns)


def _sum(parts: Iterable[TracedWork]) -> TracedWork:
    parts = list(parts)
    flops: dict[str, int] = {}
    for dtype, number in ((d, n) for part in parts for d, n in part.flops.items()):
        flops[dtype] = flops.get(dtype, 0) + number
    return TracedWork(
        flops=flops,
        product_bytes=sum(part.product_bytes for part in parts),
        traffic=together(each for part in parts for each in part.traffic),
        loops=any(part.loops for part in parts),
    )


def _equation_work(eqn: core.JaxprEqn, sizes: Mapping[str, int]) -> TracedWork:
    name = eqn.primitive.name
    if name == "dot_general":
        return _product_work(eqn, _dot_flops(eqn))
    if name == "conv_general_dilated":
        return _product_work(eqn, _convolution_flops(eqn))
    if name in _COLLECTIVES:
        return TracedWork(traffic=_sent(eqn, sizes))
    if name == "shard_map":
        sizes = eqn.params["mesh"].shape
    inside = [_work(jaxpr, sizes) for jaxpr in sub_jaxprs(eqn)]
    if not inside:
        return TracedWork()
    if name == "cond":
        inside = [_dearest(inside)]
    turns = eqn.params["length"] if name == "scan" else 1
    devices = eqn.params["mesh"].size if name == "shard_map" else 1
    whole = _sum(inside)
    return TracedWork(
        flops={d: number * turns * devices for d, number in whole.flops.items()},
        product_bytes=whole.product_bytes * turns * devices,
        traffic=tuple(
            dataclasses.replace(
                each, wire_bytes=each.wire_bytes * turns, count=each.count * turns
            )
            for each in whole.traffic
        ),
        loops=name in ("scan", "while") or whole.loops,
    )


def _dearest(ways: list[TracedWork]) -> TracedWork:
    """Return the most of each that a branch has, as if one way had it all."""
    by_flops = max(ways, key=lambda way: sum(way.flops.values()))
    by_bytes = max(ways, key=lambda way: sum(each.wire_bytes for each in way.traffic))
    return TracedWork(
        flops=by_flops.flops,
        product_bytes=max(way.product_bytes for way in ways),
        traffic=by_bytes.traffic,
        loops=any(way.loops for way in ways),
    )


def _product_work(eqn: core.JaxprEqn, flops: int) -> TracedWork:
    operands: list[Any] = [each.aval for each in eqn.invars]
    dtype = max((each.dtype for each in operands), key=lambda one: one.itemsize)
    arrays = (*operands, *(each.aval for each in eqn.outvars))
    return TracedWork(
        flops={str(dtype): flops}, product_bytes=sum(map(_array_bytes, arrays))
    )


def _sent(eqn: core.JaxprEqn, sizes: Mapping[str, int]) -> tuple[Traffic, ...]:
    handed = sum(_array_bytes(each.aval) for each in eqn.invars)
    axes: Any = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = axes if isinstance(axes, tuple) else (axes,)
    names = tuple(axis for axis in axes if axis in sizes)
    groups = eqn.params.get("axis_index_groups")
    devices = (
        max(map(len, groups)) if groups else math.prod(sizes[axis] for axis in names)
    )
    kind = _COLLECTIVES[eqn.primitive.name]
    wire_bytes = ring_bytes(kind, handed, devices)
    if not wire_bytes:
        return ()
    over = traffic_over(kind, names, sizes, wire_bytes)
    if groups:
        one = sorted(max(groups, key=len))
        stride = over.stride * min(b - a for a, b in itertools.pairwise(one))
        last = over.stride * (one[-1] - one[0]) + stride
        over = dataclasses.replace(over, stride=stride, span=last)
    return (over,)


def _dot_flops(eqn: core.JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = shape_of(eqn.invars[0])
    products = math.prod(lhs[dimension] for dimension in contracted)
    return 2 * products * math.prod(shape_of(eqn.outvars[0]))


def _convolution_flops(eqn: core.JaxprEqn) -> int:
    kernel = shape_of(eqn.invars[1])
    _, features, *window = eqn.params["dimension_numbers"].rhs_spec
    products = math.prod(kernel[dimension] for dimension in (features, *window))
    # A dilated input, as in the gradient of a strided convolution, is mostly zeros.
    zeros = math.prod(eqn.params["lhs_dilation"])
    return 2 * products * math.prod(shape_of(eqn.outvars[0])) // zeros


def _array_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _bytes_accessed(compiled: jax.stages.Compiled) -> float | None:
    costs: Any = compiled.cost_analysis()
    return costs.get("bytes accessed") if costs else None


def engineering(value: float) -> str:
    """Write a quantity with a prefix for its unit.

    >>> engineering(1.4e9) + "FLOP"
    '1.4 GFLOP'
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or prefix == "P":
            return f"{value:.3g} {prefix}"
        value /= 1000
    raise AssertionError("the last prefix returns")

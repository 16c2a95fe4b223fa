"""Predict the seconds of a step on a machine, from what it computes and sends.

A step computes, moves bytes to and from memory, and sends bytes over each level of
links. Each takes its amount divided by its speed; a message also waits for the latency
of each hop (Hockney 1994). A device reads and writes while it multiplies, so there the
longer of both counts (Williams et al. 2009, "Roofline"). How much of the sending
overlaps with that, no program shows. So a prediction is a range: from the longest part,
if all else hides behind it, to the sum of the device's part and all of the links'.

Nothing here is fitted to runs. What it does not know: stragglers, programs that reach
less than a peak, and latencies of compilers' own making.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from replicator.errors import ArgumentError
from replicator.strategies.machine import Link, Machine
from replicator.strategies.strategy import Strategy
from replicator.strategies.table import rows, sent
from replicator.strategies.traffic import Traffic, together
from replicator.strategies.variables import Variable


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Work of one step on one device.

    Attributes:
      num_devices: Number of devices that take part.
      flops: Number of operations of products, by the dtype of their operands.
      memory_bytes: Number of bytes read from memory and written to it.
      traffic: Collectives.
    """

    num_devices: int
    flops: Mapping[str, float]
    memory_bytes: float = 0
    traffic: tuple[Traffic, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of a step; `print` it for a line.

    Attributes:
      arithmetic_s: Seconds of the products at the device's peak.
      memory_s: Seconds of reading and writing memory.
      links_s: Seconds of sending, by level of links.
    """

    arithmetic_s: float
    memory_s: float
    links_s: Mapping[str, float]

    @property
    def low_s(self) -> float:
        """Seconds if all overlaps: the longest part."""
        return max(self.arithmetic_s, self.memory_s, *self.links_s.values())

    @property
    def high_s(self) -> float:
        """Seconds if no link is used while the device works, or another link is."""
        return max(self.arithmetic_s, self.memory_s) + sum(self.links_s.values())

    def __str__(self) -> str:
        """Write it as `12 to 19 ms: arithmetic 12, memory 3, host 4`."""
        parts = {"arithmetic": self.arithmetic_s, "memory": self.memory_s}
        scale, unit = (1, "s") if self.high_s >= 1 else (1000, "ms")
        named = ", ".join(
            f"{name} {seconds * scale:.3g}"
            for name, seconds in {**parts, **self.links_s}.items()
        )
        low, high = self.low_s * scale, self.high_s * scale
        return f"{low:.3g} to {high:.3g} {unit}: {named}"


def predict(features: Features, machine: Machine) -> StepTime:
    """Predict the seconds of a step.

    A group of devices lies on the levels of links that its ring passes; the slowest of
    them decides, and the seconds are that level's.

    Args:
      features: Work of the step on one device; from `forecast`, or from
        `rep.inspect(...).features()`.
      machine: The machine; it may have more devices than take part.

    Raises:
      ArgumentError: The machine has fewer devices, or its figures are not known.

    >>> machine = Machine.from_topology("h100:2x8")
    >>> sent = {"axes": ("replica",), "wire_bytes": 4 * 10**9, "stride": 1, "span": 16}
    >>> sums = Traffic(kind="all-reduce", **sent)
    >>> features = Features(num_devices=16, flops={"bfloat16": 5e12}, traffic=(sums,))
    >>> print(predict(features, machine))
    10 to 15.1 ms: arithmetic 5.06, memory 0, network 10
    """
    if features.num_devices > machine.num_devices:
        raise ArgumentError(
            f"`machine` must have the {features.num_devices} devices of the step, got "
            f"{machine.name} with {machine.num_devices}. Take a larger one."
        )
    if machine.hardware is None:
        raise ArgumentError(
            "`machine` must have figures of its devices, got "
            f"{machine.name} without. Run `replicator devices --calibrate` on it, or "
            "name the kind in its file: `device: ...`."
        )
    links_s = {link.level: 0.0 for link in machine.links}
    for traffic in features.traffic:
        found = {
            link.level: _seconds(traffic, link)
            for link in _passed(traffic, machine.links)
        }
        if found:
            slowest = max(found, key=found.__getitem__)
            links_s[slowest] += found[slowest]
    hardware = machine.hardware
    memory_speed = hardware.memory_bytes_per_s or math.inf
    return StepTime(
        arithmetic_s=sum(n / hardware.peak(d) for d, n in features.flops.items()),
        memory_s=features.memory_bytes / memory_speed,
        links_s={level: seconds for level, seconds in links_s.items() if seconds},
    )


def forecast(
    strategy: Strategy,
    variables: Sequence[Variable],
    num_devices: int,
    *,
    flops: Mapping[str, float],
    memory_bytes: float = 0,
) -> Features:
    """Return the work of a step under a strategy, without compiling it.

    Bytes are those of `table`, with its limits: weights travel in the dtype in which
    they are kept, and the activations of `tensor_parallel` are left out.

    Args:
      strategy: The strategy.
      variables: Variables of the state.
      num_devices: Number of devices.
      flops: Number of operations of the step on all devices together, by dtype.
      memory_bytes: Number of bytes that its products read and write, likewise.

    Raises:
      ArgumentError: The strategy does not fit the devices or a variable.

    >>> w = Variable(path="w", shape=(64, 64), dtype="float32", follows="w")
    >>> found = forecast(Strategy(name="mine", replica=8), [w], 8, flops={"float32": 8})
    >>> found.flops, found.traffic[0].wire_bytes
    ({'float32': 1.0}, 28672)
    """
    mesh = strategy.sizes(num_devices)
    kept = sum(row.device_bytes for row in rows(strategy, variables, num_devices))
    return Features(
        num_devices=num_devices,
        flops={dtype: number / num_devices for dtype, number in flops.items()},
        # An update reads all of the state, and writes it.
        memory_bytes=memory_bytes / num_devices + 2 * kept,
        traffic=together(
            each for variable in variables for each in sent(strategy, variable, mesh)
        ),
    )


def bytes_by_level(features: Features, machine: Machine) -> dict[str, int]:
    """Return the bytes that a device sends, by the outermost level that they pass.

    Args:
      features: Work of the step on one device.
      machine: The machine, with or without figures.

    >>> sent = {"axes": ("replica",), "wire_bytes": 10**8, "stride": 1, "span": 16}
    >>> sums = Traffic(kind="all-reduce", **sent)
    >>> features = Features(num_devices=16, flops={}, traffic=(sums,))
    >>> bytes_by_level(features, Machine.from_topology("h100:2x8"))
    {'network': 100000000}
    """
    found: dict[str, int] = {}
    for traffic in features.traffic:
        for link in list(_passed(traffic, machine.links))[-1:]:
            found[link.level] = found.get(link.level, 0) + traffic.wire_bytes
    return found


def _passed(traffic: Traffic, links: Sequence[Link]) -> Iterator[Link]:
    """Yield the levels that a ring of each group passes."""
    inner = 1
    for link in links:
        lies_in_member = inner % traffic.span == 0
        has_several_here = traffic.stride < link.devices
        if has_several_here and not lies_in_member:
            yield link
        inner = link.devices


def _seconds(traffic: Traffic, link: Link) -> float:
    span = min(traffic.span, link.devices)
    # As many rings pass a member as lie beside each other in it.
    rings = min(traffic.stride, link.shared_by)
    speed = link.bytes_per_s / rings
    # For a group that lies in few of the members at once, as two hosts of many.
    hops = max(-(-span // max(traffic.stride, link.shared_by)) - 1, 1)
    passed = 1.0
    if link.torus:
        ways = list(_ways(link, traffic.stride, span))
        speed *= sum(share for _, _, share in ways) / len(link.torus)
        hops = sum(n // 2 if is_ring else n - 1 for n, is_ring, _ in ways)
        if "all-to-all" in traffic.kind:
            # Each piece passes the devices between, a quarter of a ring on average.
            passed = max(1.0, max(n for n, _, _ in ways) / 4)
    if traffic.kind == "all-reduce":
        hops *= 2  # scattered, then gathered
    return traffic.wire_bytes * passed / speed + traffic.count * hops * link.latency_s


def _ways(link: Link, stride: int, span: int) -> Iterator[tuple[int, bool, float]]:
    """Yield what a group has of each dimension of a torus.

    Yields:
      Number of places along it; whether they are a ring; and the share that the group
      has of the dimension's links: half where they are no ring, as ends meet nobody,
      and less where other groups lie between its devices.
    """
    first = max(stride // link.shared_by, 1)
    end = max(span // link.shared_by, first)
    inner = 1
    for size, wraps in zip(reversed(link.torus), reversed(link.wraps), strict=True):
        low, high = max(first, inner), min(end, inner * size)
        if high > low:
            places = -(-high // low)
            is_ring = wraps and places == size
            between = -(-low // inner)
            yield places, is_ring, (1.0 if is_ring else 0.5) / between
        inner *= size

"""List the strategies that could serve a model on a machine, with what each costs.

Every builder, at every factorisation of the mesh whose axes lie on whole levels of
links: a group that straddles hosts is as slow as the network, and saves nothing by it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from replicator.errors import ArgumentError
from replicator.strategies.builders import (
    data_parallel,
    fsdp,
    hybrid,
    tensor_parallel,
    zero1,
    zero2,
)
from replicator.strategies.choose import Candidate
from replicator.strategies.cost import Features, bytes_by_level, forecast, predict
from replicator.strategies.machine import Machine
from replicator.strategies.rule import Partition, Rule
from replicator.strategies.strategy import Strategy
from replicator.strategies.table import rows
from replicator.strategies.variables import Variable

_LOSSY = ("bf16", "int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of a step on all devices together, whatever the strategy.

    Attributes:
      variables: Variables of its state.
      examples: Number of examples of a global batch.
      batch_bytes: Number of bytes of a global batch.
      flops: Number of operations of its products, by dtype.
      product_bytes: Number of bytes of their operands and results.
    """

    variables: tuple[Variable, ...]
    examples: int
    batch_bytes: int
    flops: Mapping[str, int]
    product_bytes: int


def strategies_for(
    machine: Machine,
    *,
    tensor_rules: Mapping[str, Partition] | None = None,
    rules: bool = False,
    lossy: bool = False,
) -> dict[str, Strategy]:
    """Return the strategies that a machine makes sense of, by their calls.

    Args:
      machine: The machine.
      tensor_rules: Rules of the model for `tensor_parallel`.
      rules: Whether the optimizer obeys rules for sums of gradients.
      lossy: Whether numbers may travel in narrow forms.

    >>> list(strategies_for(Machine.from_topology("h100:4")))[:4]
    ['data_parallel', 'zero1', 'zero2', 'fsdp']
    """
    if machine.num_devices == 1:
        return {"data_parallel": data_parallel()}
    found = {
        "data_parallel": data_parallel(),
        "zero1": zero1(),
        "zero2": zero2(),
        "fsdp": fsdp(),
    }
    for size in _whole_sizes(machine):
        others = machine.num_devices // size
        found[f"hybrid(shard={size})"] = hybrid(shard=size)
        for stage in (zero1, zero2):
            name = f"{stage.__name__}(shards={size}, replicas={others})"
            found[name] = stage(shards=size, replicas=others)
    if tensor_rules:
        sizes = [*_whole_sizes(machine), machine.num_devices]
        for size in sizes:
            others = machine.num_devices // size
            name = f"tensor_parallel(model={size}, replicas={others})"
            found[name] = tensor_parallel(tensor_rules, model=size, replicas=others)
    return {**found, **dict(_by_rules(machine, lossy=lossy) if rules else ())}


def candidates_for(
    strategies: Mapping[str, Strategy], work: Work, machine: Machine
) -> tuple[Candidate, ...]:
    """Return candidates with their forecasts; those that do not divide say so.

    Args:
      strategies: Strategies by name.
      work: Work of the step.
      machine: The machine.
    """
    return tuple(
        _candidate(name, strategy, work, machine)
        for name, strategy in strategies.items()
    )


def _candidate(
    name: str, strategy: Strategy, work: Work, machine: Machine
) -> Candidate:
    n = machine.num_devices
    try:
        strategy.check_variables(work.variables)
        sizes = strategy.sizes(n)
        kept = rows(strategy, work.variables, n)
        features = forecast(
            strategy,
            work.variables,
            n,
            flops=work.flops,
            memory_bytes=work.product_bytes,
        )
    except ArgumentError as failure:
        why = str(failure).partition("\n")[0]
        return Candidate(
            name=name, strategy=strategy, status="does not divide", why=why
        )
    parts = math.prod(sizes[axis] for axis in strategy.batch_axes)
    is_uneven = work.examples % parts > 0
    return Candidate(
        name=name,
        strategy=strategy,
        status="does not divide" if is_uneven else "waiting",
        why=f"{work.examples} examples over {parts} parts" if is_uneven else "",
        least_bytes=sum(row.device_bytes for row in kept) + work.batch_bytes // parts,
        predicted=predicted(features, machine),
        bound_s=least_seconds(strategy, features, machine),
        link_bytes=bytes_by_level(features, machine),
    )


def predicted(features: Features, machine: Machine):
    """Return the predicted seconds of a step; None without figures of the machine."""
    return None if machine.hardware is None else predict(features, machine)


def least_seconds(strategy: Strategy, features: Features, machine: Machine) -> float:
    """Return seconds that a compiled program seldom goes below; 0 if not known.

    XLA joins collectives of a kind into one, and merges the gathers forward and
    backward; how few rows there are, only the program shows.
    """
    if machine.hardware is None:
        return 0.0
    has_rows = any(rule.synchronise == "rows" for rule in strategy.rules)
    fewest = tuple(
        replace(each, count=1, wire_bytes=each.wire_bytes // 2)
        if each.kind == "all-gather"
        else replace(each, count=1)
        for each in features.traffic
        if not has_rows
    )
    return predict(replace(features, traffic=fewest), machine).high_s


def _whole_sizes(machine: Machine) -> list[int]:
    """Return sizes of groups, side by side, that lie on whole levels of links."""
    n = machine.num_devices
    levels = [link.devices for link in machine.links]
    return [
        size
        for size in range(2, n)
        if n % size == 0
        and all(level % size == 0 or size % level == 0 for level in levels)
    ]


def _by_rules(machine: Machine, *, lossy: bool) -> Iterator[tuple[str, Strategy]]:
    """Yield ways in which replicas add gradients up: by hosts, by rows, narrow."""
    inside = machine.links[0].devices if len(machine.links) > 1 else None
    every: Sequence[str | None] = (None, *_LOSSY) if lossy else (None,)
    for form in every:
        if form is not None:
            yield (
                f"data_parallel({form})",
                data_parallel([Rule(pattern="*", compress=form)]),
            )
        if inside is not None:
            rule = Rule(pattern="*", synchronise="hierarchical", compress=form)
            name = "hierarchical" if form is None else f"hierarchical, {form}"
            yield (
                f"data_parallel({name})",
                data_parallel([rule], devices_per_host=inside),
            )
    yield "data_parallel(rows)", data_parallel([Rule(pattern="*", synchronise="rows")])

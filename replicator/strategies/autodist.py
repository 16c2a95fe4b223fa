"""AutoDist's builders by their names, each as one of our strategies.

AutoDist spread variables over parameter servers and all-reduces (Zhang et al. 2020,
"AutoSync", §2; petuum/autodist). Here there are no servers: what a server did for a
variable, its share of the devices does, in the same step. So a builder of servers is a
strategy that cuts, whatever its placement was, and no worker reads an old value.
"""

from typing import Any

from replicator.base.tracebacks import short_traceback
from replicator.errors import ArgumentError, check_count, check_word
from replicator.strategies.builders import data_parallel, fsdp, zero1
from replicator.strategies.rule import Rule
from replicator.strategies.strategy import Strategy

__all__ = [
    "PS",
    "AllReduce",
    "PSLoadBalancing",
    "Parallax",
    "PartitionedAR",
    "PartitionedPS",
    "RandomAxisPartitionAR",
    "UnevenPartitionedPS",
]

_COMPRESSORS = {
    "NoneCompressor": None,
    "HorovodCompressor": "f16",
    "HorovodCompressorEF": "f16",
    "PowerSGDCompressor": "power_sgd(1)",
}
_LINKS = ("AUTO", "NCCL", "RING")


@short_traceback
def PS(
    local_proxy_variable: bool = False, sync: bool = True, staleness: int = 0
) -> Strategy:
    """Return `zero1`: each device updates its share of all variables.

    Equal: one update of each variable from the sum of all gradients, which all workers
    read before their next step. Not equal: no single server holds all of them, which
    was slower than an all-reduce wherever weights were many.

    Args:
      local_proxy_variable: Of no effect: parameters are whole on each device, as with
        AutoDist's proxies.
      sync: True; updates without waiting are refused.
      staleness: 0; old parameters are refused.

    Raises:
      ArgumentError: Workers would read old parameters.

    >>> PS().name
    'zero1'
    """
    del local_proxy_variable
    _require_synchronous(sync, staleness)
    return zero1()


@short_traceback
def PSLoadBalancing(
    local_proxy_variable: bool = False, sync: bool = True, staleness: int = 0
) -> Strategy:
    """Return `zero1`, as `PS` does: its shares are equal, so loads are balanced.

    Not equal: AutoDist gave whole variables to the server with the fewest bytes.

    Args and errors: as of `PS`.

    >>> PSLoadBalancing() == PS()
    True
    """
    return PS(local_proxy_variable, sync, staleness)


@short_traceback
def PartitionedPS(
    local_proxy_variable: bool = False, sync: bool = True, staleness: int = 0
) -> Strategy:
    """Return `fsdp`: each variable is cut, and gathered where it is used.

    Not equal: AutoDist cut the first axis into its smallest divisor, here the largest
    axis that divides is cut over all devices.

    Args and errors: as of `PS`.

    >>> PartitionedPS().rules[0].stored
    'shard'
    """
    del local_proxy_variable
    _require_synchronous(sync, staleness)
    return fsdp()


@short_traceback
def UnevenPartitionedPS(
    local_proxy_variable: bool = False, sync: bool = True, staleness: int = 0
) -> Strategy:
    """Return `fsdp(uneven="pad")`: what does not divide is cut, too.

    Not equal: AutoDist made pieces of unlike sizes on purpose; ours are of one size,
    with zeros behind the last, which no step sees.

    Args and errors: as of `PS`.

    >>> UnevenPartitionedPS().rules[0].uneven
    'pad'
    """
    del local_proxy_variable
    _require_synchronous(sync, staleness)
    return fsdp(uneven="pad")


@short_traceback
def AllReduce(
    chunk_size: int = 128,
    all_reduce_spec: str = "NCCL",
    compressor: str = "NoneCompressor",
) -> Strategy:
    """Return `data_parallel`, with a narrow form where a compressor is named.

    Equal: the sum of all gradients, on each device. Not equal: XLA joins sums and
    chooses how they travel; AutoDist's compressors left numbers as they were, ours are
    narrow, and what rounding takes away is owed to the next update.

    Args:
      chunk_size: Of no effect: number of sums that AutoDist joined.
      all_reduce_spec: Of no effect: one of `"AUTO"`, `"NCCL"`, `"RING"`.
      compressor: `"NoneCompressor"`; `"HorovodCompressor"` or `"HorovodCompressorEF"`
        for float16; `"PowerSGDCompressor"` for an approximation of rank 1.

    Raises:
      ArgumentError: An argument is none of these.

    >>> AllReduce(compressor="HorovodCompressor").rules[0].compress
    'f16'
    """
    check_count("chunk_size", chunk_size, "Leave it out.")
    check_word("all_reduce_spec", all_reduce_spec, _LINKS)
    check_word("compressor", compressor, tuple(_COMPRESSORS))
    form = _COMPRESSORS[compressor]
    return data_parallel([Rule(pattern="*", compress=form)] if form else [])


@short_traceback
def PartitionedAR(chunk_size: int = 128) -> Strategy:
    """Return `data_parallel`: a sum of pieces is the sum.

    Not equal: AutoDist cut a variable into pieces, each with an all-reduce of its own.

    Args:
      chunk_size: Of no effect.

    >>> PartitionedAR() == AllReduce()
    True
    """
    return AllReduce(chunk_size)


@short_traceback
def RandomAxisPartitionAR(chunk_size: int = 128) -> Strategy:
    """Return `data_parallel`, as `PartitionedAR`: the axis of a cut changes no sum.

    Args:
      chunk_size: Of no effect.

    >>> RandomAxisPartitionAR() == AllReduce()
    True
    """
    return AllReduce(chunk_size)


@short_traceback
def Parallax(
    chunk_size: int = 128,
    local_proxy_variable: bool = False,
    sync: bool = True,
    staleness: int = 0,
) -> Strategy:
    """Return `data_parallel` with `synchronise="rows"`: rows where gradients have them.

    Equal: embeddings send the rows that were looked up, all else is summed whole (Kim
    et al. 2019, "Parallax", §3). Not equal: rows go to all devices, not to a server;
    the step's program shows which gradients have rows.

    Args and errors: as of `AllReduce` and `PS`.

    >>> Parallax().rules[0].synchronise
    'rows'
    """
    del local_proxy_variable
    check_count("chunk_size", chunk_size, "Leave it out.")
    _require_synchronous(sync, staleness)
    return data_parallel([Rule(pattern="*", synchronise="rows")])


def _require_synchronous(sync: Any, staleness: Any) -> None:
    if sync is not True or staleness != 0 or isinstance(staleness, bool):
        raise ArgumentError(
            "`sync` must be True with `staleness=0`, got "
            f"{sync!r} and {staleness!r}. Leave both out: no step reads old parameters."
        )

"""Builders of the named strategies.

A builder of your own is a function `(variables, devices) -> Strategy`; see README.md.
Partitioning in three stages: Rajbhandari et al. 2020, "ZeRO", §5; whole copies over
some devices and pieces over others: Zhao et al. 2023, "PyTorch FSDP", §3.2.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from replicator.base.tracebacks import short_traceback
from replicator.base.types import Device
from replicator.errors import ArgumentError
from replicator.strategies.rule import Partition, Rule, Uneven
from replicator.strategies.strategy import WHOLE_BELOW_BYTES, Strategy
from replicator.strategies.variables import Variable

Builder = Callable[[tuple[Variable, ...], Sequence[Device]], Strategy]
"""A function of the variables of a state and the devices that returns a strategy."""


@short_traceback
def data_parallel(
    rules: Sequence[Rule] = (), *, devices_per_host: int | None = None
) -> Strategy:
    """Give each device a replica: parameters whole, gradients reduced by the step.

    Args:
      rules: Rules with `synchronise` or `compress`, of which the first match decides
        how replicas add up a gradient; a plain all-reduce where none matches. Paths
        begin with the `name` of the wrapped optimizer: `params/embedding`.
      devices_per_host: Number of devices that fast links join, for rules with
        `synchronise="hierarchical"`; by default that of the replicator's `machine`.

    Raises:
      ArgumentError: `rules` is not a list of rules, one cuts variables, or none is for
        `devices_per_host`.

    >>> data_parallel().sizes(8)
    {'replica': 8, 'shard': 1, 'model': 1}
    >>> narrow = data_parallel([Rule(pattern="*", compress="int8")])
    >>> narrow.rules[0].compress
    'int8'
    """
    return Strategy(
        name="data_parallel",
        kind="replicates",
        replica=None,
        rules=_listed(rules, 'data_parallel([Rule(pattern="*", compress="int8")])'),
        devices_per_host=devices_per_host,
    )


@short_traceback
def zero1(
    *,
    replicas: int = 1,
    shards: int | None = None,
    whole_below_bytes: int = WHOLE_BELOW_BYTES,
    uneven: Uneven = "whole",
) -> Strategy:
    """Cut the optimizer's state; parameters and gradients are whole.

    With `accumulate` the sums of gradients are gathered at every microbatch: use
    `zero2` there.

    Args:
      replicas: Number of whole copies, each on its part of the devices.
      shards: Number of devices that share a copy; all by default.
      whole_below_bytes: Smaller variables stay whole.
      uneven: Treatment of variables that do not divide, as in a `Rule`.

    >>> zero1(shards=4, replicas=2).batch_axes
    ('replica', 'shard')
    """
    rule = Rule(pattern="*", optimizer="shard", gradient=(), uneven=uneven)
    return _sharded("zero1", rule, replicas, shards, whole_below_bytes)


@short_traceback
def zero2(
    *,
    replicas: int = 1,
    shards: int | None = None,
    whole_below_bytes: int = WHOLE_BELOW_BYTES,
    uneven: Uneven = "whole",
) -> Strategy:
    """Cut the optimizer's state and gradients; arguments as for `zero1`.

    >>> rule = zero2().rules[0]
    >>> rule.stored, rule.optimizer                      # the parameter is whole
    ((), 'shard')
    """
    rule = Rule(pattern="*", optimizer="shard", uneven=uneven)
    return _sharded("zero2", rule, replicas, shards, whole_below_bytes)


@short_traceback
def fsdp(
    *,
    replicas: int = 1,
    shards: int | None = None,
    whole_below_bytes: int = WHOLE_BELOW_BYTES,
    uneven: Uneven = "whole",
) -> Strategy:
    """Cut all state; each parameter is whole where it is multiplied.

    XLA merges its gathers forward and backward into one, and it stays whole between,
    except in layers under `jax.checkpoint`. State that is not a parameter (replay
    buffers, caches) is gathered where it is used, too, unless its rule has
    `computed="shard"`.

    Args: as for `zero1`.

    >>> fsdp(replicas=2).sizes(8)
    {'replica': 2, 'shard': 4, 'model': 1}
    """
    rule = Rule(pattern="*", stored="shard", uneven=uneven)
    return _sharded("fsdp", rule, replicas, shards, whole_below_bytes)


@short_traceback
def hybrid(
    *,
    shard: int | None = None,
    whole_below_bytes: int = WHOLE_BELOW_BYTES,
    uneven: Uneven = "whole",
) -> Strategy:
    """Cut all state over `shard` devices; all devices together hold whole copies.

    Args:
      shard: Number of devices that share a copy; by default those of a host, where
        links are fast, as the replicator's `machine` has it.
      whole_below_bytes: Smaller variables stay whole.
      uneven: Treatment of variables that do not divide, as in a `Rule`.

    >>> hybrid(shard=4).sizes(32)
    {'replica': 8, 'shard': 4, 'model': 1}
    """
    rule = Rule(pattern="*", stored="shard", uneven=uneven)
    shards = "host" if shard is None else shard
    return _sharded("hybrid", rule, None, shards, whole_below_bytes)


@short_traceback
def tensor_parallel(
    rules: Mapping[str, Partition],
    *,
    model: int | None = None,
    replicas: int = 1,
    uneven: Uneven = "refuse",
) -> Strategy:
    """Cut parameters along dimensions that are named, also where they are multiplied.

    Args:
      rules: Partition for each pattern of paths; all others stay whole.
      model: Number of devices that share a copy; all by default.
      replicas: Number of copies, each of which gets its part of a batch.
      uneven: Treatment of parameters that do not divide, as in a `Rule`.

    Raises:
      ArgumentError: `rules` does not map patterns to partitions.

    >>> cut = {"params/up/*": (None, "model"), "params/down/*": ("model",)}
    >>> tensor_parallel(cut, model=4, replicas=2).sizes(8)
    {'replica': 2, 'shard': 1, 'model': 4}
    """
    if not isinstance(rules, Mapping):
        raise ArgumentError(
            f"`rules` must map patterns to partitions, got {rules!r}. Write "
            '`{"params/up/*": (None, "model")}`.'
        )
    return Strategy(
        name="tensor_parallel",
        replica=replicas,
        model=model,
        rules=tuple(
            Rule(pattern=pattern, stored=cut, computed=cut, uneven=uneven)
            for pattern, cut in rules.items()
        ),
    )


@short_traceback
def Rules(
    rules: Sequence[Rule],
    *,
    replica: int | None = 1,
    shard: int | None = 1,
    model: int | None = 1,
    whole_below_bytes: int = WHOLE_BELOW_BYTES,
) -> Strategy:
    """Return the strategy of a list of rules, of which the first match decides.

    Args:
      rules: Rules, each with a pattern of paths.
      replica: Size of the mesh axis; None for all devices that the others leave.
      shard: Likewise.
      model: Likewise.
      whole_below_bytes: Smaller variables stay whole, unless a rule names dimensions.

    Raises:
      ArgumentError: `rules` is not a list of rules, or sizes break their rule.

    >>> kept = Rules([Rule(pattern="params/head/*"), Rule(pattern="*", stored="shard")])
    >>> kept.rules[0].stored                             # whole
    ()
    """
    return Strategy(
        name="rules",
        replica=replica,
        shard=shard,
        model=model,
        rules=_listed(rules, 'Rules([Rule(pattern="*", stored="shard")], shard=None)'),
        whole_below_bytes=whole_below_bytes,
    )


def _listed(rules: Sequence[Rule], example: str) -> tuple[Rule, ...]:
    if not isinstance(rules, Sequence) or not all(isinstance(r, Rule) for r in rules):
        raise ArgumentError(
            f"`rules` must be a list of rules, got {rules!r}. Write `{example}`."
        )
    return tuple(rules)


def _sharded(
    name: str,
    rule: Rule,
    replicas: int | None,
    shards: int | Literal["host"] | None,
    whole_below_bytes: int,
) -> Strategy:
    return Strategy(
        name=name,
        replica=replicas,
        shard=shards,
        rules=(rule,),
        whole_below_bytes=whole_below_bytes,
    )

"""Strategies by the name that a flag gives, sized for the devices that are there."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax

import replicator
from experiments.config_flags import check_batch
from replicator import strategies
from replicator.errors import ArgumentError
from replicator.strategies import Strategy

StrategyName = Literal[
    "data_parallel", "zero1", "zero2", "fsdp", "hybrid", "tensor_parallel"
]


def named_strategy(
    name: StrategyName,
    num_devices: int,
    *,
    tensor_parallel: Mapping[str, tuple[str | None, ...]],
    pieces: int,
) -> Strategy:
    """Return the strategy of a name.

    Args:
      name: Of the builder.
      num_devices: All are used.
      tensor_parallel: Rules of the model for the builder of this name.
      pieces: What each dimension that those rules cut is a multiple of.

    Raises:
      ArgumentError: Nothing can be cut over that many devices.

    >>> named_strategy("hybrid", 8, tensor_parallel={}, pieces=1).sizes(8)
    {'replica': 2, 'shard': 4, 'model': 1}
    """
    if name == "data_parallel":
        return strategies.data_parallel()
    if num_devices < 2:
        raise ArgumentError(
            f"`strategy` must be data_parallel on one device, got {name}. "
            "Set REPLICATOR_FAKE_DEVICES=2 to try others."
        )
    if name == "hybrid":  # two copies, where each can still be cut
        copies = 2 if num_devices % 2 == 0 and num_devices > 2 else 1
        return strategies.hybrid(shard=num_devices // copies)
    if name == "tensor_parallel":
        model = math.gcd(num_devices, pieces)
        if model == 1:
            raise ArgumentError(
                f"`strategy` must cut the model into some of {pieces} pieces, got "
                f"{name} on {num_devices} devices. Use {pieces} of them."
            )
        return strategies.tensor_parallel(
            tensor_parallel, model=model, replicas=num_devices // model
        )
    return getattr(strategies, name)()


def replicator_for(
    config: Any, *, tensor_parallel: Mapping[str, tuple[str | None, ...]]
) -> replicator.Replicator:
    """Return the `Replicator` that a `strategy` flag asks for, on all devices.

    Args:
      config: Flags: `strategy`, `global_batch`, and `width`, whose multiples are cut.
      tensor_parallel: Rules of the model for the builder of this name.

    Raises:
      ArgumentError: Nothing can be cut over the devices, or the batch does not divide.
    """
    strategy = named_strategy(
        config.strategy,
        jax.device_count(),
        tensor_parallel=tensor_parallel,
        pieces=config.width,
    )
    rep = replicator.Replicator(strategy=strategy)
    check_batch(config, rep.num_replicas)
    return rep

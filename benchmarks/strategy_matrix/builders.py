"""The strategies that a case is put under, and the optimizers, by name."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

from replicator import strategies
from replicator.strategies import Rule, Strategy

TensorRules = Mapping[str, tuple[str | None, ...]]

ALL_CUT: dict[str, Any] = {"whole_below_bytes": 0}
_MESHES = {1: (1, 1, 1), 2: (1, 2, 1), 4: (1, 2, 2), 8: (2, 2, 2)}


def _rules(devices: int, tensor: TensorRules) -> Strategy:
    """Cut over two axes what tensor parallelism cuts over one, the rest over `shard`.

    Where it is multiplied the first is whole along `shard`, and the rest whole.
    """
    replica, shard, model = _MESHES[devices]
    both = [
        Rule(pattern=pattern, stored=_with_shard(cut), computed=cut)
        for pattern, cut in tensor.items()
    ]
    return strategies.Rules(
        [*both, Rule(pattern="*", stored="shard")],
        replica=replica,
        shard=shard,
        model=model,
        **ALL_CUT,
    )


def _with_shard(cut: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Cut the last whole dimension, too."""
    last = max(place for place, axis in enumerate(cut) if axis is None)
    return (*cut[:last], "shard", *cut[last + 1 :])


def _tensor_parallel(devices: int, tensor: TensorRules) -> Strategy:
    replicas = 2 if devices > 2 else 1
    model = devices // replicas
    return strategies.tensor_parallel(tensor, model=model, replicas=replicas)


BUILDERS: Mapping[str, Callable[[int, TensorRules], Strategy]] = {
    "data_parallel": lambda devices, tensor: strategies.data_parallel(),
    "zero1": lambda devices, tensor: strategies.zero1(**ALL_CUT),
    "zero2": lambda devices, tensor: strategies.zero2(**ALL_CUT),
    "fsdp": lambda devices, tensor: strategies.fsdp(**ALL_CUT),
    "hybrid": lambda devices, tensor: strategies.hybrid(
        shard=min(devices, 2), **ALL_CUT
    ),
    "tensor_parallel": _tensor_parallel,
    "rules": _rules,
    "replicas2": lambda devices, tensor: strategies.zero2(
        replicas=min(devices, 2), **ALL_CUT
    ),
}
"""By name: the strategy for so many devices, of a case's tensor rules."""


def _model_padded(devices: int, tensor: TensorRules) -> Strategy:
    """Cut the largest dimension also where it is multiplied, whatever it is."""
    del tensor
    rule = Rule(pattern="*", stored="model", computed="model", uneven="pad")
    replica = 2 if devices > 2 else 1
    return strategies.Rules([rule], replica=replica, model=None, **ALL_CUT)


PADDED: Mapping[str, Callable[[int, TensorRules], Strategy]] = {
    "zero1-pad": lambda devices, tensor: strategies.zero1(uneven="pad", **ALL_CUT),
    "zero2-pad": lambda devices, tensor: strategies.zero2(
        replicas=min(devices, 2), uneven="pad", **ALL_CUT
    ),
    "fsdp-pad": lambda devices, tensor: strategies.fsdp(uneven="pad", **ALL_CUT),
    "hybrid-pad": lambda devices, tensor: strategies.hybrid(
        shard=max(devices // 2, 1), uneven="pad", **ALL_CUT
    ),
    "model-pad": _model_padded,
}
"""Likewise, with what does not divide padded."""

ACCUMULATED: Mapping[str, int] = {"zero1-by-4": 4}
"""Likewise `zero1`, with so many microbatches."""

# Epsilons far above rounding: the sign of a gradient that is zero decides nothing. That
# gradients are results, too, changes how programs are cut: `bare` shows none.
OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-4)
    ),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-4),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-6),
    "muon": lambda: optax.contrib.muon(1e-2, eps=1e-4),
    "bare": lambda: optax.adam(1e-2, eps=1e-4),
}
"""By name; `adamw` clips by the global norm, and always does."""

PLAIN: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(1e-2)
}
"""For patterns side by side: in it no leaf meets another."""

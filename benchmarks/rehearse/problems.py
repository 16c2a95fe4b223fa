"""Right steps to rehearse, and their strategies."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from benchmarks.step.mixture import EXPERTS, mixture
from benchmarks.step.step_pair import replicator_init, replicator_step
from experiments import char_lm, digits_resnet
from models import resnet, transformer
from replicator import strategies
from replicator.base.types import PyTree
from replicator.strategies import Strategy
from replicator.tuning.problem import ProblemFn

_TOGETHER = 8  # devices that share a copy, under `hybrid` and tensor parallel


def experts(rep: Any, *, small: bool = False) -> tuple:
    """Return a mixture of experts, one sequence to a device."""
    task = mixture(rep.mesh.size, width=128 if small else 1024, context=8)
    optimizer = rep.wrap_optimizer(optax.adamw(1e-3), name="model")
    init_fn = replicator_init(task, optimizer)
    return replicator_step(task, optimizer), init_fn, _shapes(task.batch)


PROBLEMS: Mapping[str, tuple[ProblemFn, Mapping[str, tuple[str | None, ...]]]] = {
    "char_lm": (char_lm.problem, transformer.TENSOR_PARALLEL),
    "digits_resnet": (digits_resnet.problem, resnet.TENSOR_PARALLEL),
    "experts": (experts, {"model/up": ("model",), "model/down": ("model",)}),
}
"""By name: a problem, and what tensor parallelism cuts of it."""

assert EXPERTS % _TOGETHER == 0


def strategy_of(name: str, problem: str, devices: int) -> Strategy:
    """Return the strategy of a name, for a problem on so many devices."""
    if name == "fsdp":
        # The ResNet's widest dimension is 128.
        copies = devices // 64 if problem == "digits_resnet" else 1
        return strategies.fsdp(replicas=copies)
    if name == "hybrid":
        return strategies.hybrid(shard=_TOGETHER)
    rules, replicas = PROBLEMS[problem][1], devices // _TOGETHER
    return strategies.tensor_parallel(rules, model=_TOGETHER, replicas=replicas)


def _shapes(batch: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

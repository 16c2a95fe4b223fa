"""Run one step with its first updates checked, and say whether the check was right."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks.first_update.faults import fault
from benchmarks.first_update.sound import OPTIMIZERS, SOUND, wrapped
from benchmarks.strategy_matrix import builders
from benchmarks.strategy_matrix.cases import Case
from benchmarks.truth.compare import farthest, seen
from replicator import Replicator
from replicator.base.types import PyTree
from replicator.engine.sharding_constraints.guards import GUARDS
from replicator.errors import InvarianceError, PartitionError
from replicator.strategies import unpadded
from replicator.testing import assert_replica_invariant

UPDATES = 2
WRONG = 1e-3
"""Share of a leaf's move that rounding does not reach where epsilons are lenient."""

_LENIENT = {
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4),
    "sgd": lambda: optax.sgd(1e-1),
}


class Setting(NamedTuple):
    """One run.

    Attributes:
      kind: `"fault"`, without guards, or `"sound"`.
      case: Of `faults`, `PATTERN/ROUTE`, or of `sound`.
      builder: Of `strategy_matrix.builders`.
      optimizer: By name.
      accumulate: Microbatches of an update.
    """

    kind: str
    case: str
    builder: str
    optimizer: str
    accumulate: int = 1

    def __str__(self) -> str:
        """Write it as `mlp under fsdp with adam`."""
        cut = f" in {self.accumulate} microbatches" if self.accumulate > 1 else ""
        return f"{self.case} under {self.builder} with {self.optimizer}{cut}"


def verdict(setting: Setting, devices: int) -> dict[str, Any]:
    """Return whether a step is wrong, whether the check says so, and what it told."""
    if setting.kind == "fault":
        GUARDS.clear()  # what is then wrong is for the check to see
        case = fault(*setting.case.split("/"))
        make = _LENIENT[setting.optimizer]
    else:
        case, make = SOUND[setting.case], OPTIMIZERS[setting.optimizer]
    needs_wrap = setting.accumulate > 1 or setting.case == "float16"

    def wrap(name: str | None = "params") -> optax.GradientTransformationExtraArgs:
        if needs_wrap and name is not None:
            return wrapped(setting.optimizer, setting.case)
        return optax.with_extra_args_support(make())

    init_fn, step_fn = case.parts(wrap)
    builder = {**builders.BUILDERS, **builders.PADDED}[setting.builder]
    strategy = builder(devices, case.tensor)
    rep = Replicator(devices, strategy=strategy, compilation_cache=False)
    step = rep.compile(step_fn, accumulate=setting.accumulate, check_first_updates=True)
    state, error = rep.init(init_fn), None
    try:
        for _ in range(UPDATES):
            state, _ = step(state, case.batch)
    except PartitionError as failure:
        error = str(failure)
    told = [str(each) for each in step.checked_updates]
    unchecked = [
        each.why for each in step.checked_updates if each.result == "not checked"
    ]
    if setting.kind == "fault":
        wrong = _is_wrong(rep, case, init_fn, step_fn)
    else:
        wrong = error is not None and _differs(
            case, init_fn, step_fn, setting, strategy
        )
    return {
        "wrong": wrong,
        "alarm": error is not None,
        "unchecked": unchecked,
        "told": told,
    }


def cost(devices: int) -> float:
    """Return the check's share of the time to the first step, with nothing cached."""
    case = SOUND["scan-lm"]
    strategy = builders.BUILDERS["fsdp"](devices, case.tensor)
    began_s = time.monotonic()
    rep = Replicator(devices, strategy=strategy, compilation_cache=False)
    make = OPTIMIZERS["adam"]
    init_fn, step_fn = case.parts(
        lambda name="params": optax.with_extra_args_support(make())
    )
    step = rep.compile(step_fn, check_first_updates=True)
    jax.block_until_ready(step(rep.init(init_fn), case.batch))
    return step.checked_updates[0].seconds / (time.monotonic() - began_s)


def _is_wrong(rep: Replicator, case: Case, init_fn: Any, step_fn: Any) -> bool:
    """Return whether a compiled update differs from plain `jax.jit` on one device."""
    step, alone = rep.compile(step_fn), jax.jit(step_fn)
    state = rep.init(init_fn)
    for _ in range(UPDATES):
        before = jax.tree.map(np.array, unpadded(state))
        state, metrics = step(state, case.batch)
        expected, told = alone(before, case.batch)
        found = {**seen(unpadded(state)), **_metrics(metrics)}
        wanted = {**seen(expected), **_metrics(told)}
        start = {**dict.fromkeys(wanted, np.zeros(())), **seen(before)}
        start |= {path: np.zeros_like(leaf) for path, leaf in _metrics(told).items()}
        if not farthest(found, wanted, start, tolerance=WRONG).by <= 1:
            return True
    return False


def _differs(
    case: Case, init_fn: Any, step_fn: Any, setting: Setting, strategy: Any
) -> bool:
    """Return whether a step differs in float64, where rounding decides nothing."""
    try:
        assert_replica_invariant(
            step_fn,
            init_fn,
            case.batch,
            replicas=(len(jax.devices()),),
            accumulate=(setting.accumulate,),
            at_steps=(0, UPDATES),
            strategy=strategy,
        )
    except InvarianceError:
        return True
    return False


def _metrics(metrics: PyTree) -> dict[str, np.ndarray]:
    return {f"metrics/{name}": np.asarray(value) for name, value in metrics.items()}

"""Compare the bytes that rules for sums of gradients are said to send with those sent.

Each way of a sum and each form of numbers, on 2 and 8 fake devices, for a perceptron, a
convolution and an embedding: the forecast from shapes alone
(`collectives/synchronise/method.py`) over the bytes that the collectives of the traced
step hand over a ring, in their true dtypes. `worst_error` is the largest difference of
such a ratio from 1. With libtpu installed, `partition_error` has the ratio of the
forecast to the compiled bytes of strategies that partition, by builder and model.
"""

import json
import time
from collections.abc import Iterable

import jax
import numpy as np
import optax
from absl import app, flags

import replicator
from benchmarks import partitioned_bytes
from benchmarks.strategy_matrix.synchronisers import (
    METHODS,
    MODELS,
    parts,
    replicator_under,
)
from benchmarks.tpu_environment import is_installed
from replicator.collectives.synchronise.method import SumMethod, sent_bytes
from replicator.engine.check_step import trace_checked
from replicator.engine.make_step import rules_of
from replicator.engine.program_cost import traced_work
from replicator.engine.sharded_step import CompileOptions, shard_step
from replicator.engine.step.state import state_shapes
from replicator.engine.step.transforms import lift

_ONLY = flags.DEFINE_multi_string("only", [], "Cases whose words hold this.")


def _plain_bytes(shapes: Iterable[jax.ShapeDtypeStruct], devices: int) -> int:
    """Return the bytes of the true gradients, which these steps add up, too."""
    return sum(
        sent_bytes(SumMethod(), leaf.shape, leaf.dtype, devices) for leaf in shapes
    )


def error_of(model: str, method: str, devices: int) -> float:
    """Return how far the forecast is from the bytes of a traced step."""
    rep = replicator_under(method, devices)
    init_fn, step_fn, batch = parts(model, rep, optax.sgd(0.1))
    state = state_shapes(init_fn, rep.layout, name="state")
    placed = jax.device_put(batch, rep.layout.batch_shardings(batch, axis=0))
    options = CompileOptions()
    program = shard_step(lift(step_fn), rep.layout, options)
    traced = trace_checked(
        program, rep.layout, options, state=state, batch=placed, key=None
    )
    shapes = state["params"]
    strategy = rules_of(rep.layout)
    assert strategy is not None, "these replicate"
    rows = batch["words"].size // devices
    forecast = sum(
        sent_bytes(
            strategy.method_of(f"params/{name}"),
            leaf.shape,
            leaf.dtype,
            devices,
            rows=rows,
        )
        for name, leaf in shapes.items()
    )
    sent = traced_work(traced.jaxpr).traffic
    found = sum(each.wire_bytes for each in sent) - _plain_bytes(
        shapes.values(), devices
    )
    print(f"{model}, {method}, {devices} devices: {forecast:,} for {found:,} bytes")
    return abs(forecast / found - 1)


def main(argv: list[str]) -> None:
    del argv
    began_s = time.monotonic()
    replicator.fake_devices(8)
    errors = [
        error_of(model, method, devices)
        for model in MODELS
        for method in METHODS
        for devices in (2, 8)
        if method != "rows" or model == "embedding"
        if all(word in f"{model}, {method}, {devices}" for word in _ONLY.value)
    ]
    is_whole = is_installed() and not _ONLY.value
    result = {
        "partition_error": partitioned_bytes.ratios_elsewhere() if is_whole else None,
        "worst_error": round(float(np.max(errors)), 5),
        "cases": len(errors),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)

"""The process that compiles and times on fake devices: see `elsewhere.py`."""

import dataclasses
import json
import os
import sys
from typing import Any

import jax

from replicator.base.host.fake_devices import fake_devices
from replicator.base.mesh import replica_mesh
from replicator.distributed.child import received_order
from replicator.strategies.text import from_json
from replicator.tuning.choosing.measuring import Measurer, reason
from replicator.tuning.choosing.subject import SubjectFile

SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl"),
    *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
    *("jax_threefry_partitionable", "jax_compilation_cache_dir"),
)
"""Settings of JAX that a step's program depends on, and where programs are kept."""


def main() -> None:
    """Read a subject, then questions, a line each; write an answer to each."""
    # What a step prints must not come between.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    about = json.loads(sys.stdin.buffer.readline())
    for name, value in about["settings"].items():
        jax.config.update(name, value)
    fake_devices(about["devices"])
    try:
        subject = received_order()
        if isinstance(subject, SubjectFile):
            subject = subject.subject()
    except Exception as failure:  # of the user's modules, of any kind
        why = f"it cannot be read there: {reason(failure)}"
        print(json.dumps({"kind": "CandidateFailed", "why": why}), file=answers)
        return
    measurer = Measurer(subject, replica_mesh(about["devices"], devices=None))
    for line in sys.stdin.buffer:
        answer = _answer(measurer, **json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)


def _answer(measurer: Measurer, *, verb: str, **asked: Any) -> dict[str, Any]:
    if verb == "begin":
        return {"kind": "Begun"}
    if verb == "compile":
        strategy = from_json(asked.pop("strategy"))
        found = measurer.compile(strategy=strategy, **asked)
    elif verb == "check":
        found = measurer.check(**asked)
    else:
        found = measurer.time(**asked)
    return {"kind": type(found).__name__, **dataclasses.asdict(found)}


if __name__ == "__main__":
    main()

"""Compile a published decoder's step for its TPUs, and keep what was found.

As a program (`python -m`, one model a process) it prints the JSON of a `Kept`. A
compile takes ten minutes and more, so results are kept in `compiled.json`, each with
the hash of the step's lowered text, and the versions that made it.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

import replicator
from benchmarks import tasks
from benchmarks.plan_published.published import (
    DECODERS,
    HEAD_SIZE,
    SEQUENCE,
    V5E,
    VOCABULARY,
    Run,
)
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tpu_environment import tpu_environment
from replicator import strategies
from replicator.base.types import Device
from replicator.engine.program_key import program_key
from replicator.engine.step.state import state_shapes
from replicator.strategies.cost import Features, Traffic

FILE = pathlib.Path(__file__).with_suffix(".json")
RUNS = {run.decoder: run for run in V5E if run.tensor == 1}
DEVICES = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a compiled step was found to need.

    Attributes:
      key: Hash of the step's lowered text.
      versions: Of jax and libtpu that compiled it.
      seconds: Time that took.
      features: Work of a device.
    """

    key: str
    versions: dict[str, str]
    seconds: float
    features: Features


def read() -> dict[str, Kept]:
    """Return the kept results by model."""
    plain = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {name: _kept(each) for name, each in plain.items()}


def write(kept: Mapping[str, Kept]) -> None:
    """Keep results."""
    plain = {name: dataclasses.asdict(each) for name, each in kept.items()}
    FILE.write_text(json.dumps(plain, indent=1) + "\n")


def compile_elsewhere(name: str) -> Kept:
    """Compile a model's step in a process of its own, at the lowest priority."""
    done = subprocess.run(
        ["nice", "-n", "19", sys.executable, "-m", __name__, name],
        env=tpu_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return _kept(json.loads(done.stdout.splitlines()[-1]))


def key_of(name: str) -> str:
    """Return the hash of a model's step as it is lowered today, for fake devices.

    The process needs as many of them as the topology has; nothing is compiled.
    """
    rep, init_fn, step_fn, batch = _problem(RUNS[name], jax.devices()[:DEVICES])
    state = state_shapes(init_fn, rep.layout, name="init_fn")
    return program_key(rep.compile(step_fn).lower(state, batch))


def _problem(run: Run, devices: list[Device]) -> Any:
    task = task_of(run, len(devices))
    tx = optax.adamw(1e-3)
    rep = replicator.Replicator(
        devices=devices, strategy=strategies.fsdp(), compilation_cache=False
    )
    return rep, replicator_init(task, tx), replicator_step(task, tx), task.batch


def task_of(run: Run, chips: int) -> tasks.Task:
    """Return the training of a published run on so many chips."""
    decoder = DECODERS[run.decoder]
    return tasks.language_model(
        run.sequences * chips,
        vocabulary=VOCABULARY,
        layers=decoder.layers,
        width=decoder.width,
        heads=decoder.heads,
        head_size=HEAD_SIZE,
        mlp="swiglu",
        mlp_width=decoder.hidden,
        tied=False,
        context=SEQUENCE,
        attention="blocks",
        compute_dtype=jnp.bfloat16,
        remat=True if run.remat else "dots",
    )


def _kept(plain: dict[str, Any]) -> Kept:
    features: dict[str, Any] = plain["features"]
    traffic = tuple(
        Traffic(**each | {"axes": tuple(each["axes"])}) for each in features["traffic"]
    )
    made: dict[str, Any] = {"features": Features(**features | {"traffic": traffic})}
    return Kept(**plain | made)


def main(name: str) -> None:
    """Compile for the topology, and print what was found."""
    replicator.fake_devices(DEVICES)
    key = key_of(name)

    described = topologies.get_topology_desc(RUNS[name].topology, platform="tpu")
    rep, init_fn, step_fn, batch = _problem(RUNS[name], described.devices)
    started_s = time.monotonic()
    found = rep.inspect(step_fn, init_fn, batch)
    seconds = time.monotonic() - started_s
    kept = Kept(
        key=key,
        versions={each: importlib.metadata.version(each) for each in ("jax", "libtpu")},
        seconds=round(seconds),
        features=found.features(),
    )
    print(json.dumps(dataclasses.asdict(kept)))


if __name__ == "__main__":
    main(sys.argv[1])

"""Train a small model as one process of a run that is going to be killed.

It writes what happens to it as JSON lines on standard output, each with the monotonic
clock of the machine: `phase` when it begins to restore, to compile or to end,
`dispatched` when a step was dispatched, `step` when its result was read, `saving` and
`saved` when a save of it begins to write and has ended, `bits` with a digest of the
final state, and of all metrics that its hook was ever shown.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from absl import app, flags

import replicator
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.tasks import Task, digits_resnet, mlp
from replicator.base.host.clock import SystemClock
from replicator.base.types import PyTree, StepFn
from replicator.checkpoint.background import BackgroundSaver
from replicator.checkpoint.snapshot import Draft
from replicator.hooks import Hook, MetricsEvent, StateEvent, every
from replicator.monitoring.phases import Phase, Phases
from replicator.training.loop import LoopResult

_DIRECTORY = flags.DEFINE_string("directory", None, "Of the run.", required=True)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of the whole run.")
_INTERVAL = flags.DEFINE_integer("interval", 10, "Steps from save to save.")
_TASK = flags.DEFINE_enum("task", "digits_resnet", ["digits_resnet", "mlp"], "Model.")
_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of this process.")
_LOOP = flags.DEFINE_enum("loop", "run", ["run", "session"], "Whose loop it is.")
_OF_EACH_STEP = {"input", "step", "save", "report"}


class Shown(NamedTuple):
    """Metrics of a form that JSON has no word for."""

    loss: jax.Array
    largest: PyTree


def with_table(step_fn: StepFn) -> StepFn:
    """Return a step that reports a table, too, in a container of its own."""

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, Shown]:
        after, metrics = step_fn(state, batch)
        rows = batch["image"].reshape(len(batch["image"]), -1)
        largest = replicator.Max(rows.max(0).reshape(2, -1))
        return after, Shown(metrics["loss"], {"pixels": largest})

    return step


class Tell(Hook):
    """Hook that prints each step twice: dispatched, and done."""

    shown = ""  # a digest of all metrics, each step's once

    def on_state(self, event: StateEvent) -> None:
        """Print that a step was dispatched."""
        tell("dispatched", step=event.step)

    def on_metrics(self, event: MetricsEvent) -> None:
        """Print that a step was done: its metrics are here."""
        tell("step", step=event.step, loss=float(event.metrics.loss))
        sha = hashlib.sha256(f"{self.shown} {event.step}".encode())
        for leaf in (event.metrics.loss, event.metrics.largest["pixels"]):
            sha.update(leaf.tobytes())
        self.shown = sha.hexdigest()

    def state_dict(self) -> dict[str, str]:
        """Return what was shown so far."""
        return {"shown": self.shown}

    def load_state(self, state: dict[str, str]) -> None:
        """Go on from what was shown before."""
        self.shown = state["shown"]


def tell(what: str, **fields: object) -> None:
    """Write a line that whoever started this reads at once."""
    line = {"what": what, "time_s": SystemClock().now_s()} | fields
    # With its end in one piece: the thread that saves writes lines, too.
    print(json.dumps(line) + "\n", end="", flush=True)


def tell_phases() -> None:
    """Have every run of this process tell what it begins, but for its steps."""
    enter = Phases.enter

    def enter_and_tell(
        self: Phases, phase: Phase, *, step: int | None = None, hidden: bool = False
    ) -> None:
        enter(self, phase, step=step, hidden=hidden)
        if phase not in _OF_EACH_STEP:
            tell("phase", phase=phase)

    Phases.enter = enter_and_tell


def tell_saves() -> None:
    """Have every run of this process tell when a save begins to write, and ends."""
    make = BackgroundSaver.__init__

    def make_telling(
        self: BackgroundSaver, write: Callable[[Draft], None], **options: Any
    ) -> None:
        def write_and_tell(draft: Draft) -> None:
            tell("saving", step=draft.step)
            write(draft)
            tell("saved", step=draft.step)

        make(self, write_and_tell, **options)

    BackgroundSaver.__init__ = make_telling


def digest(state: PyTree) -> str:
    """Return a digest of every bit of a state."""
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        sha.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return sha.hexdigest()


def batches(task: Task, count: int) -> list[PyTree]:
    """Return batches that differ, of random examples."""
    return [
        task.batch | {"image": np.roll(task.batch["image"], shift, axis=0)}
        for shift in range(count)
    ]


def own_loop(
    rep: replicator.Replicator,
    step_fn: StepFn,
    dataset: Sequence[PyTree],
    options: dict[str, Any],
) -> LoopResult:
    """Train by a loop and a step of one's own, in a session."""
    with rep.session(dataset=dataset, **options) as session:
        train = session.compile(step_fn)
        for batch in session.batches():
            session.after(train(batch))
    return session.result


def main(argv: list[str]) -> None:
    del argv
    tell_phases()
    tell_saves()
    replicator.fake_devices(_DEVICES.value)
    replicator.distributed.initialize()
    rep = replicator.Replicator()
    task = mlp(32) if _TASK.value == "mlp" else digits_resnet(32, width=4)
    optimizer = rep.wrap_optimizer(optax.adam(1e-3))
    told = Tell()
    step_fn, options = (
        with_table(replicator_step(task, optimizer)),
        {
            "init_fn": replicator_init(task, optimizer),
            "steps": _STEPS.value,
            "checkpoint_dir": _DIRECTORY.value,
            "checkpoint_every": every(n_steps=_INTERVAL.value),
            "hooks": [told],
            "display": False,
        },
    )
    if _LOOP.value == "run":
        result = rep.run(step_fn, batches(task, 7), **options)
    else:
        result = own_loop(rep, step_fn, batches(task, 7), options)
    tell("bits", digest=f"{digest(result.state)} {told.shown}")


if __name__ == "__main__":
    app.run(main)

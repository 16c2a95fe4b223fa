"""A state goes with the last who has it: no cycle waits for the garbage collector."""

import contextlib
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator
from replicator.hooks import Hook
from tests.steps import replicas

pytestmark = pytest.mark.usefixtures("quick_collections")

NUMBERS = 5_000
BATCHES = [{"x": np.full(4, each, np.float32)} for each in (1.0, 2.0)]


class Keeps(Hook):
    """Keeps what it was told, as a hook may."""

    def __init__(self):
        self.seen = []

    def on_state(self, event):
        self.seen.append(event)

    def on_metrics(self, event):
        self.seen.insert(0, event)


def init_fn(key):
    return {"w": jnp.zeros(NUMBERS)}


def step_fn(state, batch):
    mean = replicator.all_reduce(batch["x"].mean())
    return {"w": state["w"] + mean}, {"mean": mean}


def rows_fn(state, batch):
    return {"row": batch["x"] * state["w"][0]}


def run(**options):
    options = {"init_fn": init_fn, "display": False} | options
    return replicas(2).run(step_fn, BATCHES, steps=2, **options)


def run_with_all(folder):
    return run(
        hooks=[Keeps()],
        directory=folder / "records",
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=1,
        eval_fn=rows_fn,
        eval_dataset=BATCHES,
        eval_every=1,
    )


def finished_run(folder):
    return [run(checkpoint_dir=folder) for _ in range(2)][-1]


def run_from_a_state(folder):
    rep = replicas(2)
    return rep.run(
        step_fn,
        BATCHES,
        init_state=rep.init(init_fn),
        steps=2,
        eval_fn=rows_fn,
        eval_dataset=BATCHES,
        eval_every=2,
        display=False,
    )


def own_steps(folder):
    rep = replicas(2)
    with rep.session(dataset=BATCHES, init_fn=init_fn, steps=2, display=False) as own:
        step = own.compile(step_fn)
        for batch in own.batches():
            own.after(step(batch))
    return own.result


def session_that_fails(folder):
    rep = replicas(2)
    options = {"init_fn": init_fn, "steps": 2, "display": False}

    def fail(session):
        session.step(next(session.batches()))
        raise InterruptedError

    with (
        contextlib.suppress(InterruptedError),
        rep.session(step_fn, BATCHES, **options) as session,
    ):
        fail(session)


def evaluated(folder):
    rep = replicas(2)
    return rep.evaluate(rows_fn, BATCHES, state=rep.init(init_fn))


def predicted_in_part(folder):
    rep = replicas(2)
    return next(iter(rep.predict(rows_fn, BATCHES, rep.init(init_fn))))


def states():
    return [array for array in jax.live_arrays() if array.size >= NUMBERS]


@pytest.fixture
def no_collector():
    """Leave all to the counts of references; what is garbage by now stays so."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "made",
    [
        run_with_all,
        finished_run,
        run_from_a_state,
        own_steps,
        session_that_fails,
        evaluated,
        predicted_in_part,
    ],
)
def test_a_state_is_freed_with_the_last_result(no_collector, made, tmp_path):
    before = len(states())
    result = made(tmp_path)
    del result
    assert len(states()) <= before


def test_a_state_that_is_gone_is_named(tmp_path):
    keeps = Keeps()
    run(hooks=[keeps])
    with pytest.raises(ValueError, match="got the end of the run for the state"):
        keeps.seen[-1].state  # noqa: B018

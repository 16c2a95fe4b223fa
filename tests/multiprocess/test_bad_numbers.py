"""A number goes bad on one replica of one process: all see it, and do the same (10)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

import replicator
from replicator import Replicator
from replicator.cli.main import main
from replicator.monitoring.events import read_events
from replicator.training.postmortem.bundle import read_bundle
from tests.multiprocess.processes import run_processes, values
from tests.multiprocess.programs import bits, host
from tests.steps import regression_batch, trainer
from tests.training.postmortem.crashing import root_loss

pytestmark = pytest.mark.slow
STEPS, BAD, EXAMPLE = 70, 4, 20  # of 24: a row of the last process's last replica


def dataset(*, bad=BAD):
    batches = [regression_batch(24, seed=seed) for seed in range(100)]
    for batch in batches:
        batch["x"] = np.abs(batch["x"])
    batches[bad]["x"][EXAMPLE, 2] = -3.0
    return batches


def own_trainer(optimizer, *, checked):
    """Take the root of a negative number; count what each replica saw."""
    init_fn, step_fn = trainer(optimizer, root_loss)

    def own_init(key):
        return init_fn(key) | {"seen": replicator.PerReplica(jnp.zeros(()))}

    def step(state, batch):
        if checked:
            checkify.check(batch["x"].min() > -1, "too small")
        after, metrics = step_fn(state, batch)
        seen = replicator.PerReplica(state["seen"].value + batch["y"].sum())
        return after | {"seen": seen}, metrics

    return own_init, step


def train(directory, batches=None, **options):
    """Train, saving rarely: process 0, which writes metrics, reads them long before."""
    rep = Replicator(compilation_cache=False, reduction="ordered")
    optimizer = rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9))
    init_fn, step = own_trainer(optimizer, checked="checks" in options)
    try:
        result = rep.run(
            step,
            dataset() if batches is None else batches,
            init_fn=init_fn,
            steps=STEPS,
            directory=directory / "run",
            checkpoint_dir=directory / "saved",
            write_every=1,
            display=False,
            **{"checkpoint_every": 60} | options,
        )
    except (FloatingPointError, checkify.JaxRuntimeError) as failure:
        return f"{failure}", failure.__notes__
    return result.step, result.metrics, bits(host(result.state["params"]))


def program(directory):
    root, whole = Path(directory), dataset()
    good = whole[:BAD] + whole[BAD + 1 :]
    found = {
        "control": train(root / "control", good),
        "run again": train(root / "control", good),
        "rolled back": train(root / "back", on_nonfinite="rollback"),
        "raised": train(root / "raised", checkpoint_every=3),
    }
    again = {"checkpoint_every": 3, "on_nonfinite": "rollback"}
    found["went on"] = train(root / "raised", **again)
    found["checked"] = train(root / "checked", checks=checkify.user_checks)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    ended = run_processes(program, folder, processes=2, devices=2, directory=folder)
    return *values(ended), folder


@pytest.mark.parametrize("what", ["rolled back", "raised", "went on", "checked"])
def test_all_processes_come_to_the_same(found, what):
    assert found[0][what] == found[1][what]


@pytest.mark.parametrize("what", ["rolled back", "went on"])
def test_training_goes_on_as_if_the_batch_had_not_been(found, what):
    step, metrics, _ = expected = found[0]["control"]
    assert (step, np.isfinite(metrics["loss"])) == (STEPS, True)
    assert found[0][what] == expected


def test_a_finished_run_ends_with_the_same_metrics_in_all_processes(found):
    for value in found[:2]:
        assert value["run again"] == found[0]["control"]


def test_the_journal_of_every_process_tells_the_step_and_the_batch(found):
    events = read_events(found[2] / "back" / "run")
    told = [event for event in events if event["kind"] == "rolled_back"]
    assert sorted(event["process"] for event in told) == [0, 1]
    assert {(event["step"], event["batch"]) for event in told} == {(BAD + 1, BAD)}


def test_a_nan_of_one_process_leaves_a_bundle_that_says_the_line(found, capsys):
    message, [note] = found[0]["raised"]
    path = found[2] / "raised" / "run" / "postmortem" / str(BAD + 1)
    assert f"must be finite, got nan at step {BAD + 1}." in message
    assert note == f"To look at the step: replicator replay {path}"
    assert main(["replay", str(path)]) == 0
    told = capsys.readouterr().out
    assert "first NaN: `sqrt` at " in told
    assert " in root_loss" in told


def test_a_bundle_holds_the_whole_batch_and_the_state_of_one_replica(found):
    path = found[2] / "raised" / "run" / "postmortem" / str(BAD + 1)
    bundle = read_bundle(path)
    for name, leaf in dataset()[BAD].items():
        np.testing.assert_array_equal(bundle.batch[name], leaf)
    assert int(bundle.state["step"]) == BAD
    assert bundle.state["user/seen/value"].shape == ()


def test_a_check_that_fails_in_one_process_leaves_a_bundle_with_the_replica(found):
    message, _ = found[1]["checked"]
    path = found[2] / "checked" / "run" / "postmortem" / str(BAD + 1)
    assert message.startswith("replica 3: too small")
    assert read_bundle(path).error["message"] == message

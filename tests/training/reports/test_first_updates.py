"""A run checks the first updates of each program, once, and remembers it."""

import json

import pytest

from replicator import Replicator, strategies
from replicator.errors import ArgumentError, PartitionError
from replicator.monitoring.events import read_events
from tests.cut_wrongly import BATCH, centred, init_fn, minus_mean, step_from

STEP, WRONG = step_from(minus_mean), step_from(centred)


@pytest.fixture
def rep():
    strategy = strategies.fsdp(whole_below_bytes=0)
    return Replicator(strategy=strategy, compilation_cache=False)


def run(rep, step_fn, folder, *, steps, **options):
    return rep.run(
        step_fn,
        [BATCH],
        init_fn=init_fn,
        steps=steps,
        directory=folder,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=1,
        display=False,
        **options,
    )


def told(folder):
    return [each for each in read_events(folder) if each["kind"] == "first_update"]


def test_a_run_that_goes_on_does_not_check_again(rep, tmp_path):
    run(rep, STEP, tmp_path, steps=3, check_first_updates=True)
    [found] = json.loads((tmp_path / "run.json").read_text())["first_updates"].values()
    assert (found["update"], found["result"]) == (2, "same")
    assert found["seconds"] > 0
    run(rep, STEP, tmp_path, steps=5, check_first_updates=True)
    assert [each["update"] for each in told(tmp_path)] == [1, 2]


def test_a_run_ends_before_a_wrong_update_is_saved(rep, tmp_path):
    with pytest.raises(PartitionError, match="`seen`"):
        run(rep, WRONG, tmp_path, steps=3, check_first_updates=True)
    assert not list((tmp_path / "checkpoints").glob("0*"))
    [event] = told(tmp_path)
    assert event["result"] == "differs"


def test_a_run_checks_by_itself_where_the_environment_does_not_forbid_it(
    rep, tmp_path, monkeypatch
):
    monkeypatch.delenv("REPLICATOR_CHECK_FIRST_UPDATES")
    with pytest.raises(PartitionError, match="`seen`"):
        run(rep, WRONG, tmp_path, steps=1)


def test_a_run_that_is_not_to_check_goes_on(rep, tmp_path):
    run(rep, WRONG, tmp_path, steps=1, check_first_updates=False)
    assert told(tmp_path) == []


def test_each_step_of_a_session_is_checked(rep):
    options = {"init_fn": init_fn, "steps": 1, "check_first_updates": True}
    session = rep.session(dataset=[BATCH], display=False, **options)

    def turns():
        with session:
            right, wrong = session.compile(STEP), session.compile(WRONG)
            for batch in session.batches():
                right(batch)
                wrong(batch)

    with pytest.raises(PartitionError, match="`seen`"):
        turns()


def test_a_word_is_no_choice(rep, tmp_path):
    with pytest.raises(ArgumentError, match="`check_first_updates` must be"):
        run(rep, STEP, tmp_path, steps=1, check_first_updates="yes")

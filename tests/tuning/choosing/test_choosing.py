"""Whole choices: `replicator.choose`, and runs with `strategy="auto"`."""

import ctypes
import json
import os
import pickle
import sys
import time

import jax
import pytest

import replicator
from replicator import Replicator
from replicator.base.mesh import replica_mesh
from replicator.engine.sharded_step import CompileOptions
from replicator.errors import ArgumentError, DeviceMemoryError
from replicator.strategies import Machine, data_parallel, hybrid
from replicator.strategies.choose import NoTimeLeft
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.choosing.elsewhere import ElsewhereMeasurer
from replicator.tuning.choosing.subject import Subject, SubjectFile
from replicator.tuning.problem import ProblemFile
from tests.tuning import problems
from tests.tuning.choosing.subjects import BATCH, STRATEGIES, deadly, plain

MODEL = Machine.from_topology("h100:8")


def auto(**options):
    return Replicator(strategy="auto", compilation_cache=False, **options)


@pytest.mark.parametrize(
    "use",
    [
        lambda rep: rep.num_replicas,
        lambda rep: rep.init(lambda key: key),
        lambda rep: rep.compile(lambda state, batch: (state, {})),
    ],
)
def test_an_undecided_replicator_names_choose(use):
    with pytest.raises(ArgumentError, match=r"replicator\.choose\(step_fn"):
        use(auto())


def test_an_optimizer_reaches_another_process_without_devices():
    rep = auto()
    sent = pickle.loads(pickle.dumps(rep.decision))
    assert isinstance(sent, Decision)
    assert not sent.is_made


def test_an_optimizer_of_ordered_sums_reaches_another_process():
    ordered = Replicator(reduction="ordered", compilation_cache=False)
    assert not pickle.loads(pickle.dumps(ordered.decision)).is_made


def test_an_optimizer_made_before_the_decision_works_after_it():
    rep = auto()
    step_fn, init_fn, batch = plain(rep)
    rep.decision.make(data_parallel(), {})
    state, _ = rep.compile(step_fn)(rep.init(init_fn), batch)
    assert jax.tree.leaves(state)[0].sharding.is_fully_replicated


@pytest.mark.slow
def test_a_choice_is_timed_and_has_a_replicator():
    choice = replicator.choose(*plain(), candidates=STRATEGIES)
    assert choice.is_measured
    assert {each.gate for each in choice.candidates} <= {"reference", "same"}
    assert choice.replicator.layout.describe()["engine"] in ("replicates", "partitions")
    assert str(choice).startswith(f"{choice.chosen.name} on 8 x cpu (timed)")


@pytest.mark.slow
def test_a_candidate_takes_devices_of_a_host_from_the_machine():
    machine = Machine.from_topology("h100:2x4")
    choice = replicator.choose(
        *plain(), candidates=[hybrid()], machine=machine, trials=0
    )
    assert choice.strategy.shard == 4


@pytest.mark.slow
def test_without_trials_a_choice_is_unmeasured():
    choice = replicator.choose(*plain(), machine=MODEL, trials=0)
    assert "(unmeasured: by the model alone)" in str(choice)
    assert not any(each.seconds for each in choice.candidates)


@pytest.mark.slow
def test_what_ends_its_process_fails_and_another_is_chosen():
    choice = replicator.choose(*deadly(), candidates=STRATEGIES)
    assert choice.chosen.name == "data_parallel"
    [dead] = [each for each in choice.candidates if each.name == "fsdp"]
    assert dead.status == "failed"
    assert "SIGABRT" in dead.why


@pytest.mark.slow
def test_where_nothing_fits_the_error_names_the_nearest_and_a_change():
    with pytest.raises(DeviceMemoryError, match=r"is the nearest.* Use "):
        replicator.choose(*plain(), candidates=STRATEGIES, memory_limit_bytes=100)


@pytest.mark.slow
def test_a_step_that_cannot_be_sent_is_tried_here(caplog):
    step_fn, init_fn, batch = plain()
    pointer = ctypes.pointer(ctypes.c_int())  # pickling it raises ValueError

    def held(state, batch):
        assert pointer is not None
        return step_fn(state, batch)

    choice = replicator.choose(held, init_fn, batch, candidates=[data_parallel()])
    assert choice.is_measured
    assert "cannot be sent to another" in caplog.text
    assert "(timed; compiled in this process)" in str(choice)


class OnlyHere:
    """A value that is pickled, and refuses to be unpickled elsewhere."""

    def __init__(self, pid=None):
        if pid not in (None, os.getpid()):
            raise OSError("no such dataset")

    def __reduce__(self):
        return OnlyHere, (os.getpid(),)


@pytest.mark.slow
def test_a_step_that_another_process_cannot_unpickle_is_tried_here(caplog):
    step_fn, init_fn, batch = plain()
    here = OnlyHere()

    def held(state, batch):
        assert here is not None
        return step_fn(state, batch)

    choice = replicator.choose(held, init_fn, batch, candidates=[data_parallel()])
    assert choice.is_measured
    assert "it cannot be read there: OSError: no such dataset" in caplog.text


@pytest.mark.slow
def test_the_step_of_a_file_is_imported_elsewhere(caplog):
    place = f"{problems.__file__}:cannot_be_pickled"
    choice = replicator.choose(place, candidates=[data_parallel()])
    assert choice.is_measured
    assert "tried in this process" not in caplog.text
    assert choice.replicator.mesh.size == 8


def test_the_optimizers_of_a_file_obey_rules(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = SubjectFile(
        problem=ProblemFile.from_text(f"{problems.__file__}:problem"),
        make_replicator=Replicator,
        batch=None,
        options=CompileOptions(),
        seed=0,
    )
    subject = file.subject()
    assert subject.obeys_rules
    assert subject.batch["x"].shape == problems.BATCH["x"].shape


def test_no_answer_takes_longer_than_there_is_time():
    step_fn, init_fn, batch = plain()
    decision = Decision(replica_mesh(), None, "fast")
    subject = Subject(step_fn=step_fn, init_fn=init_fn, batch=batch, decision=decision)
    over = ElsewhereMeasurer(
        subject, replica_mesh(), limit_s=600, until_s=time.monotonic()
    )
    assert isinstance(over.compile("fsdp", STRATEGIES[1]), NoTimeLeft)


def run(rep, directory, steps):
    step_fn, init_fn, _ = plain(rep)
    rep.run(
        step_fn,
        [BATCH] * 8,
        init_fn=init_fn,
        steps=steps,
        checkpoint_dir=directory / "saved",
        directory=directory / "records",
        display=False,
    )
    record = json.loads((directory / "records" / "run.json").read_text())
    return record["arguments"]["choice"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return directory, run(auto(), directory, 2)


@pytest.mark.slow
def test_a_run_records_its_choice_and_goes_on_under_it(begun):
    directory, first = begun
    assert {each["name"] for each in first["candidates"]} >= {"data_parallel", "fsdp"}
    again = run(auto(), directory, 4)
    assert again["chosen"] == first["chosen"]
    assert "candidates" not in again  # it was not tried again


@pytest.mark.slow
def test_on_other_devices_a_run_decides_again_and_says_so(begun, caplog):
    directory, first = begun
    other = run(auto(num_replicas=2), directory, 6)
    assert other["before"] == {"chosen": first["chosen"], "devices": 8}
    assert f"on 2 devices; it was {first['chosen']} on 8." in caplog.text

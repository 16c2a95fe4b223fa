"""Answers about a step under a strategy, on the devices of this process."""

import pytest

from replicator.base.mesh import replica_mesh
from replicator.strategies import Rule, Rules
from replicator.strategies.choose import CandidateFailed
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.choosing.measuring import Measurer
from replicator.tuning.choosing.subject import Subject
from tests.tuning.choosing.subjects import STRATEGIES, plain


def measurer_of(step_fn, init_fn, batch, mesh):
    decision = Decision(mesh, None, "fast")
    subject = Subject(step_fn=step_fn, init_fn=init_fn, batch=batch, decision=decision)
    return Measurer(subject, mesh)


@pytest.fixture(scope="module")
def measurer():
    found = measurer_of(*plain(), replica_mesh(8))
    for strategy in STRATEGIES:
        found.compile(strategy.name, strategy)
    return found


def test_compiling_shows_what_it_sends_and_needs(measurer):
    found = measurer.compile("again", STRATEGIES[0])
    assert found.need.total_bytes > 0
    assert [each.kind for each in found.features.traffic] == ["all-reduce"]


def test_an_update_is_that_of_the_reference(measurer):
    found = measurer.check("fsdp", "data_parallel")
    assert found.result in ("same", "rounding")


def test_a_turn_takes_seconds(measurer):
    assert 0 < measurer.time("fsdp").seconds < 60


def test_what_cannot_be_traced_fails_with_its_reason(measurer):
    cut = Rules([Rule(pattern="no/such", stored="shard")], shard=None)
    found = measurer.compile("cut", cut)
    assert isinstance(found, CandidateFailed)
    assert "'no/such', which matches none" in found.why


def test_the_work_is_that_of_all_devices(measurer):
    work = measurer.work()
    assert work.examples == 16
    assert work.flops["float32"] > 0
    assert any(each.is_optimizer for each in work.variables)

"""A choice for a topology, by rows of outcomes that are written down."""

import dataclasses

import pytest

from replicator.errors import DeviceMemoryError
from replicator.strategies import Machine
from replicator.tuning.choosing.candidates import strategies_for
from replicator.tuning.choosing.topology_choice import TopologyChoice
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.plan import PlanOptions
from tests.tuning.choosing.test_candidates import work
from tests.tuning.rows import GIB, row

NAMES = list(strategies_for(Machine.from_topology("h100:8"), rules=True))


class WrittenPlanner:
    """Rows of a plan, by strategy and by number of microbatches."""

    def __init__(self, needs, *, status="compiled", work=None):
        self.options = PlanOptions()
        self._needs, self._status, self._work = needs, status, work

    def work(self, topology):
        return CompileOutcome(
            status="forecast" if self._work else "refused",
            reason="" if self._work else "no step",
            work=self._work,
            limit_bytes=16 * GIB,
        )

    def row(self, topology, named, *, accumulate=None):
        needs = self._needs.get(named.text, 9) / (accumulate or 1)
        status = self._status if needs <= 16 else "memory"
        found = row(named.text, topology=topology, status=status, needs=needs)
        # Each is a program of its own.
        own = dataclasses.replace(found.outcome, key=named.text)
        return dataclasses.replace(found, outcome=own)


def chosen(needs, **options):
    planner = WrittenPlanner(needs, **{"work": work(examples=64), **options})
    found = TopologyChoice(planner, "h100:8")
    return found, list(found.rows())


def test_candidates_are_those_of_a_choice_without_trials():
    found, rows = chosen({})
    assert [each.name for each in found.choice.candidates] == NAMES
    assert {row.strategy for row in rows} >= {"data_parallel", "fsdp"}
    assert not found.choice.is_measured


def test_what_does_not_fit_says_by_how_much_and_another_is_chosen():
    found, _ = chosen({"data_parallel": 18})
    [large] = [c for c in found.choice.candidates if c.name == "data_parallel"]
    assert large.status == "does not fit"
    assert "bytes too many; `accumulate=2`" in large.why
    assert " candidates, predicted " in found.choice.summary


def test_where_nothing_fits_the_nearest_is_named_with_a_change_that_fits():
    found, _ = chosen(dict.fromkeys(NAMES, 96))
    assert found.choice is None
    assert isinstance(found.refusal, DeviceMemoryError)
    assert "is the nearest, and needs 96 GiB" in str(found.refusal)
    assert "Use `accumulate=8` under it: it needs 12 GiB." in str(found.refusal)


def test_what_cannot_be_compiled_is_left_out_with_its_reason():
    found, rows = chosen({}, status="compiler")
    assert len(rows) > 2
    assert "got none: data_parallel: compiler" in str(found.refusal)


def test_a_step_that_cannot_be_traced_is_refused_with_its_reason():
    found, rows = chosen({}, work=None)
    assert (rows, found.choice) == ([], None)
    assert "got refused: no step" in str(found.refusal)


@pytest.mark.parametrize("needs", [15.5, 16.0])
def test_a_program_that_leaves_too_little_does_not_fit(needs):
    found, _ = chosen({"data_parallel": needs})
    [tight] = [c for c in found.choice.candidates if c.name == "data_parallel"]
    assert tight.status == "does not fit"

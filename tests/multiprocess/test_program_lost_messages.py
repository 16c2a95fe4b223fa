"""Row 25 of the fault matrix, in a launched program: what is lost, what is repeated."""

from collections import Counter

import pytest

import replicator.launchpad_bridge as lp
from tests.multiprocess import lossy_nodes as nodes

pytestmark = pytest.mark.slow

TIMEOUT_S = 600.0
WORKERS, CALLS, AT_MOST_ONCE = 4, 2_500, 250


@pytest.mark.parametrize(
    "chances",
    [{"lose": 0.25, "repeat": 0.25}, {"break_off": 0.02}],
    ids=["lost and repeated", "broken off"],
)
def test_no_idempotent_call_is_lost_and_no_other_runs_twice(running, chances):
    program = lp.Program("lossy")
    ledger = program.add_node(lp.CourierNode(nodes.Ledger), label="ledger")
    with program.group("worker"):
        for worker in range(WORKERS):
            counts = CALLS, AT_MOST_ONCE
            program.add_node(
                lp.PyNode(nodes.enter_all, ledger, worker, *counts, chances)
            )
    with running(program) as run:
        run.wait(TIMEOUT_S, labels=["worker"])
        effects = Counter(map(tuple, ledger.dereference().entries()))
        found = run.results_of("worker")
    assert {times for (_, n), times in effects.items() if n >= CALLS} == {1}
    assert [each["wrong"] for each in found] == [[]] * WORKERS
    certain = {(w, n) for w in range(WORKERS) for n in range(CALLS)}
    certain |= {(w, n) for w in range(WORKERS) for n in found[w]["answered"]}
    assert certain <= set(effects)
    # Those that are lost may have run: some did, some did not, and none is mixed up.
    ends = sum((Counter(each["ends"]) for each in found), Counter())
    assert set(ends) == {"answered", "lost"}
    assert len(certain) <= len(effects) <= WORKERS * (CALLS + AT_MOST_ONCE)
    assert all(each["faults"] > 10 for each in found)

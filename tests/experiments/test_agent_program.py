"""An agent as a program; `test_seeds` has what holds at all scales."""

import contextlib
import functools
import os
import signal
import time

import jax
import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from benchmarks.runs.killed_learner import KnownProcesses
from experiments import agent_program, seeds
from experiments.impala_catch import make_agent, make_boards
from replicator.errors import ArgumentError, RpcError
from tests.experiments.test_off_policy import AGENT, batch_of, reach
from tests.experiments.test_seeds import CATCH

pytestmark = pytest.mark.usefixtures("standard_promotion")
SOON_S = 120


@pytest.mark.slow
def test_a_sitting_in_which_no_learner_began_is_refused_by_its_flag():
    with pytest.raises(ArgumentError, match=r"`--minutes` must be enough .* got 1e-06"):
        agent_program.learn(
            make_agent(CATCH),
            functools.partial(make_boards, 8),
            "threads",
            minutes=1e-6,
            actors=2,
            **seeds.options_of(CATCH, 0),
        )


def counts_once(run, table, is_so, attempt=0):
    """Return the counts of an attempt of the table, once they are so."""
    until = time.monotonic() + SOON_S
    while time.monotonic() < until:
        now = run.workers["replay"].attempt  # before the call: the answer is its own
        with contextlib.suppress(RpcError):
            if is_so(found := table.statistics()) and now == attempt:
                return found
    raise TimeoutError("The table's counts did not come to that.")


@pytest.mark.slow
def test_a_replay_table_that_is_killed_comes_back_with_its_rows(tmp_path):
    program, handle = agent_program.make_program(
        AGENT,
        reach,
        actors=0,  # the learner goes on with the rows that it had
        batch_size=8,
        unroll_length=4,
        steps=None,
        replicas=1,
        replay={"capacity": 100, "sampler": lp.prioritised(0.6)},
        folder=tmp_path,
    )
    launcher = KnownProcesses()
    with lp.launch(program, launcher) as run:
        table = handle.dereference()
        rows = jax.tree.map(np.asarray, batch_of(20)["trajectories"])
        table.insert(rows, actor="actor/0", version=0)
        counts_once(run, table, lambda counts: counts["taken"] > 0)
        table.save()
        os.kill(launcher.started["replay"].pid, signal.SIGKILL)
        saved = counts_once(run, table, lambda counts: True, attempt=1)
        goes_on = lambda counts: counts["taken"] > saved["taken"]  # noqa: E731
        found = counts_once(run, table, goes_on, attempt=1)
        run.stop_and_wait()
    assert found["held"] == 20

"""One of two processes is slow: it is named, by rank, while the run goes on."""

import threading

import jax
import optax
import pytest

from replicator import Replicator
from replicator.cli.look.report_page.page import write_report
from replicator.hooks import Hook
from replicator.monitoring.events import read_events
from replicator.training.watchdog import heartbeats
from tests.multiprocess.processes import run_processes, values
from tests.steps import regression_batch, trainer

pytestmark = pytest.mark.slow
SLOW, PAUSE_S, STEPS = 1, 0.15, 120


class Pause(Hook):
    """Takes its time at each step, in one process of all."""

    def on_state(self, event):
        if jax.process_index() == SLOW:
            threading.Event().wait(PAUSE_S)


def slowed(directory):
    """Train with a hook that is slow in one process; the others wait in the step."""
    heartbeats.STRAGGLERS_EVERY_S = 6.0  # else a minute
    rep = Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    result = rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=STEPS,
        directory=directory,
        hooks=[Pause()],
        display=False,
    )
    return result.step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slowed")
    ended = run_processes(
        slowed, folder, processes=2, devices=1, directory=folder / "run"
    )
    assert values(ended) == [STEPS, STEPS]
    return folder / "run", ended


def test_the_journal_names_the_slow_rank_and_what_it_takes(run):
    told = [event for event in read_events(run[0]) if event["kind"] == "straggler"]
    assert told
    for event in told:
        assert (event["process"], event["rank"]) == (0, SLOW)
        # A beat falls inside a step: of some 40 steps one may count in part.
        assert event["own_s"] >= 0.9 * PAUSE_S
        assert event["median_s"] <= event["own_s"] / 1.5


def test_the_log_of_the_first_process_names_it_once_a_while(run):
    words = f"Process {SLOW} is a straggler: it takes "
    first, second = [ended.output for ended in run[1]]
    assert 1 <= first.count(words) <= STEPS * PAUSE_S
    assert words not in second


def test_the_report_names_it(run, tmp_path):
    write_report(run[0], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert 'data-kind="straggler"' in page
    assert f"rank {SLOW} · own_s " in page

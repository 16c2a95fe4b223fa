"""Fault 16: the machine's calendar jumps, and nothing happens."""

import ast
import itertools
import time

import optax
import pytest

from replicator.checkpoint import CheckpointStore
from replicator.hooks import every
from tests.steps import regression_batch, replicas, trainer
from tests.test_architecture import PACKAGE, relative

# Where the calendar is asked for, and why: to be read by people, never to count.
FOR_PEOPLE = {
    "replicator/checkpoint/lock.py",
    "replicator/cli/checks/measure.py",
    "replicator/cli/doctor.py",
    "replicator/monitoring/events.py",
    "replicator/launchpad_bridge/view/watching/journal.py",
    "replicator/launchpad_bridge/view/watching/watcher.py",
    "replicator/cli/look/report_page/page.py",
    "replicator/rpc/security/certificates.py",
    "replicator/monitoring/run_record.py",
    "replicator/writers/tensorboard.py",
}
# A file has no other age. A jump at worst leaves what a dead launcher left, or removes
# a folder in its first millisecond, whose launcher then says so.
AGES_OF_FILES = {"replicator/launchpad_bridge/run_folder.py"}
# Certificates are for times: the clocks of hosts are compared, and nothing waits by it.
CLOCKS_OF_HOSTS = {
    "replicator/distributed/meeting/client.py",
    "replicator/distributed/meeting/server.py",
}
CALENDAR = {("time", "time"), ("time", "time_ns"), ("datetime", "now")}


def asks_the_calendar(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.Attribute):
            value = node.value
            name = value.attr if isinstance(value, ast.Attribute) else None
            name = value.id if isinstance(value, ast.Name) else name
            if (name, node.attr) in CALENDAR:
                yield f"{name}.{node.attr}"


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_no_timer_asks_the_calendar(path):
    if relative(path) not in FOR_PEOPLE | AGES_OF_FILES | CLOCKS_OF_HOSTS:
        assert not list(asks_the_calendar(path))


def test_an_hour_forth_and_back_saves_nothing_and_ends_nothing(tmp_path, monkeypatch):
    hours = itertools.cycle([3600.0, -3600.0, 0.0])
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + next(hours))
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    result = rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=20,
        checkpoint_dir=tmp_path,
        checkpoint_every=every(seconds=1800),
        display=False,
    )
    assert result.step == 20
    # Half an hour has not passed: only the end is saved.
    assert CheckpointStore(tmp_path).steps() == (20,)

"""Every door that takes a path takes one with `~` in it."""

import argparse

import optax
import pytest

from replicator.checkpoint import CheckpointStore
from replicator.cli import certificates, demo, doctor, report
from replicator.monitoring.events import EventLog, read_events
from replicator.monitoring.writers import JSONL, TensorBoard
from replicator.rpc.security.tls import Tls
from replicator.testing.faults import Injector
from replicator.training.postmortem.bundle import read_bundle
from replicator.training.reports.profiler import Profile
from tests.steps import regression_batch, replicas, trainer


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "~").exists()


def test_a_run_writes_into_the_home_directory(home):
    rep = replicas(1)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    rep.run(
        step_fn,
        [regression_batch()],
        init_fn=init_fn,
        steps=2,
        directory="~/run",
        checkpoint_dir="~/run/checkpoints",
        display=False,
    )
    found = {path.name for path in (home / "run").iterdir()}
    assert {"run.json", "metrics.jsonl", "checkpoints"} <= found
    assert {event["kind"] for event in read_events("~/run")} >= {"started", "ended"}
    assert CheckpointStore("~/run/checkpoints").restore() is not None


DOORS = {
    "jsonl": lambda: JSONL("~/a").close(),
    "tensorboard": lambda: TensorBoard("~/a").close(),
    "journal": lambda: EventLog("~/a").write("started"),
    "store": lambda: CheckpointStore("~/a").open().close(),
}


@pytest.mark.parametrize("make", DOORS.values(), ids=DOORS)
def test_what_is_written_is_written_there(home, make):
    make()
    assert (home / "a").exists()


def test_what_is_read_is_read_there(home):
    (home / "a").mkdir()
    with pytest.raises(ValueError, match=str(home)):
        read_bundle("~/a")
    assert Tls.in_folder("~/a", "server").ca.is_relative_to(home)
    Profile("~/a").close()
    Injector([], journal="~/a/b", checkpoint_dir="~/a")


COMMANDS = {
    "certificates": (certificates, ["--hosts=h", "~/a"], "folder"),
    "demo": (demo, ["--directory=~/a"], "directory"),
    "doctor": (doctor, ["--directory=~/a"], "directory"),
    "report": (report, ["~/a"], "directory"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_no_shell_expanded_does_it_itself(home, name):
    command, words, argument = COMMANDS[name]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    found, _ = parser.parse_known_args(words)
    assert getattr(found, argument) == home / "a"

"""Every door that takes a path takes one with `~` in it."""

import argparse
import os
import re
from pathlib import Path

import numpy as np
import optax
import pytest

from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.cli import certificates, demo, doctor
from replicator.cli.look import report
from replicator.errors import ArgumentError
from replicator.hooks import StateCallback, every
from replicator.inputs.options import InputOptions
from replicator.monitoring.events import EventLog, read_events
from replicator.rpc.security.tls import Tls
from replicator.testing.faults import Injector
from replicator.training.postmortem.bundle import read_bundle
from replicator.training.reports.profiler import Profile
from replicator.writers import JSONL, TensorBoard
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


def moved_run():
    """Go back to a checkpoint, which opens everything again, after the move."""
    batches = [regression_batch(seed=seed) for seed in range(4)]
    batches[2]["x"][0, 0] = np.nan
    rep = replicas(1)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    hook = StateCallback(lambda event: os.chdir("../elsewhere"), every(n_steps=1))
    rep.run(
        step_fn,
        batches,
        init_fn=init_fn,
        steps=4,
        directory="run",
        checkpoint_dir="run/checkpoints",
        checkpoint_every=1,
        on_nonfinite="rollback",
        inputs=InputOptions(allow_nan=True),
        hooks=[hook],
        display=False,
    )


def moved_tls():
    tls = Tls(ca="ca.pem", certificate=Path("a.pem"), key=Path("a.key"))
    os.chdir("../elsewhere")
    assert tls.ca.parent.name == "here"


def moved_store():
    store = CheckpointStore("checkpoints")
    os.chdir("../elsewhere")
    with store:
        store.save(Snapshot(step=1, arrays={"state": np.arange(3)}))
    assert store.steps() == (1,)


def moved_journal():
    log = EventLog("journal")
    os.chdir("../elsewhere")
    log.write("started")


def moved_writers():
    writers = [JSONL("metrics.jsonl"), TensorBoard("events")]
    os.chdir("../elsewhere")
    for writer in writers:
        writer.write(1, {"loss": 0.5})
        writer.close()


MOVED = [moved_run, moved_tls, moved_store, moved_journal, moved_writers]


@pytest.mark.parametrize("made", MOVED)
def test_a_relative_path_is_meant_from_where_it_was_given(tmp_path, monkeypatch, made):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made()
    assert list((tmp_path / "elsewhere").iterdir()) == []


COMMANDS = {
    "certificates": (certificates, ["--hosts=h", "~/a"], "folder"),
    "demo": (demo, ["--directory=~/a"], "directory"),
    "doctor": (doctor, ["--directory=~/a"], "directory"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_no_shell_expanded_does_it_itself(home, name):
    command, words, argument = COMMANDS[name]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    found, _ = parser.parse_known_args(words)
    assert getattr(found, argument) == home / "a"


def test_a_report_of_a_folder_at_home_is_looked_for_there(home):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    with pytest.raises(ArgumentError, match=re.escape(str(home / "a"))):
        report.main(parser.parse_args(["~/a"]))

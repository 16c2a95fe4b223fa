"""Records and the display end no run: a full disk, a pipe that nobody reads."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from replicator.monitoring.events import read_events
from replicator.monitoring.goodput import goodput
from replicator.writers.forgiving import Forgiving
from replicator.writers.jsonl import JSONL
from tests.fakes import RecordingWriter
from tests.steps import run_plainly

_TRAIN = """
import logging, os, resource, signal, sys, threading, replicator
replicator.fake_devices(1)
import optax
from pathlib import Path
from replicator.hooks import StateCallback, every
from tests.steps import trainer, regression_batch, replicas

rep = replicas(1)
init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
directory = Path({directory!r})
lost = threading.Event()

def at_each_step(event):
{each_step}

result = rep.run(
    step_fn, [regression_batch()], init_fn=init_fn, steps=40, directory=directory,
    write_every=1, hooks=[StateCallback(at_each_step, every(n_steps=1))],
)
Path({directory!r}, "done").write_text(str(result.step))
"""


def command(directory, each_step="pass"):
    """Return what trains in a process of its own, and says when it is done."""
    body = textwrap.indent(textwrap.dedent(each_step), "    ")
    return [sys.executable, "-c", _TRAIN.format(directory=directory, each_step=body)]


def train(directory, steps=4, **options):
    return run_plainly(steps, directory=directory, write_every=1, **options)


def told(caplog, words):
    return [each for each in caplog.messages if words in each]


def test_a_run_goes_on_without_metrics_where_the_disk_is_full(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    assert train(tmp_path, checkpoint_dir=tmp_path / "checkpoints").step == 4
    assert len(told(caplog, "No space left")) == 1
    assert told(caplog, "4 rows of metrics could not be written")


# Rows are written by a thread: there is room again when it has said that there is none.
ROOM_FOR_8_KIB_UNTIL_STEP_300 = """
    room = {1: 8192, 300: resource.RLIM_INFINITY}.get(event.step)
    if event.step == 1:
        logging.basicConfig()
        told = logging.getLogger("replicator.writers.forgiving")
        told.addFilter(lambda record: lost.set() or True)
    if event.step == 300:
        assert lost.wait(60)
    if room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
"""


def test_metrics_go_on_when_there_is_room_again(tmp_path):
    code = command(str(tmp_path), ROOM_FOR_8_KIB_UNTIL_STEP_300)
    code[-1] = code[-1].replace("steps=40", "steps=400")
    done = subprocess.run(
        code, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, (tmp_path / "done").read_text()) == (0, "400"), done.stderr
    assert "rows of metrics could not be written" in done.stderr
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    assert len(lines) - len(steps) <= 1  # the one that was cut short
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert steps[-99:] == list(range(302, 401))
    assert len(steps) < 400


@pytest.mark.parametrize("to", ["2>&1 | head -n 1", "2>&-"])
def test_a_run_ends_well_where_nobody_reads_its_display(tmp_path, to):
    code = command(str(tmp_path))[-1].replace("steps=40", "steps=400")
    shell = f'{{ "$0" -c "$1"; echo $? > "$2/status"; }} {to}'
    subprocess.run(
        ["sh", "-c", shell, sys.executable, code, str(tmp_path)],
        stdout=subprocess.DEVNULL,
        timeout=300,
        check=True,
    )
    assert (tmp_path / "done").read_text() == "400"
    assert (tmp_path / "status").read_text() == "0\n"


def test_a_writer_that_cannot_be_opened_is_opened_when_there_is_room(caplog):
    inner, answers = RecordingWriter(), [OSError("full"), OSError("full")]

    def open_writer():
        if answers:
            raise answers.pop()
        return inner

    writer = Forgiving(open_writer)
    for step in (1, 2):
        writer.write(step, {"loss": 1.0})
    writer.close()
    assert [step for step, _ in inner.rows] == [2]
    assert told(caplog, "1 rows of metrics could not be written")


def test_a_line_that_a_full_disk_cut_short_spoils_none_after_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JSONL(path)
    writer.write(1, {})
    with pytest.raises(OSError, match="No space left"):
        _write_to_full_disk(writer)
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "lo')  # what there was room for
    writer.write(3, {})
    writer.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[::2]] == [1, 3]


def _write_to_full_disk(writer):
    kept, writer._file = writer._file, open("/dev/full", "a+b", buffering=0)  # noqa: SIM115
    try:
        writer.write(2, {})
    finally:
        writer._file.close()
        writer._file = kept


def test_a_run_does_not_begin_without_its_record(tmp_path):
    (tmp_path / "run.json").touch()
    (tmp_path / "earlier").touch()  # where what is there should go
    with pytest.raises(ValueError, match="`directory` must be one that can be written"):
        train(tmp_path)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL  # as it was


def test_a_run_that_goes_on_does_without_its_record(tmp_path, caplog):
    saved = {"checkpoint_dir": tmp_path / "checkpoints"}
    train(tmp_path / "run", **saved)
    os.unlink(tmp_path / "run" / "run.json")
    (tmp_path / "run" / "run.json").mkdir()
    assert train(tmp_path / "run", steps=6, **saved).step == 6
    assert told(caplog, "The run goes on without all of its records")


# Rows are written by a thread: not before the first is there.
KILLED_AT_5 = """
    if event.step == 5:
        rows = directory / "metrics.jsonl"
        while not (rows.exists() and rows.stat().st_size):
            lost.wait(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def steps_in(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_writer_that_hangs_holds_up_the_run_once(caplog):
    class Hanging(RecordingWriter):
        def write(self, step, scalars):
            super().write(step, scalars)
            raise TimeoutError("no answer from the disk")

    inner = Hanging()
    writer = Forgiving(lambda: inner)
    for step in (1, 2, 3):
        writer.write(step, {"loss": 1.0})
    writer.close()
    assert [step for step, _ in inner.rows] == [1]
    assert told(caplog, "3 rows of metrics could not be written")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the directory of a run that was killed before it was saved."""
    directory = tmp_path_factory.mktemp("killed")
    words = command(str(directory), KILLED_AT_5)
    done = subprocess.run(words, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    return directory


def test_a_run_killed_before_it_was_saved_is_the_same_run(killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    subprocess.run(command(str(tmp_path)), timeout=300, check=True)
    events = read_events(tmp_path)
    assert [each["kind"] for each in events].count("started") == 2
    found = goodput(events)
    assert (found.sessions, found.lost_s["down"] > 0) == (2, True)
    assert steps_in(tmp_path) == list(range(1, 41))
    # What it may have been trained with before is not known: nothing is thrown away.
    assert steps_in(tmp_path / "earlier" / "0")[0] == 1


def test_another_run_than_the_one_that_was_killed_is_a_run_of_its_own(killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    train(tmp_path, steps=4)
    assert (tmp_path / "earlier" / "0" / "events.jsonl").exists()

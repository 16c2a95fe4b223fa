"""A group that lost a process goes on from the copies in its launcher's memory."""

import contextlib
import json
import signal

import pytest

from replicator.distributed.processes.ports import free_port
from replicator.monitoring.events import read_events
from replicator.rpc import Secret
from tests.distributed.processes.launched import Launched, script
from tests.multiprocess.test_launch_training import TRAIN

pytestmark = pytest.mark.slow

EVERY = 5
STEPS = 30
WHOLE = TRAIN.replace("steps=60", f"steps={STEPS}")
COPIED = WHOLE.replace(
    "checkpoint_every=5,", f"checkpoint_every=1000,\n    memory_copy_every={EVERY},"
)


def launched(folder, monkeypatch, train, **environ):
    """Train in two processes; return their last lines, the journal, the metrics."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = ("--processes", 2, "--devices-per-process", 2, script(folder, train))
    with Launched(*words, environ=environ) as group:
        assert group.wait() == 0, group.text
    ended = {line[4:] for _, line in group.wait_for(f"] ended {STEPS} ", count=2)}
    metrics = (folder / "records" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in metrics]
    return ended, read_events(folder / "records"), steps


def test_a_run_whose_process_was_killed_ends_with_the_same_bits(
    tmp_path, monkeypatch, pytestconfig
):
    environ = {"PYTHONPATH": str(pytestconfig.rootpath)}
    whole, _, _ = launched(tmp_path / "whole", monkeypatch, WHOLE, **environ)
    ended, events, steps = launched(
        tmp_path / "broken",
        monkeypatch,
        COPIED,
        REPLICATOR_FAULTS="kill rank 1 at step 23",
        REPLICATOR_FAULTS_JOURNAL="faults.jsonl",
        **environ,
    )
    assert ended == whole
    assert len(whole) == 1
    [resumed] = (event for event in events if event["kind"] == "resumed")
    assert resumed["source"] == "memory"
    # A step is not copied while the copy before is on its way, on a busy machine long.
    assert resumed["step"] in (5, 10, 15, 20)
    assert sorted(set(steps)) == sorted(steps)


SHOWN = COPIED.replace(
    "hooks=[broken]",
    "hooks=[broken, Callback(lambda e: print('step', e.step), every(n_steps=1))]",
).replace(
    "import hashlib", "import hashlib\nfrom replicator.hooks import Callback, every"
)


def test_a_host_that_was_lost_with_its_launcher_goes_on_from_the_others_memory(
    tmp_path, monkeypatch, pytestconfig
):
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    Secret.generate().write("secret")
    environ = {
        "PYTHONPATH": str(pytestconfig.rootpath),
        "REPLICATOR_RPC_SECRET_FILE": str(tmp_path / "secret"),
        "REPLICATOR_COORDINATOR": f"127.0.0.1:{free_port()}",
        "REPLICATOR_NUM_PROCESSES": "2",
    }
    words = ("--processes", 1, "--devices-per-process", 2, "--copies-host", "127.0.0.1")
    train = script(tmp_path, SHOWN.replace(f"steps={STEPS}", "steps=60"))

    def host(number):
        own = {**environ, "REPLICATOR_PROCESS_ID": str(number)}
        return Launched(*words, train, environ=own)

    with contextlib.ExitStack() as stack:
        stays, lost = (stack.enter_context(host(number)) for number in (0, 1))
        lost.wait_for("step 22")
        lost.tell(signal.SIGKILL)
        again = stack.enter_context(host(1))
        assert again.wait() == 0, again.text
        assert stays.wait() == 0, stays.text
    events = read_events(tmp_path / "records")
    [resumed] = (event for event in events if event["kind"] == "resumed")
    assert resumed["source"] == "memory"
    assert resumed["step"] >= EVERY

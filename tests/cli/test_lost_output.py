"""Every command, where its output cannot be written: it does its work to the end."""

import os
import subprocess
import sys

import pytest

import replicator.launchpad_bridge as lp
from replicator.checkpoint import CheckpointStore
from replicator.cli.main import COMMANDS
from tests.checkpoint.states import small_snapshot
from tests.cli.look.report_page.runs import make_run
from tests.launchpad_bridge.noted import wait_until_noted
from tests.launchpad_bridge.programs import Counter
from tests.training.postmortem.test_replay import died

pytestmark = pytest.mark.slow

# By command: its words in a folder, and a file there that is its work, if it has one.
TABLE = {
    "demo": ("--steps 2 --directory run", "run/metrics.jsonl"),
    "launch": ("--processes 2 train.py", "done-1"),
    "program": ("shown --once --interval 0.1", None),
    "plan": ("train.py:problem --topology h100:2 --strategy fsdp --json rows", "rows"),
    "report": ("run", "run/report.html"),
    "replay": ("died/postmortem/4", None),
    "checkpoints": ("saved", None),
    "devices": ("", None),
    "doctor": ("", None),
    "certificates": ("keys", "keys/server.key"),
    "completion": ("bash", None),
}
# By what standard output is: the code of a command that has done its work, and whether
# it says that lines are missing.
SINKS = {
    "/dev/full": (1, True),
    "a closed pipe": (1, False),
    "closed": (0, False),
}
TRAIN = """
import os, sys
for _ in range(3000):
    print("x" * 50)
    print("y", file=sys.stderr)
open("done-" + os.environ["REPLICATOR_PROCESS_ID"], "w").close()
"""
PROBLEM = """
import jax, jax.numpy as jnp
def problem(rep):
    def step_fn(w, batch):
        return w - (batch["x"] @ w).mean(), {}
    batch = {"x": jax.ShapeDtypeStruct((8, 4), "float32")}
    return step_fn, lambda key: jnp.zeros(4), batch
"""
CLI = [sys.executable, "-m", "replicator.cli"]


@pytest.fixture(scope="module", autouse=True)
def program():
    """A program that runs: what `replicator program` shows."""
    program = lp.Program("shown")
    program.add_node(lp.CourierNode(Counter), label="counter")
    with lp.launch(program, launch_type="threads") as run:
        wait_until_noted(run)
        yield run


def prepare(command, folder):
    match command:
        case "launch":
            (folder / "train.py").write_text(TRAIN)
        case "plan":
            (folder / "train.py").write_text(PROBLEM)
        case "report":
            make_run(folder / "run")
        case "replay":
            died(folder / "died")
        case "checkpoints":
            with CheckpointStore(folder / "saved") as store:
                store.save(small_snapshot(1))


def run(command, folder, sink, *, errors_too=False):
    """Run words with an output that cannot be written; return code and errors."""
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    environ |= {"REPLICATOR_FAKE_DEVICES": "2"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    if sink == "closed":
        closing = ">&- 2>&-" if errors_too else ">&-"
        command = ["/bin/sh", "-c", f'exec "$@" {closing}', "sh", *command]
    with open("/dev/full", "w") as full, open(write_end, "w") as gone:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=full if sink == "/dev/full" else gone,
            stderr=subprocess.STDOUT if errors_too else subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    return done.returncode, done.stderr


def test_each_command_has_its_row():
    assert set(TABLE) == set(COMMANDS)


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("command", TABLE)
def test_a_command_does_its_work_where_nothing_can_be_written(command, sink, tmp_path):
    words, made = TABLE[command]
    prepare(command, tmp_path)
    code, told = run([*CLI, command, *words.split()], tmp_path, sink)
    lossy_code, is_told = SINKS[sink]
    assert code == (0 if command == "launch" else lossy_code), told
    assert ("could not be written: No space left on device" in told) is is_told, told
    assert "Traceback" not in told
    assert made is None or (tmp_path / made).exists()


@pytest.mark.parametrize("sink", SINKS)
def test_a_launch_goes_on_where_errors_cannot_be_written_either(sink, tmp_path):
    prepare("launch", tmp_path)
    words, _ = TABLE["launch"]
    code, _ = run([*CLI, "launch", *words.split()], tmp_path, sink, errors_too=True)
    assert code == 0
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()

"""A process that forks workers, and is spoken to without end."""

import dataclasses
import os
import socket
import subprocess
import sys

import pytest

from replicator.distributed.processes.sweep import MARK
from replicator.launchpad_bridge.launchers.forked.control_frames import Receiver, send
from replicator.launchpad_bridge.launchers.launcher_environment import (
    LauncherEnvironment,
)

STARTS = 24
SERVE = """
import sys
from replicator.launchpad_bridge.launchers.forked.fork_server import main
sys.exit(main(control=0))
"""


@pytest.fixture
def control():
    """Yield the launcher's end of a fork server; few messages fit in between."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is
    ours.settimeout(20.0)
    environment = os.environ | {MARK: "mark-of-the-test-"}
    with (
        theirs,
        subprocess.Popen(
            [sys.executable, "-c", SERVE], stdin=theirs, env=environment
        ) as server,
    ):
        theirs.close()
        with ours:
            yield ours
        assert server.wait() == 0


def order():
    surroundings = LauncherEnvironment(
        argv=["test"], path=sys.path, jax_settings={}, log_level=None
    )
    return {
        "run_id": "test",
        "forks": True,
        "modules": [],
        "surroundings": dataclasses.asdict(surroundings),
        "own_environment": [],
    }


def told(number, log):
    """Return a start of a worker that fails, as it has no recipe."""
    job = {
        "program": "p",
        "worker": f"w/{number}",
        "launch_type": "local_mp",
        "recipe": str(log.with_name("recipe")),
    }
    return {
        "start": {
            "id": number,
            "job": job,
            "log": str(log),
            "cores": [],
        }
    }


def test_it_goes_on_reading_while_nobody_reads_what_it_says(control, tmp_path):
    send(control, order())
    channel, theirs = socket.socketpair()
    with channel, theirs:
        for number in range(STARTS):
            send(control, told(number, tmp_path / "log"), [theirs.fileno()])
    receiver = Receiver(control)
    heard = {"started": set(), "exited": set()}
    while len(heard["exited"]) < STARTS:
        for message in receiver.receive() or ():
            for word in heard.keys() & message.keys():
                heard[word].add(message[word])
    assert heard["started"] == heard["exited"] == set(range(STARTS))

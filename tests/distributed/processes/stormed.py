"""Start things in a storm of Ctrl-C: `stormed.py KIND FOLDER`, leader of its session.

Prints, as JSON, how each ended.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from replicator.distributed.processes.guarded import GuardedProcess
from replicator.launchpad_bridge.launchers.forked.fork_server_client import (
    ForkServer,
    Order,
)
from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.worker_process import Job

STARTS = 3


@contextlib.contextmanager
def storm():
    """Send SIGINT to this process's group all the time, as a terminal would."""
    signal.signal(signal.SIGINT, lambda number, frame: None)
    is_over = threading.Event()

    def blow():
        while not is_over.wait(1e-4):
            os.killpg(0, signal.SIGINT)

    thread = threading.Thread(target=blow)
    thread.start()
    yield
    is_over.set()
    thread.join()


def start_command(folder):
    """Return how a command ends, of which nothing knows of terminals."""
    process = GuardedProcess(
        [sys.executable, "-S", "-c", "import sys; sys.exit(7)"],
        owner="stormed",
        environ=os.environ,
        folder=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return process.wait()


def start_fork_server(folder):
    """Return how a worker of a fork server ended that has nothing to run."""
    order = Order(
        run_id="stormed",
        forks=False,
        modules=[],
        surroundings=read_surroundings(),
        own_environment=[],
    )
    server = ForkServer(order, environment=os.environ, folder=folder, logs=folder)
    job = Job(program="p", worker="w", launch_type="processes", recipe="none")
    end = server.start(job, cores=(), log=folder / "w.log").wait(None)
    server.close()
    return end.reason or end.code


def main(kind, folder):
    start = {"command": start_command, "fork_server": start_fork_server}
    with storm():
        return [start[kind](folder) for _ in range(STARTS)]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))

"""A member of a group on this host, behind a pipe as if on another."""

import contextlib
import json
import pathlib
import queue
import signal
import subprocess
import sys
import uuid

from replicator.distributed.remote.bundle import remote_command, source_line
from replicator.distributed.remote.frames import (
    ORDER,
    frame,
)
from replicator.distributed.remote.member import HostMember
from tests.multiprocess.worker_processes import wait_dead, wait_until

LONG_S = 60.0
# A child that has left the session, and ignores what can be ignored.
HAS_CHILD = (
    "import os, signal, subprocess, sys, time\n"
    "here = [os.getpid(), os.getppid()]\n"
    "command = ['sh', '-c', 'trap \"\" TERM HUP INT; exec sleep 600']\n"
    "here.append(subprocess.Popen(command, start_new_session=True).pid)\n"
    "open('here', 'w').write(' '.join(map(str, here)) + '.')\n"
    "signal.pause()\n"
)


class Host:
    """A folder that a member runs in, through a shell of this host."""

    def __init__(self, folder):
        self.folder = folder
        self.owner = f"run-{uuid.uuid4().hex}"
        self.ends = queue.SimpleQueue()
        self.steps = queue.SimpleQueue()
        self.members = []

    def order(self, code, *arguments, **changes):
        return {
            "owner": self.owner,
            "arguments": ["-c", code, *arguments],
            "directory": str(self.folder),
            "environment": {},
            "secret": "",
            **changes,
        }

    def start(
        self,
        code,
        *arguments,
        lost_after_s=LONG_S,
        shell="{}",
        progress=None,
        **changes,
    ):
        command = shell.format(remote_command(sys.executable))
        member = HostMember(
            1,
            "b",
            ["sh", "-c", command],
            self.order(code, *arguments, **changes),
            lost_after_s=lost_after_s,
            was_used=False,
            folder=self.folder,
            progress=progress or self.steps.put,
            signal_asked=lambda: signal.SIGTERM,
            report=self.ends.put,
        )
        self.members.append(member)
        return member

    @contextlib.contextmanager
    def without_launcher(self, lost_after_s=LONG_S):
        """Be a launcher that sends the order and then nothing."""
        times = {"lost_after_s": lost_after_s, "beat_s": 0.2}
        order = json.dumps(self.order(HAS_CHILD, **times)).encode()
        with subprocess.Popen(
            ["sh", "-c", remote_command(sys.executable)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as connected:
            connected.stdin.write(source_line() + frame(ORDER, order))
            connected.stdin.flush()
            yield connected

    def end(self):
        return self.ends.get(timeout=LONG_S)

    def here(self):
        """Wait for `HAS_CHILD`; return the ids of the process, its guard, its child."""
        file = self.folder / "here"
        wait_until(lambda: file.exists() and file.read_text().endswith("."))
        return [int(pid) for pid in file.read_text()[:-1].split()]


def parent(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def state_of(pid):
    """Return the kernel's letter: S sleeps, Z has exited."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def wait_gone(pids):
    """Wait, on a busy machine, too, until none of these processes is there."""
    wait_dead(pids, within_s=LONG_S)

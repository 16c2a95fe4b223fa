"""A group of two real processes, and connections of a stranger."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from benchmarks.rpc_attack.attack import LONG_S, Won, hold, within
from replicator.distributed.clusters import Cluster
from replicator.distributed.meeting.coordinator_tls import jax_has_tls
from replicator.distributed.processes.ports import free_port
from replicator.rpc import Secret
from replicator.rpc.security.secret import FILE_VARIABLE

JOIN_S = 25.0
"""Seconds that members wait for each other."""
ROOT = Path(__file__).parents[2]


class Group:
    """A group of processes, each of which joins when it is started.

    Args:
      folder: A private folder for secrets.
      python: Interpreter of the processes.
      has_secret: Whether the run has a secret.

    Attributes:
      place: Host and port that process 0 listens on.
      secret: The run's secret.
      others: The secret of another run.
      python: Interpreter of the processes.
      has_joined: Whether the processes have joined.
      has_tls: Whether they make certificates.
    """

    def __init__(self, folder: Path, python: str, *, has_secret: bool = True) -> None:
        self.python = python
        self.has_joined = False
        self.has_tls = has_secret and (python != sys.executable or jax_has_tls())
        self._members: dict[int, subprocess.Popen[str]] = {}
        self.place = ("127.0.0.1", free_port())
        self._path = folder / f"secret-{self.place[1]}"
        self.secret, self.others = Secret.generate(), Secret.generate()
        self.secret.write(self._path)
        self._environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self._environ |= {FILE_VARIABLE: str(self._path)} if has_secret else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self._members.values():
            member.kill()
            member.communicate()
        self._path.unlink()

    @property
    def cluster(self) -> Cluster:
        """The group, as process 1."""
        return Cluster(
            kind="arguments",
            coordinator=f"{self.place[0]}:{self.place[1]}",
            num_processes=2,
            process_id=1,
        )

    def start(self, process_id: int) -> None:
        """Start a process, which then joins."""
        self._members[process_id] = subprocess.Popen(
            [
                self.python,
                "-m",
                "benchmarks.join_attack.member",
                self.cluster.coordinator,
                str(process_id),
                str(JOIN_S),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environ,
            cwd=ROOT,
        )

    def start_0(self) -> None:
        """Start process 0, and return when it listens."""
        self.start(0)
        within(JOIN_S, self.listens)

    def listens(self) -> bool:
        """Return whether a program listens at the place of process 0."""
        with contextlib.suppress(OSError), socket.create_connection(self.place, 1.0):
            return True
        return False

    def joined_s(self) -> float:
        """Start the processes that are left; return the seconds of the slower join."""
        for process_id in {0, 1} - self._members.keys():
            self.start(process_id)
        joins = [self._line(process_id) for process_id in (0, 1)]
        hold(all(one["devices"] > 1 for one in joins), f"not one group: {joins}")
        self.has_joined = True
        return max(one["joined_s"] for one in joins)

    def still_talks(self) -> None:
        """Check that both processes still reach each other by JAX's service."""
        for member in self._members.values():
            assert member.stdin is not None, "a pipe"
            member.stdin.write("\n")
            member.stdin.flush()
        for process_id in (0, 1):
            line = self._line(process_id)
            hold(line == {"received": [0, 1]}, f"process {process_id}: {line}")

    def _line(self, process_id: int) -> Any:
        member = self._members[process_id]
        assert member.stdout is not None, "a pipe"
        line = member.stdout.readline()
        if not line:
            raise Won(f"process {process_id} ended: {member.communicate()[1][-600:]}")
        return json.loads(line)


def ask(place: tuple[str, int], *messages: bytes, patience_s: float = 1.0) -> bytes:
    """Send messages one after another; return the last answer."""
    answer = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(place, LONG_S) as connection,
    ):
        connection.settimeout(patience_s)
        for message in messages:
            connection.sendall(message)
            answer = connection.recv(1 << 16)
    return answer


@contextlib.contextmanager
def flood(place: tuple[str, int], script: str, *, until_s: float = 2.0):
    """Start a process that opens silent connections as fast as it can."""
    command = [sys.executable, "-c", script, *map(str, place)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            time.sleep(until_s)
            yield
            hold(process.poll() is None, "the flood ended before the group had met")
        finally:
            process.kill()


FLOOD = """
import collections, socket, sys
held = collections.deque(maxlen=400)
while True:
    try:
        held.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.0))
    except OSError:
        pass
"""

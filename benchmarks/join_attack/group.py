"""A group of two real processes, and one of ours that wants to be among them."""

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
"""How long members wait for each other."""
ROOT = Path(__file__).parents[2]


class Group:
    """A group whose processes join when they are told to.

    Args:
      folder: Where secrets lie; private.
      python: What runs the processes.
      has_secret: Whether the run has a secret.

    Attributes:
      place: Where process 0 listens: host and port.
      secret: The run's.
      others: That of another run.
      python: What runs the processes.
      has_joined: Whether the group has.
      has_tls: Whether its members make certificates.
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
        """Return what process 1 knows of the group."""
        return Cluster(
            kind="arguments",
            coordinator=f"{self.place[0]}:{self.place[1]}",
            num_processes=2,
            process_id=1,
        )

    def start(self, process_id: int) -> None:
        """Start a process; it joins."""
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
        """Tell whether something listens where process 0 is to be."""
        with contextlib.suppress(OSError), socket.create_connection(self.place, 1.0):
            return True
        return False

    def joined_s(self) -> float:
        """Start who has not started yet, and return how long the slower one took."""
        for process_id in {0, 1} - self._members.keys():
            self.start(process_id)
        told = [self._line(process_id) for process_id in (0, 1)]
        hold(all(one["devices"] > 1 for one in told), f"they are not together: {told}")
        self.has_joined = True
        return max(one["joined_s"] for one in told)

    def still_talks(self) -> None:
        """Return if both processes still reach each other by JAX's service."""
        for member in self._members.values():
            assert member.stdin is not None, "a pipe"
            member.stdin.write("\n")
            member.stdin.flush()
        for process_id in (0, 1):
            told = self._line(process_id)
            hold(told == {"told": [0, 1]}, f"they said {told}")

    def _line(self, process_id: int) -> Any:
        member = self._members[process_id]
        assert member.stdout is not None, "a pipe"
        line = member.stdout.readline()
        if not line:
            raise Won(f"process {process_id} ended: {member.communicate()[1][-600:]}")
        return json.loads(line)


def say(place: tuple[str, int], *messages: bytes, patience_s: float = 1.0) -> bytes:
    """Say something, message after message; return what was answered last."""
    heard = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(place, LONG_S) as connection,
    ):
        connection.settimeout(patience_s)
        for message in messages:
            connection.sendall(message)
            heard = connection.recv(1 << 16)
    return heard


@contextlib.contextmanager
def flood(place: tuple[str, int], script: str, *, until_s: float = 2.0):
    """Have a process of its own open silent connections, as fast as it can."""
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

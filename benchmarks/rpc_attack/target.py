"""A server in a process of its own, as an attacker has it before him."""

import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np

from benchmarks.rpc_attack.attack import LONG_S, hold, memory_bytes
from benchmarks.rpc_attack.served import REGISTRY
from replicator.errors import RpcError
from replicator.rpc.client.client import Client
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import Connection
from replicator.rpc.security.authentication import MESSAGE_BYTES
from replicator.rpc.security.secret import DESCRIPTOR_VARIABLE, FILE_VARIABLE, Secret
from replicator.rpc.transports.connect import connect

LIMITS = MessageLimits()


class Target:
    """A server that is attacked."""

    def __init__(self, *, addresses: str = "unix:,grpc://127.0.0.1:0", tls: str = ""):
        self.secret = Secret.generate()
        self._arguments = [addresses, tls]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self._start()

    def _start(self) -> None:
        descriptor = self.secret.inheritable_descriptor()
        environment = {**os.environ, DESCRIPTOR_VARIABLE: f"{descriptor}"}
        environment.pop(FILE_VARIABLE, None)
        command = [sys.executable, "-m", "benchmarks.rpc_attack.served"]
        self.process = subprocess.Popen(
            [*command, *self._arguments],
            env=environment,
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        os.close(descriptor)
        assert self.process.stdout is not None, "a pipe"
        address = self.process.stdout.readline().strip()
        self.addresses = address.split(",")
        self.unix = next((a for a in self.addresses if a.startswith("unix:")), "")
        self.grpc = next((a for a in self.addresses if a.startswith("grpc:")), "")
        self.path = self.unix.removeprefix("unix:")
        self.port = int(self.grpc.rpartition(":")[2] or 0)

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.process.pid

    @property
    def grpc_binding(self) -> str:
        """Return what a proof over gRPC is valid for."""
        return f"grpc:127.0.0.1:{self.port}"

    def log(self) -> bytes:
        """Return what it has written to its standard error."""
        self._log.seek(0)
        return self._log.read()

    def memory_bytes(self) -> int:
        """Return its memory."""
        return memory_bytes(self.pid)

    def client(self, address: str | None = None, **options: object) -> Client:
        """Return a client of the program's own."""
        options = {"timeout_s": LONG_S, **options}
        where = self.unix if address is None else address
        return Client(where, secret=self.secret, registry=REGISTRY, **options)  # type: ignore[arg-type]

    def member(self, address: str | None = None) -> Connection:
        """Return a connection of who knows the secret, to send what it likes."""
        where = self.unix if address is None else address
        return connect(where, secret=self.secret, registry=REGISTRY, timeout_s=LONG_S)

    @contextlib.contextmanager
    def raw(self) -> Iterator[socket.socket]:
        """Yield a socket that is connected and has said nothing."""
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(LONG_S)
            raw.connect(self.path)
            yield raw

    def renew(self) -> None:
        """Let another server take its place."""
        self._end()
        self._start()

    def check(self) -> None:
        """Return if it lives and serves its own, in time.

        Raises:
          Won: It does not.
        """
        code = self.process.poll()
        hold(code is None, f"the server ended with {code}")
        for address in self.addresses:
            start_s = time.monotonic()
            same = False
            try:
                with self.client(address) as client:
                    same = np.array_equal(client.echo(np.arange(9)), np.arange(9))
            except RpcError as error:
                hold(False, f"the server does not serve at {address}: {error}")
            hold(same, "the server answers wrongly")
            took_s = time.monotonic() - start_s
            hold(took_s < LONG_S / 2, f"a call took {took_s:.1f} s at {address}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.close()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def read_message(raw: socket.socket) -> bytes:
    """Return a message of the handshake; less of it if the server closes."""
    message = b""
    with contextlib.suppress(ConnectionError):
        while len(message) < MESSAGE_BYTES:
            part = raw.recv(MESSAGE_BYTES - len(message))
            if not part:
                break
            message += part
    return message


def is_closed(raw: socket.socket) -> bool:
    """Return whether the server disconnects, with or without a refusal."""
    try:
        while raw.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def private_folder() -> Path:
    """Return a new folder of this user's, which goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

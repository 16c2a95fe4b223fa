"""The objects of the library that are attacked, in a process of their own."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

from benchmarks.rpc_attack.attack import (
    LONG_S,
    forget_peak,
    hold,
    memory_bytes,
    within,
)
from benchmarks.rpc_attack.offered import BATCH, CALLS, ROWS
from replicator.distributed.meeting.members import Hello
from replicator.errors import RpcError
from replicator.rpc.client.client import Client
from replicator.rpc.protocols import Connection, MessageKind
from replicator.rpc.transports.connect import connect

QUICK_S = LONG_S / 3
_GROWTH_BYTES = 128 << 20

Call = tuple[str, dict[str, Any]]


class Offered:
    """The services of `offered`, in a process of their own; started when needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self._told: dict[str, Any] = {}

    @property
    def process(self) -> subprocess.Popen[str]:
        """Return it, running."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rpc_attack.offered"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            assert self._process.stdout is not None, "a pipe"
            line = self._process.stdout.readline()
            self._log.seek(0)
            hold(line, f"it ended: {self._log.read()[-2000:]!r}")
            self._told = json.loads(line)
        return self._process

    def place(self, service: str) -> Any:
        """Return where a service is."""
        hold(self.process.poll() is None, "the server has ended")
        return self._told["queue" if service == "courier" else service]

    def client(self, service: str, *, timeout_s: float = LONG_S) -> Client:
        """Return a client of the program's own."""
        return Client(self.place(service), timeout_s=timeout_s)

    def member(self, service: str) -> Connection:
        """Return a connection of who belongs, to send what it likes."""
        return connect(self.place(service), timeout_s=LONG_S)

    @contextlib.contextmanager
    def asking(self, service: str) -> Iterator[Callable[..., int | None]]:
        """Yield what calls, and returns the kind of the answer; None: there is none."""
        member: Connection | None = None
        numbers = itertools.count(1)

        def ask(call: Call, args: Any = None) -> int | None:
            nonlocal member
            method, kwargs = call
            member = member or self.member(service)
            start_s = time.monotonic()
            try:
                body = [method, args, kwargs, 1.0]
                member.send(MessageKind.CALL, next(numbers), body, timeout_s=LONG_S)
                return member.receive(timeout_s=LONG_S).kind
            except RpcError:
                member.close()
                member = None
                return None
            finally:
                took_s = time.monotonic() - start_s
                told = f"`{method}` took {took_s:.1f} s of {[*kwargs]}"
                hold(took_s < QUICK_S, told)

        try:
            yield ask
        finally:
            if member is not None:
                member.close()

    @contextlib.contextmanager
    def grows_little(self) -> Iterator[None]:
        """Hold its memory to a bound."""
        pid = self.process.pid
        forget_peak(pid)
        before = memory_bytes(pid)
        yield
        hold(self.process.poll() is None, "the server has ended")
        grown = memory_bytes(pid, "VmHWM") - before
        hold(grown < _GROWTH_BYTES, f"it grew by {grown >> 20} MiB")

    def check(self) -> None:
        """Return if all services serve their own, in time."""
        start_s = time.monotonic()
        for use in _USES:
            use(self)
        took_s = time.monotonic() - start_s
        hold(took_s < LONG_S, f"its own were served in {took_s:.1f} s")

    def renew(self) -> None:
        """Let another process take its place."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.renew()
        self._log.close()


# What others do meanwhile, and afterwards.


def _use_queue(offered: Offered) -> None:
    with offered.client("queue") as queue:
        while queue.take(BATCH, timeout_s=0.0) is not None:
            pass
        for _ in range(BATCH):
            queue.insert(ROWS, actor="actor/0", version=0)
        hold(queue.take(BATCH, timeout_s=LONG_S) is not None, "nothing is taken")


def _use_turns(offered: Offered) -> None:
    with offered.client("turns") as turns:
        for actor in ("actor/0", "actor/1"):
            turn = turns.turn(actor)
            turns.insert(ROWS, actor=actor, version=turn.version, number=turn.number)
        hold(turns.take(BATCH, timeout_s=LONG_S) is not None, "nothing is taken")


def _use_replay(offered: Offered) -> None:
    with offered.client("replay") as replay:
        replay.insert(ROWS, actor="actor/0", version=0, priorities=[1.0, 2.0])
        taken = replay.take(BATCH, timeout_s=LONG_S)
        replay.update_priorities(taken.keys, np.ones(BATCH))


def _use_learner(offered: Offered) -> None:
    with offered.client("learner") as learner:
        version = learner.get_variables(timeout_s=LONG_S).version
        for _ in range(2 * BATCH):
            learner.insert(ROWS, actor="actor/0", version=version)
        learns = within(LONG_S, lambda: learner.statistics()["version"] > version)
        hold(learns, "it does not learn")


def _use_others(offered: Offered) -> None:
    with offered.client("inference") as inference:
        action, *_ = inference.act(**dict(CALLS["inference"])["act"])
        hold(np.shape(action) == (2,), "it does not act")
    for service in ("variables", "cacher"):
        with offered.client(service) as variables:
            hold(variables.get().version == 1, f"`{service}` has no variables")
    with offered.client("registry") as registry:
        registry.publish("unix:mine", "unix:here")
        hold(registry.find("unix:mine", 0.0) == "unix:here", "it is not found")
    with offered.client("actor") as actor:
        hold("steps" in actor.statistics(), "it tells nothing")


def use_rendezvous(offered: Offered) -> None:
    """Be process 1 of the group, which then has met."""
    hello = Hello(
        process_id=1,
        num_processes=2,
        host="here",
        patience_s=LONG_S,
        clock_s=time.time(),
        has_tls=False,
    )
    for _ in range(20):  # while it begins anew
        with contextlib.suppress(OSError):
            heard = say(offered.place("rendezvous"), hello.to_line())
            if b"go" in heard:
                return
        time.sleep(0.1)
    hold(False, "the group does not meet")


_USES = (
    _use_queue,
    _use_turns,
    _use_replay,
    _use_learner,
    _use_others,
    use_rendezvous,
)


def say(port: int, line: bytes, patience_s: float = LONG_S) -> bytes:
    """Send a line to a port; return the reply."""
    with socket.create_connection(("127.0.0.1", port), LONG_S) as said:
        said.sendall(line)
        said.settimeout(patience_s)
        return said.recv(1 << 16)

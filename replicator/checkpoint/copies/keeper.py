"""Hold copies of the shards of a host's processes in the memory of their launcher.

Processes of a group are started again as one, so a copy in another of them would end
with it: copies are the launcher's. `rpc` carries them: a process writes its shards into
a memory file, which the launcher maps by its descriptor, sealed and without a name. So
they are written once, outlive the process, and end with the launcher. The process
writes to that memory again only when the keeper has let go of it.

Of each process a keeper has at most two: the last one that all processes have handed
over whole, and the next, on its way (`copies.py` knows which that is). So there is
always a step of which all shards are held, also where one process fails to hand over.

The *line* of a run is the text by which the owner of its directory is known
(`checkpoint.lock`). Copies are those of one line: who takes the directory over takes
them, too, by naming the owner before; in a directory that was made anew there are none.
"""

import contextlib
import dataclasses
import importlib.util
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from replicator.base.accepts import accepts, is_array, items, plain, text, whole
from replicator.distributed.piece_transfer import Offered, PieceTree, offer_pieces
from replicator.errors import ArgumentError
from replicator.rpc.client.client import Client
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.security.secret import FILE_VARIABLE, Secret
from replicator.rpc.security.tls import Tls
from replicator.rpc.server.server import Server
from replicator.rpc.transports.addresses import parse

VARIABLE = "REPLICATOR_KEEPER"
"""Address of the keeper of a process's host."""

TLS_VARIABLE = "REPLICATOR_KEEPER_TLS"
"""Folder of the certificate by which keepers of other hosts are reached."""

LIMITS = MessageLimits(message_bytes=1 << 44, shared_bytes=1 << 44, trusted_memory=True)
"""Limits of both ends. What a keeper holds has a bound of its own, `most_bytes`."""

_NEEDED = ("grpc", "cryptography")  # between hosts

MOST_PIECES = 1 << 14
"""Most pieces whose bytes `Keeper.add` takes at once."""

_DATA = items(
    "arrays of bytes",
    lambda value: is_array(value) and value.ndim == 1 and value.dtype == np.uint8,
    MOST_PIECES,
)
_TREE = plain(1 << 24, most_text=1 << 26)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Copies:
    """Copies of one process's shards.

    Attributes:
      num_bytes: Number of bytes of a copy; 0 where there is none.
      step: Step of the copy that is on its way.
      arriving: Bytes of its pieces, as far as they have arrived.
      whole: The others, by step.
    """

    num_bytes: int = 0
    step: int = -1
    arriving: list[np.ndarray] = dataclasses.field(default_factory=list)
    whole: dict[int, Offered] = dataclasses.field(default_factory=dict)

    def drop(self, steps: Iterable[int]) -> None:
        """Drop copies that are whole."""
        for step in steps:
            del self.whole[step]
        if not self.whole and self.step < 0:
            self.num_bytes = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class _Run:
    """The copies of one run, by process."""

    line: str
    of: dict[int, _Copies] = dataclasses.field(default_factory=dict)


class Keeper:
    """The copies on one host; its public methods are those of an `rpc.Server`.

    Args:
      most_bytes: Most bytes of all copies together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        # Guards `_runs` and all below it. Calls are short: bytes arrive, and leave,
        # outside of them.
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}

    @accepts(run=text(4096), before=text(), line=text())
    def take_over(self, run: str, before: str, line: str) -> None:
        """Hand the copies of a run to the next owner of its directory.

        Args:
          run: The directory.
          before: Line of the owner before; copies of another one are dropped.
          line: Line of the new owner.
        """
        with self._lock:
            known = self._runs.get(run)
            if known is None or known.line not in (before, line):
                self._runs[run] = known = _Run(line=line)
            known.line = line

    @accepts(
        line=text(), process=whole(), step=whole(), num_bytes=whole(), last=whole(-1)
    )
    def begin(
        self, line: str, process: int, step: int, num_bytes: int, last: int
    ) -> int:
        """Begin a copy of a process's shards; drop all of its others but one.

        Args:
          line: Line of the run.
          process: Number of the process.
          step: Step of the copy.
          num_bytes: Number of its bytes.
          last: The last step that all processes have handed over; -1 for none. Older
            copies of other processes are dropped, too.

        Returns:
          How many bytes are missing for two copies of each process; if any are, the
          copy is not begun.
        """
        with self._lock:
            of = self._of(line)
            copies = of.setdefault(process, _Copies())
            for other in of.values():
                other.drop([step for step in other.whole if step < last])
            needed = 2 * num_bytes + sum(
                2 * other.num_bytes
                for run in self._runs.values()
                for other in run.of.values()
                if other is not copies
            )
            if needed > self._most_bytes:
                return needed - self._most_bytes
            copies.drop([other for other in copies.whole if other != last])
            copies.num_bytes, copies.step, copies.arriving = num_bytes, step, []
            return 0

    @accepts(line=text(), process=whole(), step=whole(), data=_DATA)
    def add(self, line: str, process: int, step: int, data: list[np.ndarray]) -> None:
        """Take the bytes of the next pieces of a copy that was begun."""
        with self._lock:
            copies = self._arriving(line, process, step)
            given = sum(each.nbytes for each in (*copies.arriving, *data))
            if given > copies.num_bytes:
                raise ValueError(f"{given} bytes of a copy of {copies.num_bytes}")
            copies.arriving += data

    @accepts(line=text(), process=whole(), step=whole(), tree=_TREE)
    def complete(self, line: str, process: int, step: int, tree: Any) -> None:
        """Hold a copy, whose pieces have all arrived."""
        described = PieceTree.from_json(tree)
        with self._lock:
            copies = self._arriving(line, process, step)
            sizes = [piece.num_bytes for piece in described.pieces]
            if sizes != [each.nbytes for each in copies.arriving]:
                raise ValueError("a copy whose pieces are of other sizes")
            copies.whole[step] = (described, copies.arriving.__getitem__)
            copies.step, copies.arriving = -1, []

    @accepts(line=text())
    def held(self, line: str) -> list[tuple[int, int]]:
        """Return process and step of each copy that is whole."""
        with self._lock:
            of = self._of(line)
            return [(process, step) for process in of for step in of[process].whole]

    @accepts(line=text(), above=whole(-1))
    def drop(self, line: str, above: int) -> None:
        """Drop the copies of steps above one, and those that are on their way."""
        with self._lock:
            for copies in self._of(line).values():
                copies.step, copies.arriving = -1, []
                copies.drop([step for step in copies.whole if step > above])

    def _of(self, line: str) -> dict[int, _Copies]:
        for run in self._runs.values():
            if run.line == line:
                return run.of
        raise LookupError("another process has taken the run's directory over")

    def _arriving(self, line: str, process: int, step: int) -> _Copies:
        copies = self._of(line).get(process)
        if copies is None or copies.step != step:
            raise LookupError(f"no copy of step {step} was begun")
        return copies

    def _find(self, name: str) -> Offered | None:
        line, process, step = name.split("/")
        with self._lock:
            copies = self._of(line).get(int(process))
            return None if copies is None else copies.whole.get(int(step))


def copy_name(line: str, process: int, step: int) -> str:
    """Return the name by which a keeper offers a copy.

    >>> copy_name("4f", 3, 20)
    '4f/3/20'
    """
    return f"{line}/{process}/{step}"


def keeper_client(address: str, *, timeout_s: float) -> Client:
    """Return a client of a keeper, of this host or another.

    Args:
      address: Address of the keeper.
      timeout_s: Longest time of a call, in seconds.
    """
    folder = os.environ.get(TLS_VARIABLE)
    tls = _tls(Path(folder)) if folder else None
    # A keeper serves as long as its launcher lives: one that is gone does not return.
    return Client(
        address, limits=LIMITS, timeout_s=timeout_s, tls=tls, wait_for_ready=False
    )


@contextlib.contextmanager
def serve_keeper(
    folder: Path, *, most_bytes: int | None = None, host: str | None = None
) -> Iterator[dict[str, str]]:
    """Serve a keeper in this process, until the end of the block.

    Args:
      folder: Folder of this user alone, for its socket.
      most_bytes: Most bytes of all copies; by default half of the host's memory.
      host: Name of this host for processes of others; None if there are none. They
        prove the run's secret, over TLS.

    Yields:
      Variables by which processes of this host find it.

    Raises:
      ArgumentError: `host` is given, and the run has no secret, or a package that it
        needs is missing.
    """
    if most_bytes is None:
        most_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    keeper = Keeper(most_bytes)
    address = f"unix:{folder / 'keeper' / 'socket'}"
    try:
        parse(address)
    except ArgumentError:  # too long for a socket: then in a folder of its own
        address = "unix:"
    variables, secret, tls = {}, None, None
    if host is not None:
        secret = _require_secret(host)
        tls = _make_certificate(secret, folder / "keeper-tls", host)
        variables[TLS_VARIABLE] = str(folder / "keeper-tls")
        address += f",grpc://{host}:0"
    server = Server(
        keeper, name="keeper", address=address, limits=LIMITS, secret=secret, tls=tls
    )
    with offer_pieces(server, keeper._find):
        yield {VARIABLE: server.address, **variables}


def _require_secret(host: str) -> Secret:
    secret = Secret.from_environment()
    if secret is None:
        raise ArgumentError(
            f"`copies_host` must be in a run with a secret, got {host!r} and none. Set "
            f"{FILE_VARIABLE} to a file of 32 random bytes, mode 0600, the same on all "
            "hosts."
        )
    return secret


def _make_certificate(secret: Secret, folder: Path, host: str) -> Tls:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise ArgumentError(
            f"`copies_host` must be left out without `{missing[0]}`, got {host!r}. "
            '`pip install "jax-replicator[grpc]"`.'
        )
    from replicator.rpc.security.certificates import make_member_certificate

    folder.mkdir(mode=0o700)
    make_member_certificate(secret, folder, hosts=[host])
    return _tls(folder)


def _tls(folder: Path) -> Tls:
    return Tls(
        ca=folder / "ca.pem",
        certificate=folder / "member.pem",
        key=folder / "member.key",
    )

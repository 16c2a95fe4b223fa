"""Hand this process's shards to the keeper of its host; restore from those of all.

Where processes have several keepers, which are those of several hosts, each hands its
shards to the next one's, too: a host that is lost takes no copy with it that is not on
another.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from replicator.base.host.clock import Clock
from replicator.checkpoint import reading
from replicator.checkpoint.background import BackgroundSaver
from replicator.checkpoint.copies.held_state import HeldCopy, HeldState
from replicator.checkpoint.copies.keeper import (
    MOST_PIECES,
    VARIABLE,
    copy_name,
    keeper_client,
)
from replicator.checkpoint.group import Group
from replicator.checkpoint.manifest import Manifest, decode, encode
from replicator.checkpoint.snapshot import Block, Draft, Snapshot, plain_json
from replicator.distributed.piece_transfer import (
    PART_BYTES,
    Piece,
    PieceTree,
    as_bytes,
    read_offer,
)
from replicator.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointMismatchError,
    RpcError,
)
from replicator.rpc.client.client import Client
from replicator.rpc.transports.addresses import GrpcAddress, parse_all

_log = logging.getLogger(__name__)


def require_keeper() -> None:
    """Check that this process has a launcher that holds copies for it.

    Raises:
      ArgumentError: It has none.
    """
    if not os.environ.get(VARIABLE):
        raise ArgumentError(
            "`memory_copy_every` must be in a run under `replicator launch`, whose "
            f"memory holds the copies, got none ({VARIABLE} is not set). Start the "
            "script by `replicator launch`, or leave it out."
        )


class MemoryCopies:
    """Copies of a run's last states in the keepers of its processes.

    All processes of the group call the same methods in the same order.

    Args:
      group: The processes that save together.
      run: Name of the run: its directory.
      make_draft: Returns the draft of a snapshot, given `own` of all processes.
      clock: Clock of all times.
      timeout_s: Longest wait for a keeper, or for another process, in seconds.

    Raises:
      ArgumentError: This process has no keeper.
    """

    def __init__(
        self,
        group: Group,
        *,
        run: str,
        make_draft: Callable[[Snapshot, list[Any]], Draft],
        clock: Clock,
        timeout_s: float,
    ) -> None:
        require_keeper()
        self._run = run
        self._group = group
        self._make_draft = make_draft
        self._timeout_s = timeout_s
        self._keeper = keeper_client(os.environ[VARIABLE], timeout_s=timeout_s)
        # By address, those of all hosts; this process hands over to two of them.
        self._keepers = {self._keeper.address: self._keeper}
        self._takers = [self._keeper]
        self._saver = BackgroundSaver(self._hand_over, clock=clock, timeout_s=timeout_s)
        self._restored = -1  # step of the copies that the run went on from
        self._line = ""
        self._generation = 0
        self._fits = False

    @property
    def last_step(self) -> int | None:
        """The last step of which this process has handed over its shards."""
        return self._saver.counts.last_step

    def take_over(self, before: str, line: str, *, generation: int) -> None:
        """Go on with the copies of the owner of the directory before this one.

        Raises:
          ArgumentError: Launchers of other hosts cannot be reached.
        """
        self._line, self._generation = line, generation
        self._keeper.take_over(self._run, before, line)
        # When this returns, the keepers of all know the line.
        addresses = self._group.share("keepers", self._keeper.address)
        # In the order of processes: a launcher that is started again, under another
        # address, is at its place.
        ring = list(dict.fromkeys(addresses))
        if len(ring) > 1:
            _require_reachable(ring)
        for address in ring:
            if address not in self._keepers:
                self._keepers[address] = keeper_client(
                    address, timeout_s=self._timeout_s
                )
        following = ring[(ring.index(self._keeper.address) + 1) % len(ring)]
        if len(ring) > 1:
            self._takers = [self._keeper, self._keepers[following]]

    def save_nowait(self, snapshot: Snapshot) -> bool:
        """Begin to copy a state; return when it may be donated.

        The last copy that all processes have handed over stays until this one is whole.

        Returns:
          Whether it was begun: not while a process is busy with the one before. A copy
          that fails is logged, and training goes on.

        Raises:
          ArgumentError: A launcher has no room for two copies of each of its processes.
        """
        own = plain_json(snapshot.own, "own")
        last = self._restored if self.last_step is None else self.last_step
        mine = {"busy": self._saver.is_busy(), "own": own, "last": last}
        replies = self._group.share("copy", mine)
        if any(reply["busy"] for reply in replies):
            return False
        draft = self._make_draft(snapshot, [reply["own"] for reply in replies])
        num_bytes = sum(block.array.nbytes for block in (*draft.blocks, *draft.small))
        last = min(reply["last"] for reply in replies)
        place = self._line, draft.process, draft.step, num_bytes, last
        missing = None
        try:
            missing = max(taker.begin(*place) for taker in self._takers)
        except RpcError as failure:  # a launcher is gone, and its processes with it
            _log.warning("Step %d is not copied: %s", draft.step, failure)
        if not self._fits:  # asked once: sizes do not change
            if lacks := max(self._group.share("copy-fits", missing or 0)):
                raise ArgumentError(
                    "`memory_copy_every` must have room for two copies of each "
                    f"process's shards, got {lacks} bytes too few in a launcher. Pass "
                    "more by `replicator launch --copy-bytes`, or leave it out."
                )
            self._fits = True
        if missing:  # another run of this launcher has taken it
            _log.warning(
                "Step %d is not copied: a launcher has %d bytes too few.",
                *(draft.step, missing),
            )
        if missing == 0:
            self._saver.start(draft)
        return missing == 0

    def restore(
        self, wanted: reading.Wanted, *, newest: int
    ) -> reading.Restored | None:
        """Read the newest step of which all shards are held.

        Args:
          wanted: What is restored.
          newest: Newest step on the disk; older ones are not read.

        Returns:
          The state; None if no such step is held.

        Raises:
          CheckpointMismatchError: The copies hold another state than `wanted.like`.
        """
        held = [self._keeper.address, self._keeper.held(self._line)]
        found = {
            (process, step): address
            for address, copies in self._group.share("copies", held)
            for process, step in copies
        }
        # What lies on this host is not fetched from another.
        own = {tuple(place): self._keeper.address for place in held[1]}
        steps = {step for _, step in found if step >= newest}
        for step in sorted(steps, reverse=True):
            if any((process, step) not in found for process in self._group.processes):
                continue
            restored = failure = None
            try:
                restored = self._read(step, found | own, wanted)
            except (CheckpointError, CheckpointMismatchError) as error:
                failure = error
            try:
                self._group.require_all("copy-restored", failure)
            except CheckpointError as error:
                _log.error("%s An earlier step is tried.", error)
                continue
            self._restored = step
            return restored
        return None

    def drop(self, *, above: int) -> None:
        """End the copies of the steps above one, which the run has left."""
        self._saver.wait()
        self._group.share("no-copy", None)  # is on its way in any process
        self._keeper.drop(self._line, above)

    def close(self) -> None:
        """Wait for the copy that is on its way, and leave the keeper."""
        self._saver.close()
        for keeper in self._keepers.values():
            keeper.close()

    def _read(
        self, step: int, places: Mapping[tuple, str], wanted: reading.Wanted
    ) -> reading.Restored:
        try:
            copies = [
                self._find(self._keepers[places[process, step]], process, step)
                for process in self._group.processes
            ]
            manifest = decode(copies[0].tree.about["manifest"].encode())
        except (RpcError, ValueError, KeyError) as failure:
            raise CheckpointError(
                f"The copies of step {step} must be what was handed over, got: "
                f"{failure!r}."
            ) from failure
        state = HeldState(manifest, copies)
        return reading.as_restored(manifest, state, wanted, source="memory")

    def _find(self, keeper: Client, process: int, step: int) -> HeldCopy:
        name = copy_name(self._line, process, step)
        tree = read_offer(keeper, name, timeout_s=self._timeout_s)
        return HeldCopy(keeper=keeper, name=name, tree=tree, timeout_s=self._timeout_s)

    def _hand_over(self, draft: Draft) -> None:
        """Runs on the saver's thread."""
        pieces: list[Piece] = []
        batch: list[np.ndarray] = []
        room = PART_BYTES
        for block in _taken_out(draft):
            array = np.asarray(block.array)
            pieces.append(Piece.of(str(block.leaf), array, block.box.start))
            batch.append(np.frombuffer(as_bytes(array), np.uint8))
            room -= array.nbytes
            if room <= 0 or len(batch) == MOST_PIECES:
                self._add(draft, batch)
                batch, room = [], PART_BYTES
        self._add(draft, batch)
        about = {"manifest": self._manifest(draft)} if self._group.is_chief else {}
        tree = PieceTree(about=about, pieces=tuple(pieces))
        for taker in self._takers:
            taker.complete(self._line, draft.process, draft.step, tree.as_json())

    def _add(self, draft: Draft, batch: list[np.ndarray]) -> None:
        for taker in self._takers:
            taker.add(self._line, draft.process, draft.step, batch)

    def _manifest(self, draft: Draft) -> str:
        manifest = Manifest(
            step=draft.step,
            generation=self._generation,
            meta=draft.meta | (draft.late() if draft.late is not None else {}),
            metrics=draft.metrics,
            num_devices=draft.num_devices,
            leaves=draft.leaves,
            stored=draft.plan.leaves,
        )
        return encode(manifest).decode()


def _require_reachable(addresses: Iterable[str]) -> None:
    """Check that the launchers of several hosts can be reached from each other."""
    for address in addresses:
        if not any(isinstance(each, GrpcAddress) for each in parse_all(address)):
            raise ArgumentError(
                "`memory_copy_every` must be in launchers that reach each other, where "
                f"there are several, got one at `{address}` alone. Start each by "
                "`replicator launch --copies-host ITS_HOST`, or leave it out."
            )


def _taken_out(draft: Draft) -> Iterable[Block]:
    """Yield each block of a draft, which no longer holds it: its memory is free."""
    while draft.blocks:
        yield draft.blocks.popleft()
    while draft.small:
        yield draft.small.pop()

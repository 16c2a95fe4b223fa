"""Where slices are: those of an island that is lost go on elsewhere.

An island that is lost stays what it was, for its futures. Its slices move: to a spare
island, to one that is started then, or to others that have devices for them. With each
such move the epoch moves. What was planned for where they were is planned again at its
next call, which waits until they have moved; a plan that was made meanwhile is none.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping

from replicator.base.out_of_memory import readable
from replicator.controller.islands.protocol import Island, IslandPool
from replicator.controller.scheduling.planned import Plan
from replicator.controller.scheduling.submissions import Submissions
from replicator.controller.slices import Slice, Wish, place
from replicator.errors import ArgumentError, IslandLostError


class SliceMoves:
    """Moves slices of islands that are lost, in threads of its own.

    Args:
      pool: The islands.
      slices: Slices that are open, by name.
      lock: Guards these, and where each slice is.
      submissions: Is told of islands.
    """

    def __init__(
        self,
        pool: IslandPool,
        slices: Mapping[str, Slice],
        lock: threading.Lock,
        submissions: Submissions,
    ) -> None:
        self._pool = pool
        self._slices = slices
        self._submissions = submissions
        self._num_spares = len(pool.spares)
        self._moving = threading.Lock()  # one island after the other
        self._changed = threading.Condition(lock)  # guards the following
        # Runs may be sent to these: one that joins is not among them at once.
        self._known = set(pool.islands)
        self._epoch = 0
        self._threads: dict[str, threading.Thread] = {}  # by island that was lost
        self._moved: set[str] = set()  # of these, whose slices have moved
        self._left: dict[str, str] = {}  # slices without an island, and why
        self._is_closed = False
        pool.listen(self.lost)
        for name, island in list(pool.islands.items()):
            if island.why_lost:
                self.lost(name)

    def lost(self, name: str) -> None:
        """Take it that an island is lost; in any thread."""
        with self._changed:
            if self._is_closed or name in self._threads:
                return
            self._submissions.island_lost(name)
            thread = threading.Thread(target=self._move_from, args=(name,), daemon=True)
            self._threads[name] = thread
            thread.start()

    def islands(self) -> list[Island]:
        """Return islands that slices may have; the lock is held.

        Raises:
          ArgumentError: There is none, and none comes.
        """
        while not (found := self._usable()):
            lost = {i.name for i in self._pool.islands.values() if i.why_lost}
            if lost <= self._moved or self._is_closed:
                raise ArgumentError(
                    "`pw.slice` must have an island, got none: all were lost. Start "
                    "others, and another controller."
                )
            self._changed.wait()
        return found

    def plan(
        self, make: Callable[[], Plan], on: Collection[Slice], was: Plan | None = None
    ) -> Plan:
        """Return a plan for where slices are now; wait for those that move.

        Args:
          make: Makes a plan.
          on: All slices of the dataflow.
          was: A plan that was made before.

        Raises:
          IslandLostError: A slice has no island any more.
        """
        while True:
            epoch = self._wait(on)
            if was is not None and was.is_current:
                return was
            try:
                made = make()
            except Exception as error:
                # Of slices that move some are seen here and some there.
                if isinstance(error, IslandLostError) or self._has_moved(epoch):
                    continue
                raise
            with self._changed:
                if epoch == self._epoch:
                    return made

    def close(self) -> None:
        """Move nothing any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._pool.stop()
        for thread in self._threads.values():
            thread.join()

    def _has_moved(self, epoch: int) -> bool:
        with self._changed:
            return epoch != self._epoch

    def _wait(self, on: Collection[Slice]) -> int:
        """Wait until slices are on islands that are there; return the epoch."""
        if not any(map(self._why_lost, on)):
            return self._epoch
        with self._changed:
            while lost := [each for each in on if self._why_lost(each)]:
                for each in lost:
                    if each.name in self._left or self._is_closed:
                        error = IslandLostError(
                            f"a slice must have an island, got {each}, which was lost,"
                            f" {self._why_lost(each)}: "
                            f"{self._left.get(each.name, '`pw` was closed')}. Pass "
                            "`spares`, or start again from what was saved."
                        )
                        error.island = each.island
                        raise error
                self._changed.wait()
            return self._epoch

    def _why_lost(self, each: Slice) -> str:
        return self._pool.islands[each.island].why_lost

    def _usable(self) -> list[Island]:
        usable = self._known.difference(self._pool.spares)
        islands = list(self._pool.islands.values())
        return [each for each in islands if each.name in usable and not each.why_lost]

    def _move_from(self, name: str) -> None:
        with self._moving:
            was_spare = name in self._pool.spares
            if was_spare:
                self._pool.spares.remove(name)
            found = None if was_spare else self._spare() or self._another()
            with self._changed:
                for each in list(self._slices.values()):
                    if each.island == name:
                        self._move(each, found)
                self._moved.add(name)
                self._epoch += 1
                self._changed.notify_all()
            while len(self._pool.spares) < self._num_spares:
                if self._another(as_spare=True) is None:
                    return

    def _spare(self) -> Island | None:
        for name in self._pool.spares:
            spare = self._pool.islands[name]
            if not spare.why_lost:  # else its own thread removes it
                self._pool.spares.remove(name)
                return spare
        return None

    def _another(self, *, as_spare: bool = False) -> Island | None:
        if self._pool.another is None or self._is_closed:
            return None
        try:
            found = self._pool.another()
        except Exception as error:  # calls wait for what this thread does
            if not self._is_closed:
                logging.getLogger(__name__).warning("%s", error)
            return None
        with self._changed:
            self._submissions.island_joined(found.name)
            self._known.add(found.name)
            if as_spare:
                self._pool.spares.append(found.name)
        return found

    def _move(self, each: Slice, found: Island | None) -> None:
        """Move a slice to an island, or to one that has devices for it."""
        was = self._pool.islands[each.island]
        kind = was.devices[each.places[0]].kind
        asked = Wish(
            count=len(each.places),
            axes=each.axes,
            kind=kind,
            island=None,
            memory_bytes=each.memory_bytes,
        )
        slices = list(self._slices.values())
        for islands in ([found] if found else [], self._usable()):
            try:
                island, each.places = place(asked, islands, slices)
            except ArgumentError:
                continue
            each.island = island.name
            return
        free = f", {readable(each.memory_bytes)} free on each"
        self._left[each.name] = (
            f"no other island has {asked.count} devices of kind {kind} for it"
            f"{free if each.memory_bytes else ''}"
        )

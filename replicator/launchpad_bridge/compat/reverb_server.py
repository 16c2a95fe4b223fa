"""`reverb.Server`, `Client` and `Writer`, on replay tables.

An item is a row of its table: all items of one have the same number of timesteps.
"""

import collections
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.compat.courier_client import Client
from replicator.launchpad_bridge.compat.courier_server import Server
from replicator.launchpad_bridge.compat.reverb_words import ReverbTable
from replicator.launchpad_bridge.replay.replay_table import ReplayTable
from replicator.launchpad_bridge.trajectories.table import TableTimeoutError, Taken

_WAIT_S = 5.0  # of a call; then it is made again
_METHODS = ("insert", "update_priorities")


class TableInfo(NamedTuple):
    """What is known of a table; `statistics` are those of `ReplayTable`."""

    name: str
    max_size: int
    current_size: int
    statistics: dict[str, Any]


class SampleInfo(NamedTuple):
    """What is known of a sampled item."""

    key: int
    probability: float
    table_size: int


class ReplaySample(NamedTuple):
    """One timestep of a sampled item, or all: leaves [timesteps, ...]."""

    info: SampleInfo
    data: PyTree


class ReverbServer:
    """Serves tables at a port of this host.

    Attributes:
      port: The port.

    Args:
      tables: Tables, each with a name of its own.
      port: A free one by default.
      checkpointer: None: tables here are kept by `lp.ReplayTable`'s own means.

    Raises:
      ArgumentError: `checkpointer` is given, or two tables have one name.
    """

    def __init__(
        self,
        tables: Sequence[ReverbTable],
        port: int | None = None,
        checkpointer: Any = None,
    ) -> None:
        if checkpointer is not None:
            raise ArgumentError(
                f"`checkpointer` must be None here, got {checkpointer!r}. Use an "
                "`lp.ReplayTable` with a folder of its own."
            )
        made = {table.name: table.make() for table in tables}
        if len(made) < len(tables):
            raise ArgumentError(
                "`tables` must have different names, got "
                f"{[table.name for table in tables]}. Rename one."
            )
        pool_size = ReplayTable.thread_pool_size
        self._server = Server("reverb", port, thread_pool_size=pool_size)
        self.port = self._server.port
        for name, table in made.items():
            for method in _METHODS:
                function = getattr(table, method)
                self._server.Bind(_method_of(name, method), function)
            self._server.Bind(_method_of(name, "take"), _take_of(table))
        self._server.Bind(
            "server_info",
            lambda: {name: table.statistics() for name, table in made.items()},
        )
        self._server.Start()

    def localhost_client(self) -> "ReverbClient":
        """Return a client of it."""
        return ReverbClient(self._server.address)

    def stop(self) -> None:
        """Take no more calls."""
        self._server.Stop()

    def wait(self) -> None:
        """Wait until it has stopped."""
        self._server.Join()


class ReverbClient:
    """Calls a server's tables.

    Args:
      server_address: "localhost:1234".
    """

    def __init__(self, server_address: str) -> None:
        self._client = Client(server_address)
        weakref.finalize(self, self._client.close)  # nobody closes a client of Reverb

    def insert(self, data: PyTree, priorities: Mapping[str, float]) -> None:
        """Insert one timestep as an item of each table of `priorities`."""
        with self.writer(1) as writer:
            writer.append(data)
            for table, priority in priorities.items():
                writer.create_item(table, 1, priority)

    def writer(self, max_sequence_length: int, **unused: Any) -> "ReverbWriter":
        """Return a writer of items of up to so many timesteps."""
        return ReverbWriter(self, max_sequence_length)

    def sample(
        self, table: str, num_samples: int = 1, *, emit_timesteps: bool = True
    ) -> Iterator[list[ReplaySample] | ReplaySample]:
        """Yield sampled items; wait while there are none.

        Args:
          table: Name of the table.
          num_samples: Number of items.
          emit_timesteps: Whether each is a list of its timesteps; else one sample.
        """
        for _ in range(num_samples):
            taken: Taken | None = None
            size = 0
            while taken is None:
                options = {"count": 1, "timeout_s": _WAIT_S}
                taken, size = self.call(table, "take", **options)
            assert taken.keys is not None, "a replay table gives them"
            assert taken.probabilities is not None, "a replay table gives them"
            info = SampleInfo(int(taken.keys[0]), float(taken.probabilities[0]), size)
            item = jax.tree.map(lambda leaf: leaf[0], taken.trajectories)
            if emit_timesteps:
                length = len(jax.tree.leaves(item)[0])
                yield [ReplaySample(info, _at(item, place)) for place in range(length)]
            else:
                yield ReplaySample(info, item)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Sequence[int] | None = None,
    ) -> None:
        """Give items other priorities.

        Raises:
          ArgumentError: `deletes` is given.
        """
        if deletes:
            raise ArgumentError(
                f"`deletes` must be empty here, got {list(deletes)}. Give them the "
                "priority 0, with `selectors.Prioritized`."
            )
        keys = np.array([*(updates or {})], np.int64)
        values = np.array([*(updates or {}).values()], np.float64)
        self.call(table, "update_priorities", keys=keys, values=values)

    def server_info(self, timeout: float | None = None) -> dict[str, TableInfo]:
        """Return what is known of each table, by its name, within `timeout` seconds."""
        timeout_s = 2 * _WAIT_S if timeout is None else timeout
        found = self._client.call("server_info", (), {}, timeout_s=timeout_s)
        return {
            name: TableInfo(name, counts["capacity"], counts["held"], counts)
            for name, counts in found.items()
        }

    def call(self, table: str, method: str, **kwargs: Any) -> Any:
        """Call a method of a table; without a deadline of its own."""
        name = _method_of(table, method)
        return self._client.call(name, (), kwargs, timeout_s=2 * _WAIT_S)


class ReverbWriter:
    """Collects timesteps, and makes items of the last ones.

    Args:
      client: Client of the tables.
      max_sequence_length: Most timesteps of an item.
    """

    def __init__(self, client: ReverbClient, max_sequence_length: int) -> None:
        self._client = client
        self._steps: collections.deque[PyTree] = collections.deque(
            maxlen=max_sequence_length
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, data: PyTree) -> None:
        """Add a timestep."""
        self._steps.append(jax.tree.map(np.asarray, data))

    def create_item(self, table: str, num_timesteps: int, priority: float) -> None:
        """Insert the last timesteps as an item; wait while the limiter says so.

        Raises:
          ArgumentError: There are fewer timesteps.
        """
        if not 1 <= num_timesteps <= len(self._steps):
            raise ArgumentError(
                f"`num_timesteps` must be from 1 to {len(self._steps)}, of those "
                f"appended, got {num_timesteps}. Append more first."
            )
        steps = list(self._steps)[-num_timesteps:]
        item = jax.tree.map(lambda *leaves: np.stack(leaves)[None], *steps)
        options = {"actor": "reverb", "version": 0, "priorities": [float(priority)]}
        while True:
            try:
                self._client.call(table, "insert", trajectories=item, **options)
            except TableTimeoutError:
                continue
            return

    def end_episode(self) -> None:
        """Forget the timesteps so far."""
        self._steps.clear()

    def flush(self) -> None:
        """Do nothing: items are inserted when they are created."""

    def close(self) -> None:
        """Forget the timesteps."""
        self._steps.clear()


def _take_of(table: ReplayTable) -> Callable[..., tuple[Taken | None, int]]:
    """Return a function that draws rows, and returns the table's size beside them."""
    return lambda **options: (table.take(**options), table.statistics()["held"])


def _method_of(table: str, method: str) -> str:
    return f"{method}_{table}"


def _at(item: PyTree, place: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[place], item)

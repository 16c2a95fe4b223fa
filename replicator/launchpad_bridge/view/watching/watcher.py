"""Sample one run repeatedly, from its own process or another of its user.

States are read from the run's journal; counts of calls come from the servers
themselves, through clients that prove, by the secret in the run's folder, that they
belong. So a sample costs the program a reply of each server; without samples it costs
nothing.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from replicator.errors import RpcError
from replicator.launchpad_bridge.view.watching import samples
from replicator.launchpad_bridge.view.watching.found_runs import describe_run
from replicator.launchpad_bridge.view.watching.journal import JournalReader, RunNote
from replicator.rpc.call_statistics import ServerStatistics
from replicator.rpc.client.client import Client, statistics

_CALL_TIMEOUT_S = 1.0
_CALLS_AT_ONCE = 4
_SOCKET = "unix:"


class Watcher:
    """Takes samples of a run. Connects at the first; `rest` disconnects again.

    Attributes:
      graph: Graph of the program.
    """

    def __init__(self, folder: Path) -> None:
        """Read the description of a run's program.

        Args:
          folder: Folder of the run.

        Raises:
          LaunchError: It is not a folder of a run of this user, or the run has ended.
        """
        described = describe_run(folder)
        self.graph = samples.graph_of_description(described)
        self._folder = folder
        self._run_id = described["run_id"]
        self._pid = described["pid"]
        self._journal: JournalReader | None = None
        self._addresses = {
            worker["name"]: [_socket_of(a) for a in worker["addresses"]]
            for worker in described["workers"]
        }
        # Threads of the pool add to it, each its own address, so without a lock:
        # `sample` waits for all of them.
        self._clients: dict[str, Client] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._before: samples.Counts | None = None

    def note(self) -> RunNote:
        """Return the state of the run in its journal; calls no server."""
        if self._journal is None:
            try:
                self._journal = JournalReader(self._folder)
            except FileNotFoundError:
                is_over = not self._folder.exists()
                return RunNote(phase="ended" if is_over else "starting")
        return self._journal.read()

    def sample(self) -> samples.ProgramSample:
        """Return a sample of the program, with rates since the last one."""
        note = self.note()
        now = self._counts(note)
        before, self._before = self._before or now, now
        return samples.ProgramSample(
            program=self.graph.program,
            run_id=self._run_id,
            pid=self._pid,
            at_s=time.time(),
            phase=note.phase,
            failure=note.failure,
            stopped_by=note.stopped_by,
            workers=samples.workers_of(self.graph, note, before, now),
            edges=samples.edges_of(self.graph, before, now),
        )

    def rest(self) -> None:
        """Disconnect until the next sample."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._before = None

    def close(self) -> None:
        """Disconnect for good."""
        self.rest()
        if self._journal is not None:
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _counts(self, note: RunNote) -> samples.Counts:
        """Return the counts of the servers of all workers that run."""
        called = [
            (name, address)
            for name, addresses in self._addresses.items()
            for address in addresses
        ]
        runs = {n for n, worker in note.workers.items() if worker.phase == "running"}
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_CALLS_AT_ONCE, "replicator look")
        replies = self._pool.map(
            self._reply, [address if name in runs else "" for name, address in called]
        )
        servers: dict[str, list[ServerStatistics | None]] = {}
        for (name, _), reply in zip(called, replies, strict=True):
            servers.setdefault(name, []).append(reply)
        return samples.Counts(at_s=time.monotonic(), servers=servers)

    def _reply(self, address: str) -> ServerStatistics | None:
        """Return the statistics of a server; None if it does not reply in time."""
        if not address:
            return None
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = Client(
                address, timeout_s=_CALL_TIMEOUT_S, wait_for_ready=False
            )
        try:
            return statistics(client)
        except (RpcError, OSError):
            return None


def _socket_of(planned: str) -> str:
    """Return the part of an address that other processes of this host reach."""
    parts = [part for part in planned.split(",") if part.startswith(_SOCKET)]
    return parts[0] if parts else ""

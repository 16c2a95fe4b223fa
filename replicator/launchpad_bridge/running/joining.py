"""Join the members of a group, wherever they run, by `initialize`.

Process 0 chooses a port of its host and publishes it, the others wait for it: in the
run's folder where all are on one host, through the launcher's address book where they
may not be. Each start of the group has a port, and a place to publish it, of its own:
no process joins members of an earlier start.
"""

import os
import time
from pathlib import Path

from replicator.distributed.clusters import Cluster, as_environment
from replicator.distributed.initialize import initialize
from replicator.distributed.processes.ports import free_port
from replicator.errors import LaunchError
from replicator.launchpad_bridge.addresses.builders import AddressBook
from replicator.launchpad_bridge.running import node_context
from replicator.rpc.security.secret import FILE_VARIABLE

_MEET_S = 120.0
_LOOK_S = 0.01


def join_group(folder: Path, process: int, processes: int) -> None:
    """Make this worker's process one of its group; returns when all have joined.

    Args:
      folder: Folder of the run.
      process: Number of this process in the group.
      processes: Number of processes in the group.

    Raises:
      LaunchError: Process 0 did not publish its address in time.
      DistributedError: Others did not join in time; names them.
    """
    context = node_context.get_context()
    label = context.worker.partition("/")[0]
    name = f"group-{label}-{context.attempt}"
    book: AddressBook | None = context.address_book
    if book is None:
        coordinator = _meet_here(folder / name, process)
    else:
        planned = f"port:{context.run_id}-{name}"
        if process == 0:
            book.publish(planned, book.listen(planned))
        coordinator = book.find(planned)
    cluster = Cluster(
        kind="replicator",
        coordinator=coordinator,
        num_processes=processes,
        process_id=process,
    )
    # For a function that calls `initialize` itself, and for processes it starts.
    os.environ.update(as_environment(cluster))
    os.environ["REPLICATOR_ATTEMPT"] = str(context.attempt)
    os.environ[FILE_VARIABLE] = str(folder / "secret")
    initialize()


def _meet_here(place: Path, process: int) -> str:
    """Return the address of process 0, on this host; 0 writes it, the others wait."""
    if process == 0:
        draft = place.with_name(f"{place.name}.new")
        draft.write_text(f"127.0.0.1:{free_port()}")
        draft.rename(place)  # whole, or not there
    until_s = time.monotonic() + _MEET_S
    while not place.exists():
        if time.monotonic() >= until_s:
            raise LaunchError(
                f"Process 0 of the group must publish its address within {_MEET_S:g} "
                "s, got none. See its log."
            )
        time.sleep(_LOOK_S)
    return place.read_text()

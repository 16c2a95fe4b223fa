"""One worker on a host of a cluster: its process, its files, the way to its program.

This runs in a process that the cluster engine started for the worker (for Ray an
actor), and it does there what `processes` does here: the node has a process of its own,
in whose main thread it runs, that dies with this one. Reports of the worker are handed
on as bytes, unread: classes of the script are not known here.
"""

import contextlib
import dataclasses
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from replicator.base.host.held_folder import hold_folder
from replicator.distributed.processes.guard import delete
from replicator.errors import LaunchError
from replicator.launchpad_bridge.addresses.address_books import (
    OfferedRegistry,
    RegistryAccess,
)
from replicator.launchpad_bridge.launchers.launcher_environment import (
    LauncherEnvironment,
)
from replicator.launchpad_bridge.launchers.local_resources import ALLOCATION
from replicator.launchpad_bridge.launchers.log_tail import LogTail
from replicator.launchpad_bridge.launchers.piped_worker import PipedProcess
from replicator.launchpad_bridge.launchers.worker_end import ProcessExit
from replicator.launchpad_bridge.launchers.worker_logs import log_paths
from replicator.launchpad_bridge.launchers.worker_process import Job, piped_interpreter
from replicator.launchpad_bridge.run_folder import MADE_BY_WORKER, what_stays
from replicator.rpc.security.private_files import create_private
from replicator.rpc.server.server import Server

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST_PIECES = 256  # of a pipe, 64 KiB each


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Task of a worker on another host, in plain values.

    Attributes:
      job: The job, without values that depend on the host.
      run_id: Id of the run.
      folder: Folder of the run; made with `files` where it is not there.
      files: Files in the folder, by name: the secret, certificates.
      logs: Folder for output.
      recipe: The pickled function, from the launcher of this very program.
      environment: Variables of the worker's group.
      gpus: As in `Resources`.
      surroundings: Environment of the launcher.
      has_book: Whether servers may be on other hosts.
    """

    job: Job
    run_id: str
    folder: str
    files: Mapping[str, bytes] = dataclasses.field(repr=False)  # the secret
    logs: str
    recipe: bytes = dataclasses.field(repr=False)
    environment: Mapping[str, str] = dataclasses.field(repr=False)  # keys of users
    gpus: int | None
    surroundings: LauncherEnvironment
    has_book: bool


class RemoteWorker:
    """A worker's process on this host, and all that it needs here.

    Args:
      task: Task of the worker.
      registry: Access to the program's addresses; None if all is on one host.
      host: Address at which other hosts reach this one.
    """

    def __init__(self, task: Task, registry: RegistryAccess | None, host: str) -> None:
        self._task = task
        self._host = host
        run_folder = _run_folder(task)
        # Held until `close`, so that the system does not remove its old files. The lock
        # goes with this process, however that ends.
        self._held = hold_folder(run_folder)
        name, attempt = task.job.worker, task.job.attempt
        # This start's alone. Where the actor is killed it stays until the guard of the
        # worker, which deletes its `folder` if its launcher is gone, has swept.
        self._own = run_folder / f"w-{os.getpid()}-{attempt}"
        self._own.mkdir(mode=0o700)
        self._log = log_paths(Path(task.logs), [name])[name]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        recipe = self._own / "recipe"
        _write(recipe, task.recipe)
        self._server = None
        if registry is not None:
            # Lets the worker's process ask for addresses through this one: it has no
            # connection to Ray. `close` stops it; its threads die with this process.
            at = f"unix:{self._own}/registry"
            served = OfferedRegistry(registry)
            server = Server(served, name="addresses", address=at, pool_size=16)
            self._server = server.start()
        self._tail = LogTail({name: self._log})
        self._tail.start()
        job = self._job(recipe)
        self._process = PipedProcess(
            piped_interpreter(job, task.surroundings, sorted(task.environment)),
            name=name,
            attempt=attempt,
            log=self._log,
            owner=task.run_id,
            environ={**_environment(task), **job.environment},
            folder=self._own,
        )

    def read(self) -> bytes:
        """Wait for bytes of its reports; return none once there are no more."""
        pieces = [self._process.read()]
        # A call of Ray costs as much as many reads: what is there already goes along.
        while pieces[-1] and len(pieces) < _MOST_PIECES and self._process.has_more():
            pieces.append(self._process.read())
        return b"".join(pieces)

    def stop(self) -> None:
        """Ask the worker to stop."""
        self._process.stop()

    def kill(self) -> None:
        """End it and all that it started."""
        self._process.kill()

    def wait(self, log_end: int | None) -> ProcessExit:
        """Wait until it has exited; return how."""
        end = self._process.wait(log_end)
        return dataclasses.replace(end, log=f"{socket.gethostname()}:{self._log}")

    def close(self) -> None:
        """Kill what still runs, and leave nothing on this host but the log."""
        # Other calls of this actor may be in `read` or `wait`: they return when the
        # process has ended.
        self._process.kill()
        self._process.close()
        # After the process: the last look shows all that it has written.
        self._tail.close()
        if self._server is not None:
            self._server.stop(0.0)
        shutil.rmtree(self._own, ignore_errors=True)
        os.close(self._held)
        run_folder = self._own.parent
        # Of several workers on a host, the last that leaves deletes what they share;
        # on the launcher's own host the launcher does.
        if (run_folder / MADE_BY_WORKER).exists() and not list(run_folder.glob("w-*")):
            delete(run_folder, keep=what_stays(run_folder, self._log.parent))

    def _job(self, recipe: Path) -> Job:
        book = {
            "registry": f"unix:{self._own}/registry",
            "folder": str(self._own.parent),
            "host": self._host,
        }
        return dataclasses.replace(
            self._task.job,
            recipe=str(recipe),
            environment={"JAX_PLATFORMS": "cpu"} if self._task.gpus == 0 else {},
            book=book if self._task.has_book else None,
        )


def _environment(task: Task) -> dict[str, str]:
    environment = {**ALLOCATION, **os.environ, **task.environment}
    if task.gpus is None and environment.get(_VISIBLE) == "":
        del environment[_VISIBLE]  # no claim: all are visible, as elsewhere
    return environment


def _run_folder(task: Task) -> Path:
    """Return the run's folder, which is there on the launcher's own host."""
    folder = Path(task.folder)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise LaunchError(
                f"The run's folder must belong to this user alone, got {folder} of "
                f"another, on {socket.gethostname()}. Launch again."
            ) from None
    else:
        _write(folder / MADE_BY_WORKER, b"")
    # Several workers may come to a host at once: each writes what is not there yet.
    for name, content in task.files.items():
        (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            _write(folder / name, content)
    return folder


def _write(path: Path, content: bytes) -> None:
    """Write a private file, whole once it is there."""
    # Another worker must not read half a secret: the name appears with the whole file.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(create_private(draft), "wb") as file:
        file.write(content)
    try:
        # Fails where the file is there already; a rename would replace it.
        os.link(draft, path)
    finally:
        draft.unlink()

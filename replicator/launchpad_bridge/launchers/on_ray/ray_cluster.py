"""Run each worker as an actor of Ray: on this machine, or anywhere in a cluster.

    launcher ── an actor for each worker, with its resources ── the worker's process
        └─────── a named actor, where servers on several hosts tell their addresses

An actor starts the worker's process on its host (`remote_worker`), hands on what it
says and dies with the program: it is not detached. Calls between nodes do not go
through Ray, they are `rpc`: over Unix sockets on one host, gRPC with TLS between hosts.

Ray runs what anybody who reaches it sends. So its token authentication is on
(`RAY_AUTH_MODE=token`), and a Ray that is started here listens to this host only.
"""

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.actor
import ray.exceptions

from replicator.errors import NodeFailedError
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.addresses.address_books import (
    AddressRegistry,
    Book,
)
from replicator.launchpad_bridge.launchers import worker_end
from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.on_ray import ray_session
from replicator.launchpad_bridge.launchers.on_ray.ray_words import how_actor_was_lost
from replicator.launchpad_bridge.launchers.on_ray.remote_worker import (
    Event,
    RemoteWorker,
    Task,
)
from replicator.launchpad_bridge.launchers.worker_process import Job
from replicator.launchpad_bridge.launchers.worker_reports import Frame
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Plan,
    StopAsked,
    Worker,
)

_LOG = logging.getLogger(__name__)
_POLL_S = 5.0
_CLOSE_S = 15.0
_CALLS_AT_ONCE = 8
_ASK_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
    """The launcher `ray`.

    Attributes:
      address: Of a cluster; by default a Ray that this process is connected to, or that
        `RAY_ADDRESS` names, or one of this machine's own, started for the run.
      init: Further arguments of `ray.init`.
      across_hosts: Whether nodes may be on several hosts; by default, whether the
        cluster has several.
      start_timeout_s: How long a worker may wait for a host with room for it.
      insecure: Whether a cluster without token authentication will do.
    """

    address: str | None = None
    init: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    across_hosts: bool | None = None
    start_timeout_s: float = 120.0
    insecure: bool = False

    @property
    def name(self) -> str:
        """Return "ray"."""
        return "ray"

    @property
    def shows_output(self) -> bool:
        """Return True: Ray shows what workers print."""
        return True

    def open(
        self, plan: Plan, report: Callable[[Exited | StopAsked], None]
    ) -> "RayWorkers":
        """Make ready to start workers of `plan`.

        Raises:
          LaunchError: There is no such cluster, it is not safe, or a group needs more
            than any of its hosts has.
        """
        session = ray_session.connect(self.address, self.init, insecure=self.insecure)
        try:
            ray_session.check_resources(plan.executables)
            return RayWorkers(self, plan, report, session)
        except BaseException:
            session.close()
            raise


@dataclasses.dataclass(eq=False)
class _RayWorker:
    """One start of a worker; the launcher's side of it.

    Attributes:
      executable: What it runs.
      attempt: Which start.
      actor: Its handle.
      start_until_s: When it has to have started; None once it has.
      is_killed: Whether it was told to die.
    """

    executable: Executable
    attempt: int
    actor: Any
    start_until_s: float | None
    is_killed: bool = False

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        self.actor.stop.remote()

    def kill(self) -> None:
        """End it and all that it started; returns at once."""
        self.is_killed = True
        if self.start_until_s is None:
            self.actor.kill.remote()
        else:  # nobody is there to obey
            ray.kill(self.actor)


class RayWorkers:
    """The actors of one run.

    Attributes:
      address_book: For the launching script; None where all is on this host.
    """

    def __init__(
        self,
        options: Ray,
        plan: Plan,
        report: Callable[[Exited | StopAsked], None],
        session: ray_session.Session,
    ) -> None:
        self._options = options
        self._plan = plan
        self._report = report
        self._session = session
        self._namespace = f"replicator-{plan.run_id}"
        self._surroundings = read_surroundings()
        self._recipes: dict[str, bytes] = {}
        # The driver's thread adds, `_watch` takes out: whoever walks it walks a copy.
        self._live: set[_RayWorker] = set()
        self._leaving: list[Any] = []
        # From Ray's threads, which may not wait, to `_watch`; None ends that.
        self._heard: queue.SimpleQueue[tuple[_RayWorker, Any] | None]
        self._heard = queue.SimpleQueue()
        plan.logs.mkdir(parents=True, exist_ok=True)
        hosts = ray_session.hosts()
        wanted = options.across_hosts
        self._is_wide = hosts != {session.host} if wanted is None else wanted
        # Where all is on this host they lie in the run's folder, and in no store.
        self._files: dict[str, bytes] = {}
        self._registry: Any = None
        self.address_book: Book | None = None
        if self._is_wide:
            self._files["secret"] = (plan.folder / "secret").read_bytes()
            self._files |= _certificates(plan.folder / "tls", hosts)
            actor = ray.remote(AddressRegistry)
            self._registry = actor.options(
                name="addresses",
                namespace=self._namespace,
                num_cpus=0,
                max_concurrency=1000,
            ).remote()
            self.address_book = Book(
                _RegistryActor(self._registry), folder=plan.folder, host=session.host
            )
        self._thread = threading.Thread(
            target=self._watch, name="ray watch", daemon=True
        )
        self._thread.start()

    def start(self, executable: Executable, attempt: int) -> Worker:
        """Start one; returns when it is on its way. Its end is reported once.

        Raises:
          LaunchError: Its recipe does not pickle.
        """
        resources = executable.resources
        actor = ray.remote(_WorkerActor).options(
            name=f"{executable.name}#{attempt}",
            namespace=self._namespace,
            num_cpus=resources.cpus or 0,
            num_gpus=resources.gpus or 0,
            memory=resources.memory_bytes,
            max_concurrency=_CALLS_AT_ONCE,
        )
        task = Task(
            job=Job(
                program=self._plan.program,
                worker=executable.name,
                launch_type="ray",
                recipe="",
                attempt=attempt,
            ),
            run_id=self._plan.run_id,
            folder=str(self._plan.folder),
            files=self._files,
            logs=str(self._plan.logs),
            recipe=self._recipe(executable),
            environment=dict(resources.env),
            gpus=resources.gpus,
            surroundings=self._surroundings,
            has_book=self._is_wide,
        )
        worker = _RayWorker(
            executable=executable,
            attempt=attempt,
            actor=actor.remote(task, self._registry),
            start_until_s=time.monotonic() + self._options.start_timeout_s,
        )
        self._live.add(worker)
        self._listen(worker)
        return worker

    def close(self) -> None:
        """Leave nothing behind: kills what still runs, deletes what was made."""
        self._heard.put(None)
        self._thread.join(_CLOSE_S)
        live = list(self._live)
        leaving = [w.actor.leave.remote() for w in live if w.start_until_s is None]
        leaving += self._leaving
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=_CLOSE_S)
        for worker in live:
            ray.kill(worker.actor)
            self._end(worker, "was killed at the end of the run")
        if self._registry is not None:
            ray.kill(self._registry)
        self._session.close()

    def _recipe(self, executable: Executable) -> bytes:
        if executable.name not in self._recipes:
            self._recipes[executable.name] = recipes.pack(executable)
        return self._recipes[executable.name]

    def _listen(self, worker: _RayWorker) -> None:
        """Have what happens next to a worker put into the queue."""
        future = worker.actor.next_event.remote(_POLL_S).future()
        # Ray calls back in a thread of its own, where nothing may wait.
        future.add_done_callback(lambda done: self._heard.put((worker, done)))

    def _watch(self) -> None:
        while True:
            try:
                heard = self._heard.get(timeout=self._left_s())
            except queue.Empty:
                self._give_up_late()
                continue
            if heard is None:
                return
            worker, done = heard
            try:
                self._hear(worker, done)
            except Exception as error:
                _LOG.exception("`%s` is lost", worker.executable.name)
                self._end(worker, f"is lost: {error}")

    def _left_s(self) -> float:
        now_s = time.monotonic()
        # Not for ever: workers are added, with dues of their own, while this waits.
        dues = [w.start_until_s for w in list(self._live) if w.start_until_s]
        return max(0.0, min([*dues, _POLL_S + now_s]) - now_s)

    def _hear(self, worker: _RayWorker, done: Any) -> None:
        if worker not in self._live:
            return
        try:
            event: Event | None = done.result()
        except ray.exceptions.RayError as error:
            self._end(worker, _how_lost(worker, error))
            return
        worker.start_until_s = None
        if event is not None and "ended" in event:
            self._live.discard(worker)
            self._report(_exited(worker, event))
            # Its host is rid of all but the log.
            self._leaving.append(worker.actor.leave.remote())
            return
        if event is not None and "asked" in event:
            by = worker.executable.name
            self._report(StopAsked(by=by, of=event["asked"]))
        self._listen(worker)

    def _give_up_late(self) -> None:
        for worker in list(self._live):
            due_s = worker.start_until_s
            if due_s is not None and time.monotonic() >= due_s:
                ray.kill(worker.actor)
                limit_s = self._options.start_timeout_s
                wanted = ray_session.wanted(worker.executable.resources)
                self._end(
                    worker,
                    f"found no room in the cluster within {limit_s:g} s: it needs "
                    f"{wanted or 'a process'}",
                )

    def _end(self, worker: _RayWorker, text: str) -> None:
        """Report the end of a worker of which only that much is known."""
        if worker not in self._live:
            return
        self._live.discard(worker)
        name = worker.executable.name
        error = NodeFailedError(f"`{name}` {text}", node=name)
        self._report(
            Exited(name=name, attempt=worker.attempt, outcome="died", error=error)
        )


class _WorkerActor:
    """The actor of one worker."""

    def __init__(self, task: Task, registry: Any) -> None:
        known = None if registry is None else _RegistryActor(registry)
        self._worker = RemoteWorker(task, known, ray_session.own_host())
        self._is_new = True

    def next_event(self, timeout_s: float) -> Event | None:
        if self._is_new:  # so that the launcher knows that this actor has started
            self._is_new = False
            return None
        return self._worker.next_event(timeout_s)

    def stop(self) -> None:
        self._worker.stop()

    def kill(self) -> None:
        self._worker.kill()

    def leave(self) -> None:
        self._worker.close()
        ray.actor.exit_actor()


class _RegistryActor:
    """The registry, asked through Ray."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def publish(self, planned: str, address: str) -> None:
        ray.get(self._actor.publish.remote(planned, address), timeout=_ASK_S)

    def find(self, planned: str, timeout_s: float) -> str | None:
        asked = self._actor.find.remote(planned, timeout_s)
        return ray.get(asked, timeout=timeout_s + _ASK_S)


def _certificates(folder: Path, hosts: set[str]) -> dict[str, bytes]:
    """Make the program's certificates; return the files, by path below the run's."""
    # Needs the extra `grpc`, as all else between hosts does.
    from replicator.rpc.security.certificates import LOOPBACK_HOSTS, make_certificates

    make_certificates(folder, hosts=sorted({*hosts, *LOOPBACK_HOSTS}))
    return {f"tls/{path.name}": path.read_bytes() for path in folder.iterdir()}


def _exited(worker: _RayWorker, event: Event) -> Exited:
    said = event["said"]
    return worker_end.exited(
        worker.executable.name,
        worker.attempt,
        said=None if said is None else Frame(*said),
        heard=event["heard"],
        lines=event["lines"],
        log=event["log"],
    )


def _how_lost(worker: _RayWorker, error: Exception) -> str:
    if worker.is_killed:
        return "was killed by its launcher"
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"could not be started on its host: {error.cause}"
    return how_actor_was_lost(str(error))

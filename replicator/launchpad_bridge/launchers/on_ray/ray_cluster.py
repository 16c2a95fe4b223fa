"""Run each worker as an actor of Ray: on this machine, or anywhere in a cluster.

    launcher ── an actor for each worker, with its resources ── the worker's process
        └─────── a named actor, where servers on several hosts publish their addresses

An actor starts the worker's process on its host (`remote_worker`), hands on its reports
and dies with the program: it is not detached. Calls between nodes do not go through
Ray, they are `rpc`: over Unix sockets on one host, gRPC with TLS between hosts.

Ray runs what anybody who reaches it sends. So its token authentication is on
(`RAY_AUTH_MODE=token`), and a Ray that is started here listens to this host only.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.actor
import ray.exceptions

from replicator.distributed.processes.driver import Worker
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.addresses.address_books import (
    AddressRegistry,
    Book,
)
from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.on_ray import ray_session
from replicator.launchpad_bridge.launchers.on_ray.lost_actor import how_actor_was_lost
from replicator.launchpad_bridge.launchers.on_ray.remote_worker import (
    RemoteWorker,
    Task,
)
from replicator.launchpad_bridge.launchers.worker_end import ProcessExit
from replicator.launchpad_bridge.launchers.worker_handle import WorkerHandle
from replicator.launchpad_bridge.launchers.worker_process import Job
from replicator.launchpad_bridge.protocols import Executable, Plan, Report, Resources

_CLOSE_S = 15.0
_CALLS_AT_ONCE = 8
_ASK_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
    """The launcher `ray`.

    Attributes:
      address: Address of a cluster; by default a Ray that this process is connected
        to, or that `RAY_ADDRESS` names, or one of this machine's own, started for the
        run.
      init: Further arguments of `ray.init`.
      across_hosts: Whether nodes may be on several hosts; by default, whether the
        cluster has several.
      start_timeout_s: Seconds that a worker may wait for a host with room for it.
      insecure: Whether a cluster without token authentication will do.
    """

    name = "ray"
    shows_output = True

    address: str | None = None
    init: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    across_hosts: bool | None = None
    start_timeout_s: float = 120.0
    insecure: bool = False

    def open(self, plan: Plan, report: Report) -> "RayWorkers":
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


class _RayProcess:
    """A `StartedProcess` below an actor of Ray.

    Args:
      actor: Handle of the actor, which may still wait for a host.
      resources: Resources of the worker.
      start_timeout_s: Seconds that it may wait.
    """

    def __init__(
        self, actor: Any, resources: Resources, start_timeout_s: float
    ) -> None:
        self.actor = actor
        self._resources = resources
        self._start_timeout_s = start_timeout_s
        # The thread of the worker's handle writes all but `_is_killed`, the driver's
        # thread writes that. No lock: each is set once, and a thread that reads the
        # value of a moment ago does what was right then.
        self._has_started = False
        self._is_killed = False
        self._lost = ""  # why the actor cannot be asked any more
        self.leaving: Any = None

    def read(self) -> bytes:
        """Wait for bytes of its reports; return none once there are no more."""
        if not self._has_started:
            # Ray has no event for it: a call returns once the actor has a host.
            limit_s = self._start_timeout_s
            self._has_started = bool(self._call("is_here", timeout_s=limit_s))
        return b"" if self._lost else self._call("read") or b""

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        # An actor that has no host yet gets the call when it has one.
        self.actor.stop.remote()

    def kill(self) -> None:
        """End it and all that it started; returns at once."""
        self._is_killed = True
        if self._has_started:
            self.actor.kill.remote()
        else:  # it cannot obey yet; `_call` then raises, and reads `_is_killed`
            ray.kill(self.actor)

    def wait(self, log_end: int | None) -> ProcessExit:
        """Wait until it has exited; return how."""
        end = None if self._lost else self._call("wait", log_end)
        return end or ProcessExit(reason=self._lost)

    def close(self) -> None:
        """Have the actor remove everything but the log from its host, and end."""
        if self._has_started and self.leaving is None:
            self.leaving = self.actor.leave.remote()

    def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Wait for a method of the actor; note why it is lost, if it is."""
        try:
            return ray.get(getattr(self.actor, method).remote(*args), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            # It would still start as soon as there is room.
            ray.kill(self.actor)
            self._lost = (
                f"found no room in the cluster within {timeout_s:g} s: it needs "
                f"{ray_session.wanted(self._resources) or 'a process'}"
            )
        except Exception as error:
            # Raised when its process or its host is gone, and in a call that waits when
            # the actor is killed. All end up here: the handle reports the reason.
            self._lost = _how_lost(error, is_killed=self._is_killed)
        return None


class RayWorkers:
    """The actors of one run.

    Attributes:
      address_book: For the launching script; None where all is on this host.
    """

    def __init__(
        self,
        options: Ray,
        plan: Plan,
        report: Report,
        session: ray_session.RayConnection,
    ) -> None:
        self._options = options
        self._plan = plan
        self._report = report
        self._session = session
        self._namespace = f"replicator-{plan.run_id}"
        self._surroundings = read_surroundings()
        self._recipes: dict[str, bytes] = {}
        # The driver's thread alone starts and closes workers. Each handle has a thread
        # that waits in calls of its actor, and ends with it.
        self._started: list[tuple[_RayProcess, WorkerHandle]] = []
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
                # Each node that waits for an address holds one call.
                max_concurrency=1000,
            ).remote()
            self.address_book = Book(
                _RegistryActor(self._registry), folder=plan.folder, host=session.host
            )

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
            # `read` waits in one thread of the actor while the others take calls.
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
        process = _RayProcess(
            actor.remote(task, self._registry), resources, self._options.start_timeout_s
        )
        handle = WorkerHandle(executable.name, attempt, process, self._report)
        self._started.append((process, handle))
        return handle

    def close(self) -> None:
        """Leave nothing behind: kills what still runs, deletes what was made."""
        # All at once, as each actor sweeps its host for a while.
        for process, _ in self._started:
            process.close()
        leaving = [each.leaving for each, _ in self._started if each.leaving]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=_CLOSE_S)
        for process, handle in self._started:
            # Also those that did not leave in time, or wait for a host: then the calls
            # of their handles raise, and the threads of these end.
            ray.kill(process.actor)
            # Before the connection is closed, which none of them may be using then.
            handle.close()
        if self._registry is not None:
            ray.kill(self._registry)
        self._session.close()

    def _recipe(self, executable: Executable) -> bytes:
        if executable.name not in self._recipes:
            self._recipes[executable.name] = recipes.pack(executable)
        return self._recipes[executable.name]


class _WorkerActor(RemoteWorker):
    """The actor of one worker."""

    def __init__(self, task: Task, registry: Any) -> None:
        known = None if registry is None else _RegistryActor(registry)
        super().__init__(task, known, ray_session.own_host())

    def is_here(self) -> bool:
        return True

    def leave(self) -> None:
        self.close()
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


def _how_lost(error: Exception, *, is_killed: bool) -> str:
    if is_killed:
        return "was killed by its launcher"
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"could not be started on its host: {error.cause}"
    if isinstance(error, ray.exceptions.RayError):
        return how_actor_was_lost(str(error))
    return f"is lost: {error}"

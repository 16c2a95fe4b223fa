"""Be connected to Ray, safely: to a cluster that is there, or to one started here."""

import contextlib
import dataclasses
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from replicator.errors import LaunchError
from replicator.launchpad_bridge.launchers.on_ray.local_ray import (
    CLUSTERS,
    OF_HEAD,
    LocalRay,
)
from replicator.launchpad_bridge.protocols import Executable, Resources

_LOG = logging.getLogger(__name__)
_MODE = "RAY_AUTH_MODE"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RayConnection:
    """A connection to Ray.

    Attributes:
      host: This host, as Ray calls it.
      is_ours: Whether it was made here, and is to be closed.
      head: The Ray that was started here; None for another's.
    """

    host: str
    is_ours: bool
    head: "LocalRay | None" = None

    def close(self) -> None:
        """Disconnect, and end a Ray that was started here; another's stays."""
        # The driver's thread closes it last: no handle of a worker waits in Ray then.
        if self.is_ours:
            ray.shutdown()
        if self.head is not None:
            self.head.close()


def connect(
    address: str | None, init: Mapping[str, Any], *, insecure: bool
) -> RayConnection:
    """Connect to a cluster, or start one that only this host can reach.

    Args:
      address: Address of the cluster; None for the one that there is, if any.
      init: Further arguments of `ray.init`.
      insecure: Whether a cluster without token authentication will do.

    Raises:
      LaunchError: There is none, or it is not safe.
    """
    # Of no use here: signals are the run's, and it runs in a thread.
    logging.getLogger("ray._private.worker").addFilter(_is_news)
    address = address or os.environ.get("RAY_ADDRESS")
    is_ours = not ray.is_initialized()
    head = None
    try:
        if is_ours and address is None:
            head, init = _start(init)
            address = head.address
        if is_ours:
            with _loopback(head is not None):
                ray.init(
                    **{"address": address, "logging_level": logging.WARNING, **init}
                )
    except Exception as error:
        if head is not None:
            head.close()
        where = f"at {address}" if address else "on this host"
        raise LaunchError(f"No Ray {where} can be used: {error}") from error
    session = RayConnection(host=own_host(), is_ours=is_ours, head=head)
    if not insecure and not _is_safe():
        session.close()
        raise LaunchError(
            "A Ray cluster must have token authentication, got one without: whoever "
            f"reaches it runs code on it. Set {_MODE}=token for it and for this "
            "script, or pass `Ray(insecure=True)` on a network of your own."
        )
    return session


def own_host() -> str:
    """Return the address by which Ray knows the host of this process."""
    node = ray.get_runtime_context().get_node_id()
    return next(
        each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node
    )


def hosts() -> set[str]:
    """Return the hosts of the cluster, by address."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def wanted(resources: Resources) -> dict[str, float]:
    """Return the claims of a worker, by Ray's names."""
    claims = {
        "CPU": resources.cpus,
        "GPU": resources.gpus,
        "memory": resources.memory_bytes,
    }
    return {name: claim for name, claim in claims.items() if claim}


def check_resources(executables: Sequence[Executable]) -> None:
    """Refuse a worker that no host of the cluster could ever take.

    Raises:
      LaunchError: There is one.
    """
    there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for executable in executables:
        claims = wanted(executable.resources)
        if not any(_holds(host, claims) for host in there):
            largest = {name: max(h.get(name, 0) for h in there) for name in claims}
            raise LaunchError(
                f"`resources` of `{executable.label}` must fit on a host of the "
                f"cluster, got {claims} where the largest has {largest}. Ask for less."
            )


def _holds(host: Mapping[str, float], claims: Mapping[str, float]) -> bool:
    return all(host.get(name, 0) >= claim for name, claim in claims.items())


def _start(init: Mapping[str, Any]) -> tuple[LocalRay, Mapping[str, Any]]:
    """Start a Ray; return it, and what is left of the arguments for its drivers."""
    _ask_for_tokens()
    _make_token()
    of_head = {name: value for name, value in init.items() if name in OF_HEAD}
    return LocalRay(of_head), {k: v for k, v in init.items() if k not in OF_HEAD}


@contextlib.contextmanager
def _loopback(is_wanted: bool) -> Iterator[None]:
    """Have Ray reach a loopback address as such, and listen at it; see `local_ray`."""
    # A global of Ray. Programs that connect at the same moment from two threads are not
    # guarded against: Ray's own `init` is not, either.
    before = getattr(ray_constants, CLUSTERS, True)
    setattr(ray_constants, CLUSTERS, before and not is_wanted)
    try:
        yield
    finally:
        setattr(ray_constants, CLUSTERS, before)


def _ask_for_tokens() -> None:
    """Have a Ray that is started here ask for a token; before 2.60 it does not."""
    if os.environ.get(_MODE):
        return
    os.environ[_MODE] = "token"
    # Ray has read the environment when it was imported.
    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]


def _make_token() -> None:
    """Make the token of a Ray that is started here one that only this user can read.

    Ray 2.60 makes it readable for all.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    path = Path.home() / ".ray" / "auth_token"
    # Made here before Ray makes it, by whichever launcher is first.
    path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        status = path.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o600)
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def _is_news(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def _is_safe() -> bool:
    """Return whether tokens are asked for: then Ray has this process show one."""
    return os.environ.get(_MODE, "").lower() == "token"

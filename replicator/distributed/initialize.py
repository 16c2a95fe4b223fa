"""Join this process to its group: find the others, meet them, start JAX together."""

import logging
import os
import time

import jax

from replicator.base.tracebacks import short_traceback
from replicator.distributed.clusters import (
    Cluster,
    check_address,
    join_address,
    split_address,
)
from replicator.distributed.coordination import (
    backend_has_started,
    coordination_client,
    process_count,
    process_index,
)
from replicator.distributed.hosts import note_hosts
from replicator.distributed.jax_group import accept_jax_group, configure_cpu
from replicator.distributed.launchers.detection import detect
from replicator.distributed.launchers.ray_train import with_ray_train
from replicator.distributed.launchers.tpu_metadata import with_tpu_metadata
from replicator.distributed.leaving import leave_at_once_after_an_exception
from replicator.distributed.meeting.client import resolve, wait_for_all
from replicator.distributed.meeting.coordinator_tls import (
    coordinator_tls,
    has_certificate,
)
from replicator.distributed.meeting.run_secret import find_secret
from replicator.errors import ArgumentError, TooLateError, check_count, check_positive

BIND_VARIABLE = "REPLICATOR_COORDINATOR_BIND"

_log = logging.getLogger(__name__)

_joined: Cluster | None = None


@short_traceback
def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: float = 300.0,
    heartbeat_s: int = 100,
    insecure: bool = False,
) -> Cluster | None:
    """Join the other processes of this run; all of them must call it.

    Call it first, before JAX starts. Without arguments the group is found in the
    environment, as one of the launchers of `docs/guides/clusters.md` describes it; if
    none does, or there is only one process, nothing happens. Variables that count
    several processes and do not number this one are refused. A group that JAX's own
    `initialize` made is accepted, and so is a second call for the same group.

    If `REPLICATOR_RPC_SECRET_FILE` names a secret, all processes prove to each other
    that they know it, here and, from jax 0.12 on, to JAX's coordination service (with
    `jax-replicator[grpc]`, which makes its certificates). Without one, whoever reaches
    the coordinator can join: beyond this host that is logged as a warning, and
    `REPLICATOR_REQUIRE_SECRET=1` refuses it. Process 0 listens on the address of
    `coordinator`, or on that of `REPLICATOR_COORDINATOR_BIND`, never on all interfaces.

    Args:
      coordinator: `host:port` that process 0 listens on and all others reach. Given
        alone it is used with the numbers in the environment.
      num_processes: Number of processes in the group.
      process_id: Number of this one, from 0. Given together, with `coordinator`.
      timeout_s: Longest wait for the others.
      heartbeat_s: Seconds of silence after which a process counts as dead; all others
        then abort.
      insecure: Whether a group of several hosts may go on if this process cannot make
        certificates.

    Returns:
      The group, with the number of this process; None if there is no other process.

    Raises:
      ArgumentError: An argument or a variable breaks its rule.
      TooLateError: JAX has started, or this process is in another group already.
      DistributedTimeoutError: Processes are missing after `timeout_s`; names them.
      DistributedError: The processes do not fit each other, or process 0 cannot listen.
      AuthenticationError: The secret cannot be read, is another one than process 0's,
        or is missing where it is required.

    >>> initialize("10.0.0.1:8482", 4, process_id=2)          # doctest: +SKIP
    """
    global _joined
    check_count("heartbeat_s", heartbeat_s)
    check_positive("timeout_s", timeout_s, "Use 300.")
    given = (coordinator, num_processes, process_id)
    if coordination_client() is not None:
        group = _joined or accept_jax_group()
        return group if given == (None, None, None) else _check_same(_find(*given))
    cluster = _find(*given, timeout_s=timeout_s)
    if cluster is None or cluster.num_processes == 1:
        return None
    if backend_has_started():
        raise TooLateError(
            "`initialize` must be called before JAX starts, got a process that already "
            "uses devices. Call it before the first array or `jax.devices()`."
        )
    _join(cluster, timeout_s, heartbeat_s, insecure=insecure)
    _joined = cluster
    return cluster


def _find(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout_s: float = 300.0,
) -> Cluster | None:
    if num_processes is None and process_id is None:
        environ = with_ray_train(with_tpu_metadata(os.environ), timeout_s=timeout_s)
        cluster = detect(environ, coordinator=coordinator)
        if cluster is not None or coordinator is None:
            return cluster
    if coordinator is None or num_processes is None or process_id is None:
        given = (coordinator, num_processes, process_id)
        raise ArgumentError(
            "`coordinator`, `num_processes` and `process_id` must be given together, "
            f"got {given}. Give all three, or those that the environment does not name."
        )
    return Cluster(
        kind="arguments",
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
    )


def _check_same(cluster: Cluster | None) -> Cluster | None:
    """Accept a second call for the same group, also if JAX's own call made it."""
    if cluster is None:
        return _joined
    same = (cluster.num_processes, cluster.process_id) == (
        process_count(),
        process_index(),
    )
    if same and (_joined is None or _joined.coordinator == cluster.coordinator):
        return cluster
    raise TooLateError(
        f"`initialize` must join one group only, got process {cluster.process_id} of "
        f"{cluster.num_processes} at {cluster.coordinator} in what is process "
        f"{process_index()} of {process_count()} already. Call it once."
    )


def _join(
    cluster: Cluster, timeout_s: float, heartbeat_s: int, *, insecure: bool
) -> None:
    bind_host = os.environ.get(BIND_VARIABLE) or cluster.host
    bind_address = join_address(bind_host, cluster.port)
    check_address(BIND_VARIABLE, bind_address)
    bind_host, _ = split_address(bind_address)
    secret = find_secret(bind_host, insecure=insecure, warns=cluster.process_id == 0)
    started_s = time.monotonic()
    hosts = wait_for_all(
        cluster,
        bind_host=bind_host,
        timeout_s=timeout_s,
        secret=secret,
        has_tls=has_certificate(secret),
    )
    _log.info("process %d of %s", cluster.process_id, hosts)
    configure_cpu()
    # JAX's own handler swallows SIGTERM: a program that does not poll JAX for it could
    # only be killed. `run` has a handler of its own.
    jax.config.update("jax_enable_preemption_service", False)
    if cluster.process_id == 0:
        bind_address = join_address(resolve(bind_host), cluster.port)
    with coordinator_tls(secret) as certificates:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            cluster.local_devices,
            # The group is known: JAX would query Kubernetes and metadata servers.
            cluster_detection_method="deactivate",
            # All have arrived by now; JAX's own wait is only for the last milliseconds.
            initialization_timeout=max(
                10, round(timeout_s - (time.monotonic() - started_s))
            ),
            heartbeat_timeout_seconds=heartbeat_s,
            coordinator_bind_address=bind_address,
            **certificates,
        )
    note_hosts(hosts)
    leave_at_once_after_an_exception()

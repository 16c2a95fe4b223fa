"""Hosts of a machine's file, as a launcher reaches them."""

import dataclasses
import re

from replicator.base.host.fake_devices import ENVIRONMENT_VARIABLE as FAKE_DEVICES
from replicator.distributed.given_machine import MACHINE_VARIABLE, read_file
from replicator.distributed.remote.remote_host import RemoteHost
from replicator.errors import ArgumentError
from replicator.strategies.cluster_file import Host, Ssh, write_cluster
from replicator.strategies.machine import Machine

# The folder of an environment, or the command that activates it in a shell.
_ENVIRONMENT = re.compile(
    r"(?:(?:source|\.)\s+)?([^\s'\"$;&|<>()`\\]+?)(/bin/activate)?;?"
)


def read_hosts(path: str, *, devices: int | None = None) -> list[RemoteHost]:
    """Return the hosts of a machine's file, the chief first.

    Args:
      path: The file, as of `Machine.from_yaml`.
      devices: Fake CPU devices of each; by default as many as it lists `cpus`, if it
        lists no `gpus`.

    Raises:
      ArgumentError: The file is not there, or `Machine.from_yaml` refuses it.
    """
    machine = Machine.from_yaml(read_file(path))
    hosts = sorted(machine.hosts, key=lambda host: not host.is_chief)
    shown = hosts
    if devices is not None:
        fake = {"gpus": (), "cpus": range(devices)}
        shown = [dataclasses.replace(host, **fake) for host in hosts]
    described = write_cluster(shown, machine.name if machine.hardware else "")
    return [_remote(host, devices, described) for host in hosts]


def _remote(host: Host, devices: int | None, described: str) -> RemoteHost:
    ssh = host.ssh or Ssh()
    variables = {}
    if host.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.gpus))
    elif host.cpus:
        variables[FAKE_DEVICES] = str(len(host.cpus))
    variables |= dict(ssh.shared_envs)
    if devices is not None:
        variables[FAKE_DEVICES] = str(devices)
    variables[MACHINE_VARIABLE] = described
    return RemoteHost(
        address=host.address,
        user=ssh.username or None,
        port=ssh.port,
        key_file=ssh.key_file or None,
        python=_python_of(ssh.python_venv),
        environment=variables,
    )


def _python_of(environment: str) -> str | None:
    """Return the Python of an environment on a host; None for that of the launcher."""
    if not environment.strip():
        return None
    match = _ENVIRONMENT.fullmatch(environment.strip())
    if match is None:
        raise ArgumentError(
            "`python_venv` must be the folder of an environment, or `source "
            f"FOLDER/bin/activate`, got {environment!r}. No shell runs it: name the "
            "folder."
        )
    return f"{match[1]}/bin/python"

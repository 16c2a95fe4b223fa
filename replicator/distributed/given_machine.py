"""The machine of a run: as it is given, or as its launcher describes it."""

import dataclasses
import math
import os
import re
from pathlib import Path

from replicator.base.host.paths import expanded
from replicator.errors import ArgumentError
from replicator.strategies.machine import Machine

MACHINE_VARIABLE = "REPLICATOR_MACHINE"
"""Variable in which `replicator launch --machine` hands the nodes to each process."""


def find_machine(
    given: Machine | str | os.PathLike[str] | None, num_devices: int
) -> Machine | None:
    """Return the machine of so many devices; None if nothing describes one.

    Args:
      given: A machine; a cluster's file, or its text, as of `Machine.from_yaml`; or
        None for what `replicator launch --machine` has read.
      num_devices: Number of devices that a run uses: the first of the machine's.

    Raises:
      ArgumentError: It is none of these, there is no such file, `Machine.from_yaml`
        refuses it, or it has fewer devices.

    >>> find_machine("nodes: [{address: localhost, cpus: [0, 1]}]", 2).devices_per_host
    2
    """
    if given is None:
        text = os.environ.get(MACHINE_VARIABLE)
        found = Machine.from_yaml(text) if text else None
        # A node whose devices the file does not list counts as one: that says nothing.
        if found is None or found.num_devices < num_devices:
            return None
        return first_of(found, num_devices)
    machine = given if isinstance(given, Machine) else Machine.from_yaml(_text(given))
    if machine.num_devices < num_devices:
        raise ArgumentError(
            f"`machine` must have the {num_devices} devices of the replicator, got "
            f"{machine.name} with {machine.num_devices}. List the others in its file."
        )
    return first_of(machine, num_devices)


def first_of(machine: Machine, num_devices: int) -> Machine:
    """Return the machine of the first devices of another: the links that join them.

    A part of a torus is not known, and comes back whole.

    Args:
      machine: The other.
      num_devices: Number of devices, at most as many as it has.

    >>> part = first_of(Machine.from_topology("h100:4x8"), 16)
    >>> part.num_devices, [link.devices for link in part.links]
    (16, [8, 16])
    """
    is_torus = any(link.torus for link in machine.links)
    if machine.num_devices == num_devices or is_torus:
        return machine
    links = []
    for link in machine.links:
        # Blocks of this size lie inside one group each.
        size = math.gcd(link.devices, num_devices)
        size = num_devices if link.devices >= num_devices else size
        if size > 1 and (not links or links[-1].devices < num_devices):
            links.append(dataclasses.replace(link, devices=size))
    return dataclasses.replace(
        machine, num_devices=num_devices, links=tuple(links), hosts=()
    )


def read_file(path: str | os.PathLike[str]) -> str:
    """Return the text of a cluster's file.

    Raises:
      ArgumentError: The file is not there, or holds no text.
    """
    try:
        return Path(expanded(path)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArgumentError(
            f"`machine` must be a file of nodes, got {os.fspath(path)!r}: {reason}. "
            "Give its path."
        ) from error


def _text(given: str | os.PathLike[str]) -> str:
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(
            "`machine` must be a `Machine`, or a cluster's file or its text, got "
            f"{given!r}. Write `Machine.from_devices()`."
        )
    # A mapping of YAML has a colon and a blank behind a key; or it is JSON.
    is_text = isinstance(given, str) and re.search(r":\s|^\s*\{", given)
    return str(given) if is_text else read_file(given)

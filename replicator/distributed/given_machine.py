"""The machine of a run: as it is given, or as its launcher describes it."""

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
      num_devices: Number of devices that a run uses; the machine may have more.

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
        return found if found and found.num_devices >= num_devices else None
    machine = given if isinstance(given, Machine) else Machine.from_yaml(_text(given))
    if machine.num_devices < num_devices:
        raise ArgumentError(
            f"`machine` must have the {num_devices} devices of the replicator, got "
            f"{machine.name} with {machine.num_devices}. List the others in its file."
        )
    return machine


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

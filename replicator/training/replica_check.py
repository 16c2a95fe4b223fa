"""Compare the copies that devices hold of a state, to find bits that flipped unseen.

Replicas are equal by law 1 and 2, so a copy that differs was damaged: by memory, by a
computation, on the way from the host. Each device takes fingerprints of what it holds
(`engine/fingerprints`), and the hosts compare them. A check that is due is dispatched
behind its step and read one step later, so devices do not wait for the host; before a
save it is read at once, so that no wrong state is saved.

A state that is found wrong was so for a while: gradients have carried the damage to all
replicas, alike. So nothing is mended from the majority; the way back is a checkpoint.
"""

import dataclasses
import hashlib
import logging
import platform
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from replicator.base.types import PyTree
from replicator.distributed.agreement import exchange
from replicator.engine.fingerprints.copies import (
    Copied,
    copied,
    describe_place,
    named_arrays,
    odd_copies,
    shardings_of,
)
from replicator.engine.fingerprints.program import fingerprints
from replicator.errors import ArgumentError, ReplicaMismatchError
from replicator.hooks.protocol import Hook, StateEvent
from replicator.hooks.schedule import Every, Scheduled
from replicator.training.nonfinite.policy import BadNumber
from replicator.training.run_spec import RunSpec

_log = logging.getLogger(__name__)
_SHOWN_LEAVES = 3
_Rows: TypeAlias = dict[int, list[Any]]  # by the device's place in the mesh


class ReplicaCheck(Scheduled, Hook):
    """Compares copies of the state at due steps, before saves, and at the end.

    Args:
      spec: The run.
      when: Schedule of the checks.
    """

    phase = "report"

    def __init__(self, spec: RunSpec, when: Every) -> None:
        self._spec = spec
        self._trigger = when.trigger()
        self._begun: _Begun | None = None
        self._equal_at: int | None = None  # newest step whose state was compared

    def check_first(self, state: PyTree, *, step: int) -> None:
        """Compare the state that a run begins with or was restored to.

        Raises:
          ReplicaMismatchError: Copies differ; there is nothing to go back to.
        """
        with self._spec.phases.during("compile"):
            self._begun = _begin(state, step, self._spec.mesh)
        self._list_alone(self._begun.alone)
        if (bad := self._found()) is not None:
            raise ReplicaMismatchError(
                f"`{bad.leaf}` must be equal on all devices that hold it, got "
                f"{bad.found} before the first step. Start again without that device.",
                step=step,
                leaf=bad.leaf,
            )

    def on_state(self, event: StateEvent) -> None:
        """Read the check that was begun a step before, and begin one if due.

        Raises:
          ReplicaMismatchError: Copies differ, and that ends the run.
          GoingBack: Copies differ, and the run resumes from a checkpoint.
        """
        self._finish()
        if self._trigger.pulled(event):
            self._begun = _begin(event.state, event.step, self._spec.mesh)

    def on_end(self, event: StateEvent) -> None:
        """Compare the last state; raises as `on_state`."""
        self.check(event)

    def check(self, event: StateEvent) -> None:
        """Return if the copies of a state are equal; raises as `on_state`."""
        self._finish()
        if self._equal_at != event.step:
            self._begun = _begin(event.state, event.step, self._spec.mesh)
            self._finish()

    def close(self) -> None:
        """Drop the check that was begun."""
        self._begun = None

    def _finish(self) -> None:
        if (bad := self._found()) is not None:
            self._spec.recovery.handle(bad)

    def _found(self) -> BadNumber | None:
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        odd = _compare(begun, self._spec)
        if not odd:
            self._equal_at = begun.step
            return None
        path, places = next(iter(odd.items()))
        more = f" (and of {len(odd) - 1} other leaves)" if len(odd) > 1 else ""
        found = f"other bits on {' and '.join(places)}{more}"
        return BadNumber(kind="mismatch", step=begun.step, leaf=path, found=found)

    def _list_alone(self, alone: Sequence[str]) -> None:
        if alone and not self._spec.recovery.went_back:
            few = ", ".join(f"`{path}`" for path in alone[:_SHOWN_LEAVES])
            _log.warning(
                "`check_replicas_every` does not watch %d leaves, which have no second "
                "copy: %s%s",
                *(len(alone), few, ", ..." if len(alone) > _SHOWN_LEAVES else "."),
            )
            self._spec.log_once("unwatched", leaves=list(alone))


def require_copies(spec: RunSpec) -> None:
    """Refuse to compare copies where devices have none of the user's state.

    Counters do not count: they are on each device under every strategy.

    Raises:
      ArgumentError: No array of several elements lies on two devices.
    """
    if spec.replica_checks is None:
        return
    shapes = spec.first.shapes.user
    arrays = named_arrays(shapes)
    found, _ = copied(arrays, spec.layout.state_shardings(shapes), spec.mesh)
    if not any(arrays[leaf.number][1].size > 1 for leaf in found):
        raise ArgumentError(
            "`check_replicas_every` must have arrays to compare, of which two devices "
            f"hold copies, got none on {spec.mesh.devices.size} devices. Leave it out, "
            "or take a strategy that keeps copies."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A check whose table of fingerprints is computed on the devices."""

    step: int
    leaves: list[Copied]
    alone: list[str]
    table: jax.Array | None
    mesh: Mesh


def _begin(state: PyTree, step: int, mesh: Mesh) -> _Begun:
    arrays = named_arrays(state)
    leaves, alone = copied(arrays, shardings_of(arrays), mesh)
    table = (
        fingerprints([arrays[each.number][1] for each in leaves]) if leaves else None
    )
    return _Begun(step=step, leaves=leaves, alone=alone, table=table, mesh=mesh)


def _compare(begun: _Begun, spec: RunSpec) -> dict[str, list[str]]:
    """Return the paths of leaves whose copies differ, with the places of odd copies."""
    if begun.table is None:
        return {}
    with spec.phases.during("step"):  # waits for the devices
        own = {
            shard.index[0].start or 0: np.asarray(shard.data)[0]
            for shard in begun.table.addressable_shards
        }
    pieces = [leaf.pieces for leaf in begun.leaves]
    # A digest for all leaves that lie alike first: hosts exchange a few bytes, not a
    # table of thousands of leaves.
    alike = list(dict.fromkeys(pieces))
    columns = [[n for n, each in enumerate(pieces) if each == kind] for kind in alike]
    digests = {d: [_digest(row[some]) for some in columns] for d, row in own.items()}
    if not any(_odd(_of_all(spec, digests), alike)):
        return {}
    rows = _of_all(spec, {device: row.tolist() for device, row in own.items()})
    hosts = exchange("replicas/hosts", platform.node()) if spec.together else None
    return {
        leaf.path: [_describe(begun.mesh, n, hosts) for n in odd]
        for leaf, odd in zip(begun.leaves, _odd(rows, pieces), strict=True)
        if odd
    }


def _odd(rows: _Rows, pieces: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return the devices with odd copies, for each column of the rows of devices."""
    return [
        odd_copies([rows[device][n] for device in sorted(rows)], each)
        for n, each in enumerate(pieces)
    ]


def _of_all(spec: RunSpec, own: _Rows) -> _Rows:
    """Return the rows of the devices of all processes."""
    if not spec.together:
        return own
    found = exchange("replicas/rows", [[*row] for row in own.items()])
    return {device: row for each in found for device, row in each}


def _digest(row: np.ndarray) -> str:
    return hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()


def _describe(mesh: Mesh, number: int, hosts: Sequence[str] | None) -> str:
    """Return a device with its place, process and host."""
    device = mesh.devices.flat[number]
    host = platform.node() if hosts is None else hosts[device.process_index]
    return (
        f"{describe_place(mesh, number)} (device {device.id}, process "
        f"{device.process_index}, host {host})"
    )

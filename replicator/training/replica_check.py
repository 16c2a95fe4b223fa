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
import textwrap
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from replicator.base.mesh import spans_processes
from replicator.base.types import PyTree
from replicator.distributed.agreement import exchange
from replicator.engine.fingerprints.copies import (
    Copied,
    copied,
    describe_place,
    named_arrays,
    odd_copies,
)
from replicator.engine.fingerprints.program import fingerprints
from replicator.errors import ArgumentError, ReplicaMismatchError
from replicator.hooks.protocol import Hook, StateEvent
from replicator.hooks.schedule import Every, Scheduled
from replicator.training.nonfinite.policy import BadNumber
from replicator.training.run_spec import RunSpec

_log = logging.getLogger(__name__)
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
        self._begun: tuple[int, Comparison] | None = None  # of the state after a step
        self._equal_at: int | None = None  # newest step whose state was compared

    def on_state(self, event: StateEvent) -> None:
        """Read the check that was begun a step before, and begin one if due.

        Raises:
          ReplicaMismatchError: Copies differ, and that ends the run.
          GoingBack: Copies differ, and the run resumes from a checkpoint.
        """
        self._finish()
        if self._trigger.pulled(event):
            self.begin(event.state, step=event.step)

    def on_end(self, event: StateEvent) -> None:
        """Compare the last state; raises as `on_state`."""
        self.check(event)

    def check(self, event: StateEvent) -> None:
        """Return if the copies of a state are equal; raises as `on_state`."""
        self._finish()
        if self._equal_at != event.step:
            self.begin(event.state, step=event.step)
            self._finish()

    def begin(self, state: PyTree, *, step: int) -> "Comparison":
        """Begin to compare the copies of the state after step `step`."""
        comparison = begin_comparison(state, self._spec.mesh)
        self._begun = step, comparison
        return comparison

    def close(self) -> None:
        """Drop the comparison that was begun."""
        self._begun = None

    def found(self) -> BadNumber | None:
        """Read the comparison that was begun; return a leaf whose copies differ."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        step, comparison = begun
        with self._spec.phases.during("step"):  # waits for the devices
            jax.block_until_ready(comparison.table)
        odd = comparison.odd_leaves()
        if not odd:
            self._equal_at = step
            return None
        path, places = next(iter(odd.items()))
        more = f" (and of {len(odd) - 1} other leaves)" if len(odd) > 1 else ""
        found = f"other bits on {' and '.join(places)}{more}"
        return BadNumber(kind="mismatch", step=step, leaf=path, found=found)

    def _finish(self) -> None:
        if (bad := self.found()) is not None:
            self._spec.recovery.handle(bad)


def first_comparison(spec: RunSpec, state: PyTree, *, step: int) -> ReplicaCheck | None:
    """Return the hook that compares copies, if the run asks for it.

    Args:
      spec: The run.
      state: State that it begins with or was restored to; compared.
      step: Updates made before.

    Raises:
      ReplicaMismatchError: Copies of the state differ.
    """
    if spec.replica_checks is None:
        return None
    check = ReplicaCheck(spec, spec.replica_checks)
    with spec.phases.during("compile"):
        alone = check.begin(state, step=step).alone
    if alone and not spec.recovery.went_back:
        _log.warning(
            "`check_replicas_every` does not watch %d leaves, which have no second "
            "copy: %s",
            *(len(alone), textwrap.shorten(", ".join(alone), 200)),
        )
        spec.log_once("unwatched", leaves=alone)
    if (bad := check.found()) is not None:
        # There is nothing to go back to.
        raise ReplicaMismatchError(
            f"`{bad.leaf}` must be equal on all devices that hold it, got {bad.found} "
            "before the first step. Start again without that device.",
            step=step,
            leaf=bad.leaf,
        )
    return check


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
    shardings = spec.layout.state_shardings(shapes)
    found, _ = copied(arrays, spec.mesh, shardings=shardings)
    if not any(arrays[leaf.number][1].size > 1 for leaf in found):
        raise ArgumentError(
            "`check_replicas_every` must have arrays to compare, of which two devices "
            f"hold copies, got none on {spec.mesh.devices.size} devices. Leave it out, "
            "or take a strategy that keeps copies."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A comparison of copies whose fingerprints are computed on the devices.

    Attributes:
      leaves: Leaves that have copies.
      alone: Paths of those that have none.
      table: Their fingerprints, uint32[devices, leaves]; None without such leaves.
      mesh: Mesh of the devices.
    """

    leaves: list[Copied]
    alone: list[str]
    table: jax.Array | None
    mesh: Mesh

    def odd_leaves(self) -> dict[str, list[str]]:
        """Return the leaves whose copies differ, with the places of odd copies.

        Waits for the devices; all processes of the mesh call it.
        """
        if self.table is None:
            return {}
        own = {
            shard.index[0].start or 0: np.asarray(shard.data)[0]
            for shard in self.table.addressable_shards
        }
        pieces = [leaf.pieces for leaf in self.leaves]
        # First a digest of all leaves that lie alike: hosts exchange a few bytes, not a
        # table of thousands of leaves.
        alike = list(dict.fromkeys(pieces))
        columns = [[n for n, each in enumerate(pieces) if each == one] for one in alike]
        digests = {
            d: [_digest(row[some]) for some in columns] for d, row in own.items()
        }
        if not any(_odd(self._of_all(digests), alike)):
            return {}
        rows = self._of_all({device: row.tolist() for device, row in own.items()})
        hosts = self._of_all({device: [platform.node()] for device in own})
        return {
            leaf.path: [self._describe(n, *hosts[n]) for n in odd]
            for leaf, odd in zip(self.leaves, _odd(rows, pieces), strict=True)
            if odd
        }

    def _of_all(self, own: _Rows) -> _Rows:
        """Return the rows of the devices of all processes."""
        if not spans_processes(self.mesh):
            return own
        found = exchange("replicas/rows", [[*row] for row in own.items()])
        return {device: row for each in found for device, row in each}

    def _describe(self, number: int, host: str) -> str:
        device = self.mesh.devices.flat[number]
        return (
            f"{describe_place(self.mesh, number)} (device {device.id}, process "
            f"{device.process_index}, host {host})"
        )


def begin_comparison(state: PyTree, mesh: Mesh) -> Comparison:
    """Dispatch the fingerprints of a state; all processes of the mesh call it.

    Args:
      state: Any pytree; what is not an array over `mesh` has no copies.
      mesh: Mesh of the devices.
    """
    arrays = named_arrays(state)
    leaves, alone = copied(arrays, mesh)
    watched = [arrays[leaf.number][1] for leaf in leaves]
    table = fingerprints(watched, mesh) if watched else None
    return Comparison(leaves=leaves, alone=alone, table=table, mesh=mesh)


def _odd(rows: _Rows, pieces: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return the devices with odd copies, for each column of the rows of devices."""
    return [
        odd_copies([rows[device][n] for device in sorted(rows)], each)
        for n, each in enumerate(pieces)
    ]


def _digest(row: np.ndarray) -> str:
    return hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()

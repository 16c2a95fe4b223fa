"""An experiment's state as a checkpoint: what its two lists of attributes name."""

from collections.abc import Mapping
from typing import Any

from replicator.compat.jaxline.device_rows import bcast_local_devices, get_first
from replicator.compat.jaxline.experiment import AbstractExperiment
from replicator.compat.jaxline.structure import build, describe_structure
from replicator.errors import ArgumentError, CheckpointMismatchError


def take_state(experiment: AbstractExperiment) -> tuple[dict, dict]:
    """Return what is to be saved of an experiment: structures in JSON, and arrays.

    Raises:
      ArgumentError: It lacks an attribute that it names.
    """
    structures: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for attribute, (name, has_rows) in _attributes(experiment).items():
        if not hasattr(experiment, attribute):
            raise ArgumentError(
                f"`CHECKPOINT_ATTRS` must name attributes of the experiment, got "
                f"`{attribute}`, which it lacks. Set it in `__init__`, to None at "
                "least."
            )
        value = getattr(experiment, attribute)
        structures[name], found = describe_structure(
            get_first(value) if has_rows else value
        )
        if found:
            arrays[name] = found
    return structures, arrays


def give_state(
    experiment: AbstractExperiment,
    structures: Mapping[str, Any],
    arrays: Mapping[str, Any],
) -> None:
    """Set an experiment's attributes to what was saved.

    Raises:
      CheckpointMismatchError: The checkpoint is that of another experiment.
    """
    for attribute, (name, has_rows) in _attributes(experiment).items():
        if name not in structures:
            raise CheckpointMismatchError(
                f"`CHECKPOINT_ATTRS` must name what was saved, got `{name}`, of "
                f"{sorted(structures)}. Train in another directory."
            )
        like = getattr(experiment, attribute, None)
        value = build(structures[name], arrays.get(name, {}), like, attribute)
        setattr(
            experiment, attribute, bcast_local_devices(value) if has_rows else value
        )


def _attributes(experiment: AbstractExperiment) -> dict[str, tuple[str, bool]]:
    """List attributes as (name in the checkpoint, whether there is a device axis)."""
    with_rows = experiment.CHECKPOINT_ATTRS.items()
    without = experiment.NON_BROADCAST_CHECKPOINT_ATTRS.items()
    return {attribute: (name, True) for attribute, name in with_rows} | {
        attribute: (name, False) for attribute, name in without
    }

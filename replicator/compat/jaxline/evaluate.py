"""Evaluate a jaxline experiment once, at what was saved last."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicator.checkpoint.store import CheckpointStore
from replicator.compat.jaxline.base_config import field
from replicator.compat.jaxline.device_rows import bcast_local_devices
from replicator.compat.jaxline.experiment import AbstractExperiment
from replicator.compat.jaxline.keys import fixed_keys
from replicator.compat.jaxline.saving import give_saved
from replicator.compat.jaxline.train import (
    CHECKPOINTS,
    find_directory,
    make_experiment,
)
from replicator.compat.jaxline.writer import ScalarWriter
from replicator.errors import ArgumentError
from replicator.monitoring.writers.directory import directory_writer


def evaluate(
    experiment_class: Callable[..., AbstractExperiment],
    config: Any,
    *,
    directory: str | os.PathLike[str] | None = None,
    mode: str = "eval",
) -> dict[str, Any]:
    """Call `evaluate` of an experiment with the state that was saved last.

    It only reads: the run may go on meanwhile, in another process.

    Args:
      experiment_class: As it was trained.
      config: As it was trained with.
      directory: Of the experiment; by default `config.checkpoint_dir`. The numbers are
        written to `<mode>/` in it.
      mode: What the experiment is told that it is made for.

    Returns:
      The numbers.

    Raises:
      ArgumentError: Nothing is saved there, and `config.eval_initial_weights` is not
        set; or the config asks for the best checkpoint.
    """
    if field(config, "best_model_eval_metric"):
        raise ArgumentError(
            "`best_model_eval_metric` must be empty, got "
            f"{field(config, 'best_model_eval_metric')!r}. Choose among the numbers "
            "that are returned, or train with `replicator.run(..., retention=...)`."
        )
    root = find_directory(config, directory)
    rng = jax.random.PRNGKey(field(config, "random_seed"))
    experiment = make_experiment(experiment_class, mode, rng, config)
    found = None
    if root is not None and (root / CHECKPOINTS).is_dir():
        found = CheckpointStore(root / CHECKPOINTS).restore()
    if found is not None:
        give_saved(found, experiment)
    elif not field(config, "eval_initial_weights"):
        raise ArgumentError(
            f"`directory` must hold a checkpoint, got {root}. Train first, or set "
            "`config.eval_initial_weights`."
        )
    step = 0 if found is None else found.step
    writer = None
    if root is not None and jax.process_index() == 0:
        writer = directory_writer(root / mode)
    try:
        scalars = ScalarWriter(writer)
        numbers = experiment.evaluate(
            global_step=bcast_local_devices(np.int32(step)),
            rng=fixed_keys(rng, field(config, "random_mode_eval")),
            writer=scalars,
        )
        fetched = jax.device_get(dict(numbers or {}))
        scalars.write_scalars(step, fetched)
    finally:
        if writer is not None:
            writer.close()
    return fetched

"""The base class of jaxline experiments: state in attributes, one method per step."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from replicator.base.types import Key, PyTree
from replicator.compat.jaxline.device_rows import bcast_local_devices


class AbstractExperiment(abc.ABC):
    """An experiment whose `step` makes one update of its own attributes.

    Attributes:
      CHECKPOINT_ATTRS: Attributes with a leading device axis whose rows are equal, and
        the names that they are saved under. One row is saved.
      NON_BROADCAST_CHECKPOINT_ATTRS: Likewise, of attributes without that axis: arrays,
        numbers, strings, and containers of them.
    """

    CHECKPOINT_ATTRS: ClassVar[Mapping[str, str]] = {}
    NON_BROADCAST_CHECKPOINT_ATTRS: ClassVar[Mapping[str, str]] = {}

    @abc.abstractmethod
    def __init__(self, mode: str, init_rng: Key | None = None) -> None:
        """Make the experiment.

        Args:
          mode: `train` or `eval`.
          init_rng: For the first state.
        """

    @abc.abstractmethod
    def step(self, *, global_step: jax.Array, rng: Key, writer: Any) -> PyTree:
        """Make one update.

        Args:
          global_step: Updates done before, int32 [devices].
          rng: Random keys of this step, [devices, ...]; `config.random_mode_train` says
            in what they differ.
          writer: Its `write_scalars(global_step, scalars)` writes more numbers.

        Returns:
          Numbers by name, to be written.
        """

    @abc.abstractmethod
    def evaluate(self, *, global_step: jax.Array, rng: Key, writer: Any) -> PyTree:
        """Evaluate the state in the attributes; arguments and result as of `step`.

        Args:
          global_step: Updates done, int32 [devices].
          rng: Random keys, [devices, ...], the same at each call;
            `config.random_mode_eval` says in what they differ.
          writer: As for `step`.
        """

    def initialize_train_step_rng(self, rng: Key) -> Key:
        """Return the key that all steps' keys come from, for each device: equal rows.

        Args:
          rng: One key.
        """
        return bcast_local_devices(rng)

    def should_run_step(self, global_step: int, config: Any) -> bool:
        """Tell whether there is one more step to make after `global_step` of them."""
        return global_step < config.training_steps

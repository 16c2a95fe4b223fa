"""The fields of a jaxline config that `train` and `evaluate` obey, and their defaults.

A config is any object with attributes; what it lacks has the default.
"""

import importlib
from typing import Any

from replicator.errors import ArgumentError
from replicator.hooks import Every, every

DEFAULTS: dict[str, Any] = {
    "experiment_kwargs": {},
    "training_steps": 10_000,
    # "secs" or "steps" of the intervals below.
    "interval_type": "secs",
    "checkpoint_interval_type": None,
    "logging_interval_type": None,
    "save_checkpoint_interval": 300,
    "log_train_data_interval": 120.0,
    "log_all_train_data": False,
    "save_initial_train_checkpoint": False,
    "max_checkpoints_to_keep": 5,
    "random_seed": 42,
    "random_mode_train": "unique_host_unique_device",
    "random_mode_eval": "same_host_same_device",
    "legacy_random_seed_behavior": False,
    "eval_initial_weights": False,
    "checkpoint_dir": None,
    # Asked for by some configs, and not done here: refused where set.
    "periodic_action_growth_ratios": None,
    "best_model_eval_metric": "",
}


def get_base_config() -> Any:
    """Return a config with every field, as `ml_collections.ConfigDict`.

    Raises:
      ArgumentError: `ml_collections`, which jaxline brought, is not installed.
    """
    try:
        config_dict = importlib.import_module("ml_collections.config_dict")
    except ImportError as failure:
        raise ArgumentError(
            "`get_base_config` must have `ml_collections` installed, got no such "
            "package. Run `pip install ml_collections`."
        ) from failure
    config = config_dict.ConfigDict(DEFAULTS)
    config.experiment_kwargs = config_dict.ConfigDict()
    # Fields that old configs set, and that mean nothing here: our reports have a pace
    # of their own, never hold up the loop, and processes save and write as one.
    config.log_tensors_interval = 60
    config.log_async = True
    config.log_all_hosts = False
    config.train_checkpoint_all_hosts = False
    config.one_off_evaluate = True
    config.best_model_eval_metric_higher_is_better = True
    return config


def field(config: Any, name: str) -> Any:
    """Return a field of a config, or its default."""
    return getattr(config, name, DEFAULTS[name])


def schedule(config: Any, interval: str, interval_type: str) -> Every | None:
    """Return when something is due; None for never.

    Args:
      config: The config.
      interval: Name of the field with the interval.
      interval_type: Name of the field that overrides `interval_type`.

    Raises:
      ArgumentError: A field is none that is obeyed here.
    """
    length = field(config, interval)
    kind = field(config, interval_type) or field(config, "interval_type")
    if kind not in ("secs", "steps"):
        raise ArgumentError(
            f"`interval_type` must be 'secs' or 'steps', got {kind!r}. Use 'steps'."
        )
    if length is None or length <= 0:
        return None
    return every(seconds=length) if kind == "secs" else every(n_steps=int(length))


def require_obeyed(config: Any) -> None:
    """Refuse a config that asks for what is not done here.

    Raises:
      ArgumentError: It does.
    """
    if field(config, "periodic_action_growth_ratios"):
        raise ArgumentError(
            "`periodic_action_growth_ratios` must be None, got "
            f"{field(config, 'periodic_action_growth_ratios')}. Write every step: "
            "`log_all_train_data=True`."
        )

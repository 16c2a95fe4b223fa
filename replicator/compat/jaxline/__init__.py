"""Run `jaxline` experiments: `from replicator.compat.jaxline import experiment, utils`.

The base class, the base config and the helpers that experiments use, and in place of
`jaxline.platform`: `train(Experiment, config)` and `evaluate(Experiment, config)`.
"""

from replicator.compat.jaxline import base_config, experiment
from replicator.compat.jaxline import device_rows as utils
from replicator.compat.jaxline.evaluate import evaluate
from replicator.compat.jaxline.train import train

__all__ = ["base_config", "evaluate", "experiment", "train", "utils"]

"""Models that are trained over a slow link, and strategies to compare for each."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from benchmarks.tasks import Task, of_plain_params
from replicator import strategies
from replicator.base.types import Key, PyTree
from replicator.strategies import Rule, Strategy

HOSTS = 2
DEVICES_PER_HOST = 2
_DEVICES = HOSTS * DEVICES_PER_HOST
_BLOCKS = 4
_WORDS = 65_536
_WIDTH = 64
_LOOKUPS = 256
_LOOKUPS_PER_EXAMPLE = 4
_OUTPUTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy, and whether it sends gradients as they are.

    Attributes:
      strategy: The strategy.
      is_exact: False if numbers travel in a lossy form: nothing chooses that unasked.
    """

    strategy: Strategy
    is_exact: bool = True


def mlp(width: int, global_batch: int) -> Task:
    """Return four blocks of two layers, `width` to 4 × `width` and back."""

    def init_model(key: Key) -> PyTree:
        shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
        return [
            {
                name: jax.random.normal(each, shape) * shape[0] ** -0.5
                for each, (name, shape) in zip(
                    jax.random.split(block), shapes.items(), strict=True
                )
            }
            for block in jax.random.split(key, _BLOCKS)
        ]

    def loss_fn(blocks: PyTree, batch: PyTree) -> jax.Array:
        x = batch["x"]
        for block in blocks:
            x = jax.nn.relu(x @ block["up"]) @ block["down"]
        return ((x - batch["y"]) ** 2).mean()

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, global_batch, width), np.float32)
    return _task(init_model, loss_fn, {"x": x, "y": y})


def embedding() -> Task:
    """Return a table of 65,536 rows, of which each replica looks up 256."""

    def init_model(key: Key) -> PyTree:
        table, down = jax.random.split(key)
        return {
            "table": jax.random.normal(table, (_WORDS, _WIDTH)),
            "down": jax.random.normal(down, (_WIDTH, _OUTPUTS)) * _WIDTH**-0.5,
        }

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        words = params["table"][batch["words"]].mean(axis=1)
        return ((words @ params["down"] - batch["y"]) ** 2).mean()

    examples = _DEVICES * _LOOKUPS // _LOOKUPS_PER_EXAMPLE
    rng = np.random.default_rng(0)
    words = rng.integers(0, _WORDS, (examples, _LOOKUPS_PER_EXAMPLE), np.int32)
    y = rng.standard_normal((examples, _OUTPUTS), np.float32)
    return _task(init_model, loss_fn, {"words": words, "y": y})


def _task(init_model, loss_fn, batch: PyTree) -> Task:
    return Task(
        init_model=init_model,
        value_and_grad=of_plain_params(loss_fn),
        params_of=lambda params: params,
        with_params=lambda _, params: params,
        batch=batch,
    )


MODELS = {
    "W 256, batch 64": lambda: mlp(256, 64),
    "W 128, batch 2048": lambda: mlp(128, 2048),
    "embedding": embedding,
}
"""By name, a function that returns the task."""

PLAIN = "data_parallel"


def candidates(model: str) -> Mapping[str, Candidate]:
    """Return the strategies of a model by name, data parallel first."""
    inside = DEVICES_PER_HOST
    hierarchical = [Rule(pattern="*", synchronise="hierarchical")]
    found = {
        PLAIN: strategies.data_parallel(),
        "zero1": strategies.zero1(),
        "zero2": strategies.zero2(),
        "fsdp": strategies.fsdp(),
        "hybrid": strategies.hybrid(shard=inside),
        "hierarchical": strategies.data_parallel(hierarchical, devices_per_host=inside),
    }
    if model == "embedding":
        rows = [Rule(pattern="params/table", synchronise="rows")]
        found["rows"] = strategies.data_parallel(rows)
    else:
        cut = {"model/*/up": (None, "model"), "model/*/down": ("model",)}
        found["tensor_parallel"] = strategies.tensor_parallel(cut)
        found["tensor_parallel in hosts"] = strategies.tensor_parallel(
            cut, model=inside, replicas=HOSTS
        )
    exact = {name: Candidate(strategy=each) for name, each in found.items()}
    int8 = strategies.data_parallel([Rule(pattern="*", compress="int8")])
    return {**exact, "int8": Candidate(strategy=int8, is_exact=False)}

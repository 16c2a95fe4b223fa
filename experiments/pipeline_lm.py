"""Train the character model as a pipeline of stages, beside one device.

    python -m experiments.pipeline_lm

The claim: a pipeline over slices makes one device's updates. The layers of the
transformer of `char_lm` are cut into stages, the first embeds and the last predicts
with the same table, gradients are clipped by their norm over all stages; and the losses
are those of one device that makes the same updates. The last line is one JSON object:
`loss_difference`, the largest over all steps, relative; the `first_loss` and the
`last_loss`, in bits per character; the bytes that an update moves between slices, the
most microbatches that are alive in each stage, and the share of time that slices wait.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
from flax import nnx

from experiments import config_flags, stdlib_text
from experiments.config_flags import Count, Rate, Settings, Whole, check_shares
from models.transformer import Transformer, nats_to_bits, next_token_nats
from replicator import controller
from replicator.base.types import PyTree
from replicator.nnx import params_of, with_params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      stages: Parts of the network.
      slices: Devices; each has an island to itself.
      microbatches: Parts of a batch.
      schedule: Of forwards and backwards.
      steps: Updates.
      global_batch: Windows of text per update.
      context: Tokens of a window.
      layers: Of the network; as many in each stage.
      width: Features between layers.
      heads: Of attention.
      learning_rate: Of AdamW.
      seed: Of initialisation and windows.
      directory: Where the picture of the schedule goes; nowhere if empty.
    """

    stages: Count = 4
    slices: Count = 4
    microbatches: Count = 8
    schedule: Literal["one_f_one_b", "gpipe", "interleaved"] = "one_f_one_b"
    steps: Count = 100
    global_batch: Count = 16
    context: Count = 64
    layers: Count = 4
    width: Count = 64
    heads: Count = 4
    learning_rate: Rate = 3e-3
    seed: Whole = 0
    directory: str = ""


def main(config: Config) -> None:
    began = time.monotonic()
    check_shares("layers", config.layers, config.stages, "stages")
    text, _ = stdlib_text.read_text("")
    rngs = nnx.Rngs(config.seed)
    options = {k: getattr(config, k) for k in ("layers", "width", "heads", "context")}
    model = Transformer(
        vocabulary=stdlib_text.VOCABULARY, scan=False, rngs=rngs, **options
    )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(config.learning_rate, b2=0.98)
    )
    with controller.local(islands=config.slices, devices=1) as pw:
        islands = [f"island{n}" for n in range(config.slices)]
        pipe = pw.pipeline(
            _stages(model, config),
            _loss,
            [pw.slice(1, island=name) for name in islands],
            config.microbatches,
            config.schedule,
            optimizer=tx,
            shared=_shared(config),
        )
        state = pipe.init(_cut(params_of(model), config))
        tokens = next(_batches(text, config))
        moved_bytes = pipe.dataflow(state, tokens[:, :-1], tokens).moved_bytes
        losses = []
        for tokens in _batches(text, config):
            loss, _, state = pipe(state, tokens[:, :-1], tokens)
            losses.append(loss)  # futures: steps go on before they are read
        found = np.array([float(loss) for loss in losses])
    wanted = _one_device(model, tx, _batches(text, config))
    for step in range(0, config.steps, max(1, config.steps // 8)):
        print(f"step {step}: {found[step]:.5f}, one device {wanted[step]:.5f}")
    if config.directory:
        path = Path(config.directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / "schedule.svg").write_text(pipe.to_svg())
    result = {
        "loss_difference": float(np.abs(found / wanted - 1).max()),
        "first_loss": float(nats_to_bits(found[0])),
        "last_loss": float(nats_to_bits(found[-1])),
        "moved_bytes": moved_bytes,
        "live": list(pipe.simulation.live),
        "bubble": pipe.simulation.bubble,
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(result))


def _batches(text: np.ndarray, config: Config) -> Iterator[np.ndarray]:
    """Yield windows with the token before each: int32 [global batch, context + 1]."""
    rng = np.random.default_rng(config.seed)
    for _ in range(config.steps):
        starts = rng.integers(len(text) - config.context, size=config.global_batch)
        yield np.stack([text[at : at + config.context + 1] for at in starts]).astype(
            np.int32
        )


def _cut(params: PyTree, config: Config) -> list[PyTree]:
    """Return the parameters of each stage; the last has no table of its own."""
    size = config.layers // config.stages
    cut = [
        {"blocks": jax.tree.map(lambda leaf, n=n: leaf[n : n + size], params["blocks"])}
        for n in range(0, config.layers, size)
    ]
    cut[-1] |= {"norm": params["norm"], "embed": {"embedding": None}}
    cut[0] |= {"embed": params["embed"]}
    return cut


def _shared(config: Config) -> dict[str, str]:
    """Return the path of the table that the last stage has of the first."""
    last = config.stages - 1
    return {f"{last}/embed/embedding": "0/embed/embedding"} if last else {}


def _stages(model: Transformer, config: Config) -> Sequence[functools.partial]:
    names = range(config.stages)
    last = config.stages - 1
    return [functools.partial(_stage, model, n == 0, n == last) for n in names]


def _stage(
    model: Transformer, is_first: bool, is_last: bool, params: PyTree, x: jax.Array
) -> jax.Array:
    graph, stacked = nnx.split(model.blocks)
    block = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], stacked))
    if is_first:
        x = with_params(model.embed, params["embed"])(x)
    for n in range(len(jax.tree.leaves(params["blocks"])[0])):
        own = jax.tree.map(lambda leaf, n=n: leaf[n], params["blocks"])
        x = with_params(block, own)(x)
    if is_last:
        x = with_params(model.norm, params["norm"])(x)
        x = with_params(model.embed, params["embed"]).attend(x)
    return x


def _loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _one_device(
    model: Transformer, tx: optax.GradientTransformation, batches: Iterator[np.ndarray]
) -> np.ndarray:
    """Return the losses of the same updates, made as one program on one device."""

    @jax.jit
    def step(params: PyTree, state: PyTree, tokens: jax.Array) -> tuple:
        def mean(params: PyTree) -> jax.Array:
            return next_token_nats(with_params(model, params), tokens).mean()

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = params_of(model)
    state, losses = tx.init(params), []
    for tokens in batches:
        params, state, loss = step(params, state, tokens)
        losses.append(loss)
    return np.array(jax.device_get(losses))


if __name__ == "__main__":
    config_flags.run(main, Config)

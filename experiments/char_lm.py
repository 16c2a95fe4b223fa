"""Train a small transformer on Python's standard library; test it on files held out.

    python -m experiments.char_lm --strategy=fsdp

The claim: one step, written as for one device, learns a language under every strategy.
Samples are printed as it learns. The last line is one JSON object: `bits_per_char` of
files that were held out and are like none that was learned from, where a character is a
byte; and what gzip needs for these, after the text that was learned from
(`gzip_bits_per_char`; it looks back 32 KiB, so that it learns little from there).
"""

import dataclasses
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int

import replicator
from experiments import config_flags, run_folder, stdlib_text
from experiments.config_flags import Count, Rate, Settings, Whole, check_batch
from experiments.strategy_flag import StrategyName, named_strategy
from models.transformer import (
    TENSOR_PARALLEL,
    Transformer,
    nats_to_bits,
    next_token_nats,
)
from replicator.hooks import StateCallback, StateEvent, every
from replicator.nnx import params_of, value_and_grad, with_params

_WARM_UP = 0.05  # of the steps
_SAMPLES = 8  # along the way
_SAMPLE_LENGTH = 240


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      strategy: How the step and its state are spread over devices.
      fake_devices: How many stand in for others; REPLICATOR_FAKE_DEVICES goes first.
      minutes: After so many the training ends, whatever step it is at.
      steps: Updates.
      global_batch: Windows of text per update.
      accumulate: Microbatches per update.
      context: Characters of a window.
      layers: Of the network.
      width: Features between layers.
      heads: Of attention.
      scan: Run the layers in a loop: compiles sooner, and is slower on CPUs.
      remat: Compute each layer again for its gradient.
      learning_rate: Peak of the cosine schedule.
      seed: Of initialisation and order of windows.
      sources: Directory whose Python files are read; the standard library if empty.
      checkpoint_dir: Where the run is saved, and goes on from; nowhere if empty.
      directory: Where metrics and `run.json` go.
    """

    strategy: StrategyName = "data_parallel"
    fake_devices: Count = 2
    minutes: Rate = 8.0
    steps: Count = 2000
    global_batch: Count = 8
    accumulate: Count = 1
    context: Count = 128
    layers: Count = 3
    width: Count = 128
    heads: Count = 4
    scan: bool = False
    remat: bool = False
    learning_rate: Rate = 3e-3
    seed: Whole = 0
    sources: str = ""
    checkpoint_dir: str = ""
    directory: str = "runs/char_lm"


# What may differ from sitting to sitting: the state learns the same.
FREE = {
    *("strategy", "fake_devices", "minutes", "steps", "accumulate", "remat"),
    *("checkpoint_dir", "directory"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the experiment.

    Attributes:
      bits_per_char: Of held-out files.
      steps: Updates that were made.
      seconds: Of training, compilation included.
    """

    bits_per_char: float
    steps: int
    seconds: float


def make_training(rep: replicator.Replicator, config: Config) -> tuple[Any, Any]:
    """Return `init_fn` and `step_fn`."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, int(_WARM_UP * config.steps) + 1, config.steps + 1
    )
    optimizer = rep.wrap_optimizer(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(schedule, b2=0.98, weight_decay=0.1),
        ),
        name="model",
    )

    def init_fn(key: jax.Array) -> dict:
        model = Transformer(
            vocabulary=stdlib_text.VOCABULARY,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            context=config.context,
            scan=config.scan,
            remat=config.remat,
            rngs=nnx.Rngs(key),
        )
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def step_fn(state: dict, batch: dict) -> tuple[dict, dict]:
        (loss, model), grads = value_and_grad(_mean_nats)(state["model"], batch)
        params = params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"bits_per_char": nats_to_bits(loss)}

    return init_fn, step_fn


def train(
    rep: replicator.Replicator, config: Config, text: tuple[np.ndarray, np.ndarray]
) -> Outcome:
    """Train, print samples, and test on what was held out."""
    learned, held_out = text
    init_fn, step_fn = make_training(rep, config)
    jax.eval_shape(init_fn, jax.random.key(config.seed))  # a network that fits
    check_batch(config, rep.num_replicas)
    if kept := config.checkpoint_dir:
        run_folder.claim(kept, config, free=FREE, flag="checkpoint_dir")
    began = time.monotonic()
    window = jnp.asarray(held_out[: config.context], jnp.int32)

    def show(event: StateEvent) -> None:
        model = jax.device_get(event.state["model"])
        key = jax.random.key(config.seed)
        drawn = sample(model, window, key, length=_SAMPLE_LENGTH)
        print(f"--- step {event.step}\n{_printable(drawn)}", flush=True)

    with rep.session(
        step_fn,
        functools.partial(
            stdlib_text.train_input_fn,
            text=learned,
            global_batch=config.global_batch,
            length=config.context,
            seed=config.seed,
        ),
        init_fn=init_fn,
        steps=config.steps,
        seed=config.seed,
        accumulate=config.accumulate,
        directory=config.directory,
        hooks=[StateCallback(show, every(n_steps=max(1, config.steps // _SAMPLES)))],
        **run_folder.saved_in(Path(kept) if kept else None, seconds=60),
    ) as session:
        for batch in session.batches():
            session.step(batch)
            if time.monotonic() - began > 60 * config.minutes:
                break
    seconds = time.monotonic() - began
    return Outcome(
        bits_per_char=bits_per_char(rep, session.result.state, held_out, config),
        steps=session.result.step,
        seconds=seconds,
    )


def bits_per_char(
    rep: replicator.Replicator, state: dict, text: np.ndarray, config: Config
) -> float:
    """Return the mean loss over all characters of a text but the first."""
    batches = stdlib_text.held_out_batches(text, batch=64, length=config.context)
    found = rep.evaluate(_counted_nats, batches, state=state, block=64)
    return float(nats_to_bits(found["nats"] * found["examples"] / (len(text) - 1)))


@functools.partial(jax.jit, static_argnames="length")
def sample(
    model: Transformer,
    window: Int[Array, "context"],
    key: jax.Array,
    *,
    length: int,
    temperature: float = 0.8,
) -> Int[Array, "length"]:
    """Draw characters one by one, each after those before it.

    Args:
      model: Predicts the next.
      window: What comes before the first.
      key: Random key.
      length: How many to draw.
      temperature: Below 1 likely ones become likelier.
    """

    def draw(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1] / temperature
        token = jax.random.categorical(key, logits).astype(window.dtype)
        return jnp.concatenate([window[1:], token[None]]), token

    return jax.lax.scan(draw, window, jax.random.split(key, length))[1]


def _printable(tokens: Int[Array, "length"]) -> str:
    text = bytes(np.uint8(tokens)).decode(errors="replace")
    # At first it may hold what a terminal would obey.
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text
    )


def _mean_nats(model: Transformer, batch: dict) -> jax.Array:
    return next_token_nats(model, batch["tokens"]).mean()


def _counted_nats(state: dict, batch: dict) -> dict:
    nats = next_token_nats(state["model"], batch["tokens"]) * batch["counts"]
    return {"nats": nats.sum(axis=1)}


def main(config: Config) -> None:
    began = time.monotonic()
    if "REPLICATOR_FAKE_DEVICES" not in os.environ:
        replicator.fake_devices(config.fake_devices)
    text = stdlib_text.read_text(config.sources)
    strategy = named_strategy(
        config.strategy,
        jax.device_count(),
        tensor_parallel=TENSOR_PARALLEL,
        pieces=config.heads,
    )
    outcome = train(replicator.Replicator(strategy=strategy), config, text)
    found = {
        "bits_per_char": outcome.bits_per_char,
        "gzip_bits_per_char": stdlib_text.gzip_bits(text[1], learned=text[0]),
        "seconds": time.monotonic() - began,
        "strategy": config.strategy,
        "devices": jax.device_count(),
        "steps": outcome.steps,
        "training_seconds": outcome.seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    config_flags.run(main, Config)

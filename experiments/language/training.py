"""Train a language model under any strategy: the step, its session, test and samples.

A window weighs as many tokens as are counted in it, in training and in the test.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int

import replicator
from experiments import run_folder
from experiments.config_flags import Count, Rate, Settings, Whole, check_batch
from experiments.language.windows import held_out_batches, train_input_fn
from experiments.strategy_flag import StrategyName, named_strategy
from models.transformer import TENSOR_PARALLEL, Transformer, next_token_nats
from replicator.base.types import InitFn, PyTree, StepFn
from replicator.hooks import Hook, StateCallback, StateEvent, every
from replicator.nnx import params_of, value_and_grad, with_params

_WARM_UP = 0.05  # of the steps
_SAMPLES = 8  # along the way
_SAMPLE_LENGTH = 240
_BLOCK = 64  # windows of the test at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageSettings(Settings):
    """Settings that all experiments with language have; each field is a flag.

    Attributes:
      strategy: How the step and its state are spread over devices.
      fake_devices: How many CPUs stand in for accelerators where there are none;
        REPLICATOR_FAKE_DEVICES goes first.
      minutes: After so many the training ends, whatever step it is at.
      steps: Updates.
      global_batch: Windows of text per update.
      accumulate: Microbatches per update.
      context: Tokens of a window.
      layers: Of the network.
      width: Features between layers.
      heads: Of attention.
      scan: Run the layers in a loop: compiles sooner, and is slower on CPUs.
      learning_rate: Peak of the cosine schedule.
      seed: Of initialisation and order of windows.
      checkpoint_dir: Where the run is saved, and goes on from; nowhere if empty.
      directory: Where metrics and `run.json` go; nowhere if empty.
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
    learning_rate: Rate = 3e-3
    seed: Whole = 0
    checkpoint_dir: str = ""
    directory: str = "runs/language"


# What may differ from sitting to sitting: the state learns the same.
FREE = frozenset(
    {
        *("strategy", "fake_devices", "minutes", "steps", "accumulate", "remat"),
        *("checkpoint_dir", "directory"),
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """Text as tokens, and the network that learns it.

    Attributes:
      train: Tokens to train on, [n].
      held_out: Tokens to test on, [n].
      decode: Returns the text of tokens.
      make_model: Makes an untrained network from `rngs`.
      kept: Text of files beside the checkpoints, by their names.
    """

    train: np.ndarray
    held_out: np.ndarray
    decode: Callable[[np.ndarray], str]
    make_model: Callable[..., Transformer]
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)


def unread(make_model: Callable[..., Transformer]) -> Language:
    """Return a network without a text, for what reads none: plans."""
    none = np.zeros(0, np.int32)
    return Language(train=none, held_out=none, decode=str, make_model=make_model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a training.

    Attributes:
      loss: Mean over the tokens of the held-out text but the first, in nats.
      state: The last one.
      steps: Updates that were made.
      seconds: Of training, compilation included.
    """

    loss: float
    state: PyTree
    steps: int
    seconds: float


def set_fake_devices(config: LanguageSettings) -> None:
    """Let CPUs stand in for accelerators, where JAX finds none."""
    if "REPLICATOR_FAKE_DEVICES" not in os.environ:
        platforms = jax.config.values["jax_platforms"]
        replicator.fake_devices(config.fake_devices)
        jax.config.update("jax_platforms", platforms)  # they go first


def make_replicator(config: LanguageSettings, *, pieces: int) -> replicator.Replicator:
    """Return all devices under the strategy that is asked for.

    Args:
      config: Of the experiment.
      pieces: What each dimension that tensor parallelism cuts is a multiple of.

    Raises:
      ArgumentError: Nothing can be cut over the devices.
    """
    strategy = named_strategy(
        config.strategy,
        jax.device_count(),
        tensor_parallel=TENSOR_PARALLEL,
        pieces=pieces,
    )
    return replicator.Replicator(strategy=strategy)


def make_training(
    rep: replicator.Replicator, config: LanguageSettings, language: Language
) -> tuple[InitFn, StepFn]:
    """Return `init_fn` and `step_fn`."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, int(_WARM_UP * config.steps) + 1, config.steps + 1
    )
    decayed = optax.adamw(schedule, b2=0.98, weight_decay=0.1, mask=_decays)
    optimizer = rep.wrap_optimizer(
        optax.chain(optax.clip_by_global_norm(1.0), decayed), name="model"
    )

    def init_fn(key: jax.Array) -> dict:
        model = language.make_model(rngs=nnx.Rngs(key))
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def step_fn(state: dict, batch: dict) -> tuple[dict, dict]:
        (loss, model), grads = value_and_grad(_loss)(state["model"], batch)
        params = params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params, count=loss.weight)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return init_fn, step_fn


def batch_shapes(config: LanguageSettings) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of windows, as `input_fn_of` reads them."""
    count, length = config.global_batch, config.context
    return {
        "tokens": jax.ShapeDtypeStruct((count, length + 1), jnp.int32),
        "mask": jax.ShapeDtypeStruct((count, length), jnp.float32),
    }


def input_fn_of(config: LanguageSettings, language: Language) -> Callable[..., Any]:
    """Return the function that reads batches of the text to train on."""
    return functools.partial(
        train_input_fn,
        tokens=language.train,
        global_batch=config.global_batch,
        length=config.context,
        seed=config.seed,
    )


def train(
    rep: replicator.Replicator,
    config: LanguageSettings,
    language: Language,
    *,
    free: Collection[str] = FREE,
    init_state: PyTree = None,
    hooks: Sequence[Hook] = (),
    **session: Any,
) -> Outcome:
    """Train, print samples, and test on what was held out.

    Args:
      rep: Where it trains.
      config: Of the experiment.
      language: What is learned.
      free: Fields of `config` that may differ from sitting to sitting.
      init_state: First state, by default that of an untrained network.
      hooks: Called beside the one that prints samples.
      **session: More options of the session.

    Raises:
      ArgumentError: The settings do not fit each other, or the saved run.
    """
    init_fn, step_fn = make_training(rep, config, language)
    jax.eval_shape(init_fn, jax.random.key(config.seed))  # a network that fits
    check_batch(config, rep.num_replicas)
    if kept := config.checkpoint_dir:
        run_folder.claim(kept, config, free=free, flag="checkpoint_dir")
        for name, text in language.kept.items():
            (Path(kept) / name).write_text(text)
    began = time.monotonic()
    show = StateCallback(
        functools.partial(_show, config, language),
        every(n_steps=max(1, config.steps // _SAMPLES)),
    )
    with rep.session(
        step_fn,
        input_fn_of(config, language),
        init_fn=init_fn if init_state is None else None,
        init_state=init_state,
        steps=config.steps,
        seed=config.seed,
        accumulate=config.accumulate,
        directory=config.directory or None,
        hooks=[show, *hooks],
        **run_folder.saved_in(Path(kept) if kept else None, seconds=60),
        **session,
    ) as opened:
        for batch in opened.batches():
            opened.step(batch)
            if time.monotonic() - began > 60 * config.minutes:
                break
    result, seconds = opened.result, time.monotonic() - began
    return Outcome(
        loss=held_out_loss(rep, result.state, language.held_out, config),
        state=result.state,
        steps=result.step,
        seconds=seconds,
    )


def held_out_loss(
    rep: replicator.Replicator,
    state: PyTree,
    tokens: np.ndarray,
    config: LanguageSettings,
) -> float:
    """Return the mean loss over all tokens but the first, in nats."""
    batches = held_out_batches(tokens, batch=_BLOCK, length=config.context)
    return float(rep.evaluate(mean_nats, batches, state=state, block=_BLOCK)["loss"])


def mean_nats(state: PyTree, batch: dict) -> dict:
    """Return the mean loss of the tokens that count, weighted by their number."""
    nats, count = _nats(state["model"], batch)
    return {"loss": replicator.Mean(nats / count, weight=count)}


@functools.partial(jax.jit, static_argnames="length")
def sample(
    model: Transformer,
    window: Int[Array, "context"],
    key: jax.Array,
    *,
    length: int,
    temperature: float = 0.8,
) -> Int[Array, "length"]:
    """Draw tokens one by one, each after those before it.

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


def _show(config: LanguageSettings, language: Language, event: StateEvent) -> None:
    model = jax.device_get(event.state["model"])
    window = jnp.asarray(language.held_out[: config.context], jnp.int32)
    key = jax.random.key(config.seed)
    drawn = sample(model, window, key, length=_SAMPLE_LENGTH)
    text = language.decode(np.asarray(drawn))
    print(f"--- step {event.step}\n{printable(text)}", flush=True)


def printable(text: str) -> str:
    r"""Return a sample without what a terminal would obey, as it may hold at first.

    >>> printable("a\tb")
    'a·b'
    """
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text
    )


def _loss(model: Transformer, batch: dict) -> replicator.LocalSum:
    return replicator.LocalSum(*_nats(model, batch))


def _nats(model: Transformer, batch: dict) -> tuple[jax.Array, jax.Array]:
    """Return the sum over the tokens that count, and their number."""
    nats = next_token_nats(model, batch["tokens"]) * batch["mask"]
    return nats.sum(), batch["mask"].sum()


def _decays(params: PyTree) -> PyTree:
    """Return which parameters weight decay shrinks: matrices, not norms and biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )

"""Sample from a language model on one slice of devices while it learns on another.

    python -m experiments.generate_and_learn --strategy=fsdp

The claim: one loop of one program drives both, no step waits for a sample and no sample
for a step, and a sample is drawn with the weights of one step, the newest. The network
and the text are those of `char_lm`. The last line is one JSON object: `steps` and
`samples` that were made; `learner_busy` and `sampler_busy`, the share of the time in
which each slice computed; `torn`, samples whose weights were not bit by bit those of
one step; `bits_per_char` of the last steps.
"""

import collections
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicator
from experiments import char_lm, config_flags
from experiments.config_flags import Count, Rate, Settings, Whole, check_shares
from experiments.drawing import draw_spans
from experiments.language.training import (
    Language,
    input_fn_of,
    make_training,
    printable,
    sample,
)
from experiments.spans import Spans, busy
from experiments.strategy_flag import StrategyName, named_strategy
from models.transformer import TENSOR_PARALLEL, Transformer, nats_to_bits
from replicator import controller
from replicator.base.types import PyTree

_AHEAD = 1  # steps that are called while one is computed
_SHOWN = 8  # samples along the way
_SECONDS_DRAWN = 10.0
_LAST = 20  # steps, whose mean loss is reported


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      strategy: How the step and its state are spread over the learner's devices.
      devices: Of the learner; the sampler has one.
      minutes: After so many the training ends, whatever step it is at.
      steps: Updates, after one that compiles.
      global_batch: Windows of text per update.
      context: Characters of a window.
      layers: Of the network.
      width: Features between layers.
      heads: Of attention.
      learning_rate: Peak of the cosine schedule.
      length: Characters of a sample.
      seed: Of initialisation, windows and samples.
      sources: Directory whose Python files are read; the standard library if empty.
      directory: Where the picture goes; nowhere if empty.
    """

    strategy: StrategyName = "data_parallel"
    devices: Count = 2
    minutes: Rate = 1.25
    steps: Count = 600
    global_batch: Count = 8
    context: Count = 128
    layers: Count = 3
    width: Count = 128
    heads: Count = 4
    learning_rate: Rate = 3e-3
    length: Count = 240
    seed: Whole = 0
    sources: str = ""
    directory: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample that was called for.

    Attributes:
      step: Updates behind its weights.
      tokens: Future of the sample, [length].
      learned: Future of the checksums of the learner's weights, after that step.
      used: Future of those of the sampler's.
    """

    step: int
    tokens: controller.Future
    learned: controller.Future
    used: controller.Future


@dataclasses.dataclass(kw_only=True)
class Found:
    """What happened: all samples, their seconds, and (second, loss) of each step."""

    spans: Spans
    samples: list[Sample] = dataclasses.field(default_factory=list)
    called: list[float] = dataclasses.field(default_factory=list)
    losses: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> int:
        """Updates that were made, but for the one before the clock started."""
        return len(self.losses)

    @property
    def torn(self) -> int:
        """Samples whose weights were not those of the step, bit by bit."""
        return sum(not np.array_equal(each.learned, each.used) for each in self.samples)


def checksums(model: Transformer) -> jax.Array:
    """Return a number for each leaf, of all of its bits; the same however it is cut."""
    bits = [
        jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        for leaf in jax.tree.leaves(model)
    ]
    return jnp.stack([each.sum(dtype=jnp.uint32) for each in bits])


def run(pw: controller.Controller, config: Config) -> Found:
    """Learn and sample at once, until the steps or the minutes are over.

    Args:
      pw: With an island for the learner and one for the sampler.
      config: Of the experiment.
    """
    settings = _settings(config)
    language = char_lm.characters(settings)
    learner = pw.slice(config.devices, island="island0")
    sampler = pw.slice(1, island="island1")
    strategy = named_strategy(
        config.strategy,
        config.devices,
        tensor_parallel=TENSOR_PARALLEL,
        pieces=config.heads,
    )
    rep = replicator.Replicator(devices=learner.devices, strategy=strategy)
    check_shares("global_batch", config.global_batch, rep.num_replicas, "replicas")
    init_fn, step_fn = make_training(rep, settings, language)
    learn = pw.fn(rep.compile(step_fn), learner)
    read = _reader(pw, config, language, learner, sampler)
    state = rep.init(init_fn, seed=config.seed)
    with rep.batches(input_fn_of(settings, language)) as batches:
        # Both are compiled before the clock starts.
        state, _ = learn(state, next(batches).value)
        read(state["model"], 0).tokens.result()
        found = Found(spans=Spans(pw, learner=learner, sampler=sampler))
        for _ in _loop(config, found, state, batches, learn=learn, read=read):
            _show(config, language, found)
    return found


def _loop(
    config: Config,
    found: Found,
    state: PyTree,
    batches: Iterator[Any],
    *,
    learn: Callable[..., Any],
    read: Callable[[PyTree, int], Sample],
) -> Iterator[None]:
    """Call steps, and samples whenever one has ended; yield when one has."""
    behind: collections.deque[controller.Future] = collections.deque()

    def note_loss() -> None:
        found.losses.append((found.spans.now(), float(behind.popleft())))

    for step in range(1, config.steps + 1):
        state, metrics = learn(state, next(batches).value)
        behind.append(metrics["loss"])
        if not found.samples or found.samples[-1].tokens.done():
            if found.samples:
                yield
            found.called.append(found.spans.now())
            found.samples.append(read(state["model"], step))
        if len(behind) > _AHEAD:
            note_loss()  # of a step before: the loop does not run ahead of the slice
        if found.spans.now() > 60 * config.minutes:
            break
    while behind:
        note_loss()
    yield


def _reader(
    pw: controller.Controller,
    config: Config,
    language: Language,
    learner: controller.Slice,
    sampler: controller.Slice,
) -> Callable[[PyTree, int], Sample]:
    """Return what reads the learner's weights, and draws a sample with them."""
    learned = pw.fn(checksums, learner)
    used = pw.fn(checksums, sampler)
    draw = pw.fn(functools.partial(sample, length=config.length), sampler)
    window = pw.put(np.int32(language.held_out[: config.context]), sampler)

    @pw.program
    def drawn(model: Transformer, window: jax.Array, key: jax.Array) -> Any:
        return draw(model, window, key), learned(model), used(model)

    def read(model: PyTree, step: int) -> Sample:
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        tokens, before, after = drawn(model, window, key)
        return Sample(step=step, tokens=tokens, learned=before, used=after)

    return read


def _show(config: Config, language: Language, found: Found) -> None:
    """Print the last sample, if it is one of those that are shown."""
    every = max(1, config.steps // _SHOWN)
    *_, before, newest = 0, *(each.step for each in found.samples)
    if newest // every != before // every:
        loss = f", loss {found.losses[-1][1]:.3f}" if found.losses else ""
        text = language.decode(np.asarray(found.samples[-1].tokens))
        print(f"--- weights of step {newest}{loss}\n{printable(text)}", flush=True)


def _settings(config: Config) -> char_lm.Config:
    """Return the settings of the network, its training and its text."""
    names = {field.name for field in dataclasses.fields(char_lm.Config)}
    given = {k: v for k, v in dataclasses.asdict(config).items() if k in names}
    return char_lm.Config(**given)


def draw(config: Config, found: Found) -> None:
    """Draw the loss over time, when weights were read, and when each slice computed."""
    draw_spans(
        found.spans.found,
        Path(config.directory) / "generate_and_learn.png",
        title=f"{found.steps} steps on one slice, {len(found.samples)} samples of "
        f"{config.length} characters on another",
        seconds=_SECONDS_DRAWN,
        curves={"loss": found.losses},
        ylabel="loss, nats per character",
        marks=found.called,
    )


def main(config: Config) -> None:
    began = time.monotonic()
    with controller.local(islands=2, devices=config.devices) as pw:
        found = run(pw, config)
    if config.directory:
        draw(config, found)
    last = [loss for _, loss in found.losses[-_LAST:]]
    print(
        json.dumps(
            {
                "steps": found.steps,
                "samples": len(found.samples),
                "torn": found.torn,
                "learner_busy": round(busy(found.spans.found, "learner", 0.0), 3),
                "sampler_busy": round(busy(found.spans.found, "sampler", 0.0), 3),
                "bits_per_char": float(nats_to_bits(float(np.mean(last)))),
                "strategy": config.strategy,
                "seconds": time.monotonic() - began,
            }
        )
    )


if __name__ == "__main__":
    config_flags.run(main, Config)

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
import time
from typing import Any

import jax
import numpy as np

import replicator
from experiments import config_flags, stdlib_text
from experiments.language.training import (
    Language,
    LanguageSettings,
    batch_shapes,
    make_replicator,
    make_training,
    set_fake_devices,
    train,
    unread,
)
from models.transformer import Transformer, nats_to_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LanguageSettings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      remat: Compute each layer again for its gradient.
      sources: Directory whose Python files are read; the standard library if empty.
    """

    remat: bool = False
    sources: str = ""
    directory: str = "runs/char_lm"


def characters(config: Config) -> Language:
    """Return the text, of which each byte is a token, and the network."""
    learned, held_out = stdlib_text.read_text(config.sources)
    return Language(
        train=learned,
        held_out=held_out,
        decode=lambda tokens: bytes(np.uint8(tokens)).decode(errors="replace"),
        make_model=functools.partial(_network, config),
    )


def problem(rep: replicator.Replicator, *, small: bool = False) -> tuple:
    """Return `step_fn`, `init_fn` and the shapes of a batch, for `replicator plan`.

    Args:
      rep: Where it is to train.
      small: Whether to shrink everything, for `--rehearse`.
    """
    config = Config(
        layers=2 if small else 12,
        width=256 if small else 1024,
        heads=16,
        context=8 if small else 512,
        scan=True,
        global_batch=(1 if small else 8) * rep.mesh.size,
    )
    language = unread(functools.partial(_network, config))
    init_fn, step_fn = make_training(rep, config, language)
    return step_fn, init_fn, batch_shapes(config)


def _network(config: Config, **given: Any) -> Transformer:
    names = ("layers", "width", "heads", "context", "scan", "remat")
    options = {name: getattr(config, name) for name in names}
    return Transformer(vocabulary=stdlib_text.VOCABULARY, **options, **given)


def main(config: Config) -> None:
    began = time.monotonic()
    set_fake_devices(config)
    language = characters(config)
    outcome = train(make_replicator(config, pieces=config.heads), config, language)
    text, learned = language.held_out, language.train
    found = {
        "bits_per_char": nats_to_bits(outcome.loss),
        "gzip_bits_per_char": stdlib_text.gzip_bits(text, learned=learned),
        "seconds": time.monotonic() - began,
        "strategy": config.strategy,
        "devices": jax.device_count(),
        "steps": outcome.steps,
        "training_seconds": outcome.seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    config_flags.run(main, Config)

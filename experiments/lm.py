"""Train a language model on text of yours, or tune one; write it for others to read.

    python -m experiments.lm

A decoder with grouped-query attention, SwiGLU and rotary positions learns byte-level
byte pairs of text files, of a Hugging Face dataset on disk, or of grain's records,
under any strategy. Without flags it learns Python's standard library on eight faked
devices in ten minutes. The last line is one JSON object: `bits_per_byte` of files that
were held out, and what gzip needs for these, after text that was learned from
(`gzip_bits_per_byte`); how the loss of the first 20 steps differs from one device's, in
float32 (`one_device_difference`); and the loss after 50 steps in bfloat16
(`bf16_loss`), beside float32's (`float32_loss`). For users: docs/recipes/lm.md.
"""

import dataclasses
import functools
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

import replicator
from experiments import config_flags, run_folder, stdlib_text
from experiments.config_flags import Count, Whole
from experiments.language import layouts, pretrained, tokens
from experiments.language.documents import Source, read_documents
from experiments.language.training import (
    FREE,
    Language,
    LanguageSettings,
    batch_shapes,
    input_fn_of,
    make_replicator,
    make_training,
    mean_nats,
    set_fake_devices,
    train,
    unread,
)
from experiments.language.windows import held_out_batches
from experiments.strategy_flag import StrategyName
from models.attention import fastest_attention
from models.transformer import Transformer, nats_to_bits
from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.hooks import WriteMetrics
from replicator.nnx import params_of, with_params
from replicator.writers import WandB

_COMPARED = 50  # steps in bfloat16 and float32
_ON_ONE_DEVICE = 20
_REMAT = {"none": False, "layers": True, "dots": "dots"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(LanguageSettings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      text: Folder or file; Python's standard library if empty.
      source: Kind of text: files of UTF-8; what `save_to_disk` of Hugging Face's
        datasets wrote, its column `text`; or ArrayRecord files, read by grain.
      held_out: Folder or file to test on; if empty, a twentieth of the documents.
      tokenizer: A `tokenizer.json`; if empty, one is trained on the text.
      vocabulary: Tokens of the one that is trained.
      layout: Of the network: rotary positions, SwiGLU and rms norms, or learned
        positions, GELU, biases and layer norms.
      kv_heads: Keys and values that heads share, under llama.
      mlp_width: Hidden features of the perceptrons; 0 for 8/3 of the width under llama,
        for 4 times under gpt2.
      tied: Compute logits with the table of embeddings, under llama.
      remat: Compute again for gradients: nothing, whole layers, or all of a layer but
        its products with weights.
      compute_dtype: Of activations; parameters are float32. CPUs emulate bfloat16, so
        auto is float32 there.
      eval_every: Steps between tests on the held-out text; 0 tests at the end alone.
      init_from: Folder of a model to begin with; flags of its sizes are left out.
      export: Folder to write the model to at the end: config.json, tokenizer.json and
        safetensors.
      wandb: Project of Weights & Biases to log to; nowhere if empty.
      compare: Train the first steps again on one device, and in bfloat16.
    """

    strategy: StrategyName = "fsdp"
    fake_devices: Count = 8
    steps: Count = 1600
    global_batch: Count = 16
    directory: str = "runs/lm"
    text: str = ""
    source: Source = "files"
    held_out: str = ""
    tokenizer: str = ""
    vocabulary: Count = 2048
    layout: Literal["llama", "gpt2"] = "llama"
    kv_heads: Count = 2
    mlp_width: Whole = 0
    tied: bool = True
    remat: Literal["none", "layers", "dots"] = "none"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    eval_every: Whole = 0
    init_from: str = ""
    export: str = ""
    wandb: str = ""
    compare: bool = True


FREE_HERE = FREE | {"eval_every", "export", "wandb", "compare"}
_OF_LLAMA = ("kv_heads", "tied")
_OF_NETWORK = ("layout", "layers", "width", "heads", "mlp_width", *_OF_LLAMA)


def arguments_of(config: Config) -> dict[str, Any]:
    """Return the arguments of `Transformer`; `vocabulary` is the tokenizer's.

    Raises:
      ArgumentError: A flag does not fit `--layout` or `--init_from`.
    """
    if config.init_from:
        _require_default(config, (*_OF_NETWORK, "tokenizer", "vocabulary"), "init_from")
        found = pretrained.read_arguments(Path(config.init_from))
        if config.context > found["context"]:
            raise ArgumentError(
                f"`--context` must be at most {found['context']}, that of the model in "
                f"{config.init_from}, got {config.context}. Use {found['context']}."
            )
    else:
        names = ["layers", "width", "heads", "context"]
        if config.layout == "llama":
            names += _OF_LLAMA
        else:
            _require_default(config, _OF_LLAMA, "layout=gpt2")
        found = {name: getattr(config, name) for name in names}
        found |= {"mlp_width": config.mlp_width or None, **layouts.KINDS[config.layout]}
    return found | {"scan": config.scan, "remat": _REMAT[config.remat]}


def _require_default(config: Config, names: tuple[str, ...], flag: str) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in names and value != field.default:
            raise ArgumentError(
                f"`--{field.name}` must not come with `--{flag}`, got {value}. "
                "Leave it out."
            )


def tokenizer_of(config: Config, documents: list[str]) -> Tokenizer:
    """Return the tokenizer of the saved run, of the model, of a file, or a new one."""
    kept = Path(config.checkpoint_dir) / pretrained.TOKENIZER
    if config.checkpoint_dir and run_folder.last_saved(config.checkpoint_dir):
        return tokens.read_tokenizer(kept, flag="checkpoint_dir")
    if config.init_from:
        path = Path(config.init_from) / pretrained.TOKENIZER
        return tokens.read_tokenizer(path, flag="init_from")
    if config.tokenizer:
        return tokens.read_tokenizer(Path(config.tokenizer))
    return tokens.train_tokenizer(documents, config.vocabulary)


def in_dtype(language: Language, dtype: str) -> Language:
    """Return what is learned, with activations of a dtype."""
    make = functools.partial(
        language.make_model,
        compute_dtype=jnp.dtype(dtype),
        attention=fastest_attention(jnp.dtype(dtype)),
    )
    return dataclasses.replace(language, make_model=make)


def dtype_of(config: Config) -> str:
    """Return the dtype of activations: float32 on CPUs unless asked."""
    if config.compute_dtype != "auto":
        return config.compute_dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def problem(rep: replicator.Replicator, *, small: bool = False) -> tuple:
    """Return `step_fn`, `init_fn` and the shapes of a batch, for `replicator plan`.

    A decoder of 16 billion parameters in the layout of Llama, sequences of 2,048
    tokens, 6 to a device: MaxText's, of whose speed on TPU v5e numbers are published.

    Args:
      rep: Where it is to train.
      small: Whether to shrink everything, for `--rehearse`: 2 layers of width 256,
        sequences of 8 tokens, one to a device.
    """
    config = Config(
        layers=2 if small else 32,
        width=256 if small else 4096,
        heads=16 if small else 64,
        context=8 if small else 2048,
        global_batch=(1 if small else 6) * rep.mesh.size,
    )
    make_model = functools.partial(
        Transformer,
        vocabulary=256 if small else 32_000,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        head_size=16 if small else 128,
        mlp_width=256 if small else 28_672,
        context=config.context,
        tied=False,
        remat=True,
        attention="blocks",
        compute_dtype=None if small else jnp.bfloat16,
        **layouts.KINDS["llama"],
    )
    init_fn, step_fn = make_training(rep, config, unread(make_model))
    return step_fn, init_fn, batch_shapes(config)


def read_state(
    rep: replicator.Replicator, config: Config, language: Language
) -> PyTree:
    """Return the first state, with the weights of a folder where `rep` keeps them."""
    state = rep.init(make_training(rep, config, language)[0], seed=config.seed)
    params = pretrained.read_params(Path(config.init_from), state["model"])
    placed = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding),
        params,
        params_of(state["model"]),
    )
    return state | {"model": with_params(state["model"], placed)}


def first_losses(
    rep: replicator.Replicator, config: Config, language: Language, steps: int
) -> np.ndarray:
    """Return the losses of the first steps, [steps]."""
    init_fn, step_fn = make_training(rep, config, language)
    state = rep.init(init_fn, seed=config.seed)
    step, losses = rep.compile(step_fn, accumulate=config.accumulate), []
    with rep.batches(input_fn_of(config, language)) as batches:
        for batch in itertools.islice(batches, steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return np.asarray(losses)


def compared(
    rep: replicator.Replicator, config: Config, language: Language
) -> dict[str, float | None]:
    """Return how the first steps differ on one device, and in bfloat16.

    The schedule is that of the run. A difference is relative to the loss.
    """
    names = ("one_device_difference", "bf16_loss", "float32_loss")
    if not config.compare or config.init_from:
        return dict.fromkeys(names)
    single, half = in_dtype(language, "float32"), in_dtype(language, "bfloat16")
    losses = first_losses(rep, config, single, _COMPARED)
    one = replicator.Replicator(devices=jax.local_devices()[:1])
    expected = first_losses(one, config, single, _ON_ONE_DEVICE)
    differences = np.abs(losses[:_ON_ONE_DEVICE] / expected - 1)
    in_half = first_losses(rep, config, half, _COMPARED)
    found = (differences.max(), in_half[-1], losses[-1])
    return dict(zip(names, map(float, found), strict=True))


def session_options(config: Config, language: Language) -> dict[str, Any]:
    """Return options for what is asked for beside training: tests, W&B."""
    found: dict[str, Any] = {}
    if config.eval_every:
        windows = held_out_batches(language.held_out, batch=64, length=config.context)
        found |= {"eval_fn": mean_nats, "eval_dataset": list(windows)}
        found |= {"eval_every": config.eval_every}
    if config.wandb and jax.process_index() == 0:
        writer = WandB(config.directory or None, project=config.wandb)
        found["hooks"] = [WriteMetrics(writer)]
    return found


def main(config: Config) -> None:
    began = time.monotonic()
    set_fake_devices(config)
    if config.export:
        pretrained.require_new(Path(config.export))
    arguments = arguments_of(config)
    learned, held_out = read_documents(
        config.text, source=config.source, held_out=config.held_out
    )
    tokenizer = tokenizer_of(config, learned)
    vocabulary = arguments.setdefault("vocabulary", tokenizer.get_vocab_size())
    tokens.check_vocabulary(tokenizer, vocabulary)
    language = Language(
        train=tokens.encode(tokenizer, learned),
        held_out=tokens.encode(tokenizer, held_out),
        decode=lambda drawn: tokenizer.decode(
            drawn.tolist(), skip_special_tokens=False
        ),
        make_model=functools.partial(Transformer, **arguments),
        kept={pretrained.TOKENIZER: tokenizer.to_str()},
    )
    sizes = layouts.sizes_of(
        nnx.eval_shape(lambda: language.make_model(rngs=nnx.Rngs(0)))
    )
    pieces = math.gcd(*(sizes[name] for name in layouts.CUT))
    rep = make_replicator(config, pieces=pieces)
    language = in_dtype(language, dtype_of(config))
    outcome = train(
        rep,
        config,
        language,
        free=FREE_HERE,
        init_state=read_state(rep, config, language) if config.init_from else None,
        **session_options(config, language),
    )
    if config.export:
        model = outcome.state["model"]
        pretrained.write_model(model, Path(config.export), tokenizer=tokenizer)
    text, seen = (
        np.frombuffer("".join(part).encode(), np.uint8) for part in (held_out, learned)
    )
    bits = nats_to_bits(outcome.loss) * (len(language.held_out) - 1)
    found = {
        "bits_per_byte": bits / len(text),
        "gzip_bits_per_byte": stdlib_text.gzip_bits(text, learned=seen),
        **compared(rep, config, language),
        "seconds": time.monotonic() - began,
        "strategy": config.strategy,
        "devices": jax.device_count(),
        "steps": outcome.steps,
        "training_seconds": outcome.seconds,
        "compute_dtype": dtype_of(config),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    config_flags.run(main, Config)

"""Train ResNet-50 on ImageNet, or any folder of JPEGs, in large batches.

    python -m experiments.imagenet_resnet50 --data=DIR --fake_devices=0 --directory=RUN
    python -m experiments.imagenet_resnet50 --minutes=6

DIR holds folders of classes or is a TFDS set (`experiments.images.jpegs`). Without it
scikit-learn's digits are written as JPEGs, three of them damaged: the second command
trains on those, with a narrow network, over eight faked devices.

The recipe is that of Goyal et al. 2017 ("Accurate, large minibatch SGD") and He et al.
2019 ("Bag of tricks"): a rate that grows with the batch, a warm-up, a cosine, label
smoothing, no decay of norms and biases, last norms of blocks that begin at 0; or LARS
(You et al. 2017). Norms span all replicas, so the result does not depend on how many
there are. The last line is one JSON object: `accuracy` on all held-out files, each
counted once, `damaged`, the number of files that were left out, and `images_per_s`,
what decoding and cropping alone reach.
"""

import dataclasses
import functools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

import replicator
from experiments import config_flags, run_folder
from experiments.config_flags import (
    Amount,
    Count,
    Decay,
    Discount,
    Rate,
    Settings,
    Whole,
)
from experiments.images.damaged_files import DamagedFiles
from experiments.images.digit_jpegs import DAMAGED, digit_jpegs
from experiments.images.jpeg_batches import JpegBatches, images_per_s
from experiments.images.jpegs import open_jpegs
from experiments.strategy_flag import StrategyName, replicator_for
from models.resnet import TENSOR_PARALLEL, ResNet
from replicator import Sum
from replicator.inputs import InputContext
from replicator.nnx import params_of, value_and_grad, with_params

_RATE_BATCH = 256  # images that the learning rate is given for
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_EVALUATIONS = 12  # along the way
_IMAGENET = 1_281_167  # images to train on
_MEASURED_S = 2.0  # how long decoding alone is measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      data: Folder of the JPEGs; digits are written as JPEGs if empty.
      strategy: How the step and its state are spread over devices.
      fake_devices: How many stand in for others; REPLICATOR_FAKE_DEVICES goes first. 0
        takes those of the machine.
      minutes: After so many the training ends, whatever step it is at; 0 for 6 with
        digits, else no limit.
      epochs: Passes over the training images; 0 for 30 with digits, else 90.
      global_batch: Images per update; 0 for 256 with digits, else 1024.
      accumulate: Microbatches per update.
      resolution: Height and width of what the network sees; 0 for 32 with digits, else
        224.
      depth: Layers of the network: 18, 34, 50, 101 or 152.
      width: Channels of its first stage; 0 for 16 with digits, else 64.
      dtype: Of the activations; auto is float32 on CPUs, which emulate bfloat16, and
        bfloat16 elsewhere.
      optimizer: Momentum, or LARS.
      learning_rate: Peak, for 256 images per update; it grows with the batch.
      warmup_epochs: In which the rate rises from 0.
      weight_decay: Of kernels; norms and biases have none.
      label_smoothing: Share of each label that all classes share.
      crop_area: Smallest share of an image that training sees; 0 for 0.5 with digits,
        else 0.08.
      flip: Mirror half of the training images; auto does so but for digits.
      skip_damaged: How many damaged JPEGs may be left out; one more is an error. 0
        with digits allows the three that are put in.
      workers: Processes that decode; 0 decodes in threads.
      seed: Of initialisation, order and crops.
      checkpoint_dir: Where the run is saved, and goes on from; nowhere if empty.
      directory: Where metrics, `run.json` and the names of damaged files go.
    """

    data: str = ""
    strategy: StrategyName = "data_parallel"
    fake_devices: Whole = 8
    minutes: Amount = 0.0
    epochs: Whole = 0
    global_batch: Whole = 0
    accumulate: Count = 1
    resolution: Whole = 0
    depth: Count = 50
    width: Whole = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    optimizer: Literal["momentum", "lars"] = "momentum"
    learning_rate: Rate = 0.1
    warmup_epochs: Amount = 5.0
    weight_decay: Amount = 1e-4
    label_smoothing: Decay = 0.1
    crop_area: Discount = 0.0
    flip: Literal["auto", "yes", "no"] = "auto"
    skip_damaged: Whole = 0
    workers: Whole = 0
    seed: Whole = 0
    checkpoint_dir: str = ""
    directory: str = "runs/imagenet_resnet50"


# What may differ from sitting to sitting: the state learns the same.
FREE = {
    *("strategy", "fake_devices", "minutes", "skip_damaged", "workers"),
    *("checkpoint_dir", "directory"),
}

# What a flag that is 0 stands for.
_DIGITS = dict(
    minutes=6.0,
    epochs=30,
    global_batch=256,
    resolution=32,
    width=16,
    crop_area=0.5,
    skip_damaged=len(DAMAGED),
)
_PHOTOGRAPHS = dict(
    epochs=90, global_batch=1024, resolution=224, width=64, crop_area=0.08
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of the experiment.

    Attributes:
      accuracy: Share of held-out images whose class was found.
      held_out: Images that were counted.
      steps: Updates that were made, those of earlier sittings included.
      seconds: Of training, compilation and evaluations included.
    """

    accuracy: float
    held_out: int
    steps: int
    seconds: float


def make_training(
    rep: replicator.Replicator, config: Config, *, num_classes: int, images: int
) -> tuple[Any, Any, int]:
    """Return `init_fn`, `step_fn` and the number of steps.

    Args:
      rep: The replicator.
      config: With no 0 that stands for something else.
      num_classes: Number of logits.
      images: How many there are to train on.
    """
    steps = math.ceil(config.epochs * images / config.global_batch)
    optimizer = rep.wrap_optimizer(
        make_optimizer(config, steps=steps, images=images), name="model"
    )
    dtype = _compute_dtype(config)

    def init_fn(key: jax.Array) -> dict:
        model = ResNet(
            config.depth,
            num_classes,
            width=config.width,
            compute_dtype=dtype,
            rngs=nnx.Rngs(key),
        )
        return {"model": model, "opt": optimizer.init(params_of(model))}

    def loss_fn(model: ResNet, batch: dict) -> tuple[jax.Array, jax.Array]:
        logits = model(_scaled(batch["image"]))
        targets = jax.nn.one_hot(batch["label"], num_classes)
        targets = optax.smooth_labels(targets, config.label_smoothing)
        found = jnp.argmax(logits, axis=-1) == batch["label"]
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        return loss, found.astype(jnp.float32).mean()

    def step_fn(state: dict, batch: dict) -> tuple[dict, dict]:
        graded = value_and_grad(loss_fn, has_aux=True)(state["model"], batch)
        ((loss, accuracy), model), grads = graded
        params = params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params)
        model = with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss, "accuracy": accuracy}

    return init_fn, step_fn, steps


def problem(rep: replicator.Replicator, *, small: bool = False) -> tuple:
    """Return `step_fn`, `init_fn` and the shapes of a batch, for `replicator plan`.

    ResNet-50 on 1.28 million photographs, by LARS, 64 of them to a device: a batch of
    32,768 on 512.

    Args:
      rep: Where it is to train.
      small: Whether to shrink everything, for `--rehearse`: depth 18, 32 pixels, one
        image to a device; and momentum, whose traces show gradients.
    """
    count = (1 if small else 64) * rep.mesh.size
    optimizer = "momentum" if small else "lars"
    config = Config(optimizer=optimizer, dtype="float32" if small else "bfloat16")
    config = dataclasses.replace(config, **_PHOTOGRAPHS | {"global_batch": count})
    if small:
        config = dataclasses.replace(config, depth=18, width=32, resolution=32)
    classes = 8 if small else 1000
    init_fn, step_fn, _ = make_training(
        rep, config, num_classes=classes, images=_IMAGENET
    )
    shape = (count, config.resolution, config.resolution, 3)
    batch = {
        "image": jax.ShapeDtypeStruct(shape, jnp.uint8),
        "label": jax.ShapeDtypeStruct((count,), jnp.int32),
    }
    return step_fn, init_fn, batch


def make_optimizer(
    config: Config, *, steps: int, images: int
) -> optax.GradientTransformation:
    """Return momentum with decayed kernels, or LARS, on the schedule of the recipe."""
    peak = config.learning_rate * config.global_batch / _RATE_BATCH
    warm_up = math.ceil(config.warmup_epochs * images / config.global_batch)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, min(warm_up, steps - 1), steps
    )
    if config.optimizer == "lars":
        return optax.lars(
            schedule, config.weight_decay, _kernels, trust_ratio_mask=_kernels
        )
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, _kernels),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )


def train(rep: replicator.Replicator, config: Config, batches: JpegBatches) -> Outcome:
    """Train, evaluating along the way and at the end."""
    init_fn, step_fn, steps = make_training(
        rep,
        config,
        num_classes=batches.jpegs.num_classes,
        images=len(batches.jpegs.sources["train"]),
    )
    jax.eval_shape(init_fn, jax.random.key(config.seed))  # a network that fits
    if kept := config.checkpoint_dir:
        run_folder.claim(kept, config, free=FREE, flag="checkpoint_dir")
    began = time.monotonic()
    with rep.session(
        step_fn,
        _train_input_fn(config, batches),
        init_fn=init_fn,
        steps=steps,
        seed=config.seed,
        accumulate=config.accumulate,
        directory=config.directory,
        eval_fn=_test,
        eval_dataset=functools.partial(
            batches.eval_input_fn, global_batch=config.global_batch
        ),
        eval_every=max(1, steps // _EVALUATIONS),
        **run_folder.saved_in(Path(kept) if kept else None, seconds=60),
    ) as session:
        for batch in session.batches():
            session.step(batch)
            if config.minutes and time.monotonic() - began > 60 * config.minutes:
                break
    found = session.result.evaluation
    assert found is not None  # the last state's
    return Outcome(
        accuracy=float(found["accuracy"]),
        held_out=round(float(found["counted"])),
        steps=session.result.step,
        seconds=time.monotonic() - began,
    )


def open_batches(config: Config) -> JpegBatches:
    """Open the images of `config.data`, with how they are decoded.

    Raises:
      ArgumentError: They are laid out in another way, or there are none.
    """
    names = Path(config.directory) / "damaged.jsonl"
    kept = config.checkpoint_dir
    if not (kept and run_folder.last_saved(kept)):
        names.unlink(missing_ok=True)  # of an earlier run
    return JpegBatches(
        jpegs=open_jpegs(config.data, argument="--data"),
        resolution=config.resolution,
        crop_area=config.crop_area,
        flip=config.flip == "yes",
        damaged=DamagedFiles(names, allowed=config.skip_damaged),
        workers=config.workers,
    )


def filled(config: Config) -> Config:
    """Return settings with values in place of 0 and "auto"; write digits if needed."""
    folder = config.data or str(digit_jpegs())
    flip = config.flip if config.flip != "auto" else "yes" if config.data else "no"
    own = _PHOTOGRAPHS if config.data else _DIGITS
    left_open = {name: own[name] for name in own if not getattr(config, name)}
    return dataclasses.replace(config, data=folder, flip=flip, **left_open)


def _train_input_fn(config: Config, batches: JpegBatches) -> Any:
    return functools.partial(
        batches.train_input_fn, global_batch=config.global_batch, seed=config.seed
    )


def _kernels(params: Any) -> Any:
    """Mark what is decayed: all but norms and biases, which are vectors."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _compute_dtype(config: Config) -> DTypeLike | None:
    if config.dtype == "auto":
        return None if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(config.dtype)


def _scaled(images: jax.Array) -> jax.Array:
    """Return bytes as floats of about zero mean and unit variance."""
    mean, deviation = jnp.asarray(_MEAN), jnp.asarray(_DEVIATION)
    return (images.astype(jnp.float32) / 255.0 - mean) / deviation


def _test(state: dict, batch: dict) -> dict:
    reader = nnx.clone(state["model"])
    reader.eval()
    found = jnp.argmax(reader(_scaled(batch["image"])), axis=-1) == batch["label"]
    # The mask, 0 for damaged files, weighs the rows of `accuracy`.
    return {"accuracy": found.astype(jnp.float32), "counted": Sum(batch["mask"].sum())}


def main(config: Config) -> None:
    began = time.monotonic()
    asked, config = config, filled(config)
    if not asked.data:
        print(
            f"No `--data`: scikit-learn's digits stand in for ImageNet, as JPEGs in "
            f"{config.data}, {len(DAMAGED)} of them damaged.",
            file=sys.stderr,
        )
    if config.fake_devices and "REPLICATOR_FAKE_DEVICES" not in os.environ:
        replicator.fake_devices(config.fake_devices)
    rep = replicator_for(config, tensor_parallel=TENSOR_PARALLEL)
    batches = open_batches(config)
    alone = _train_input_fn(config, batches)(
        InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)
    )
    decoding = images_per_s(alone, seconds=_MEASURED_S)
    outcome = train(rep, config, batches)
    found = {
        "accuracy": outcome.accuracy,
        "held_out": outcome.held_out,
        "damaged": len(batches.damaged.names()),
        "images_per_s": decoding,
        "seconds": time.monotonic() - began,
        "strategy": config.strategy,
        "devices": jax.device_count(),
        "steps": outcome.steps,
        "training_seconds": outcome.seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    config_flags.run(main, Config)

"""Learn to draw images of given classes: BigGAN.

    python -m experiments.biggan --dataset=digits
    tfds build cifar10 --file_format=array_record --data_dir=DIR
    python -m experiments.biggan --dataset=cifar10 --data_dir=DIR --resolution=32

Two models, two optimizers, one step; norms whose statistics span all replicas. The
folder of the run gets `samples.png` (a row for each class, real images beside),
`interpolations.png`, `truncation.png` and, while it trains, `progress.png`; TensorBoard
gets them, too. It goes on from its checkpoint.

The last line is one JSON object. Of digits, a small classifier that is trained on the
same split gives its opinion of images that are drawn to order:

- `sample_accuracy`: share of them that it reads as what was ordered, and `by_class`;
- `fid`: Fréchet distance of its features between drawn and real images, beside
  `fid_halves` of two halves of the real ones; `inception_score` of its probabilities;
- `nearest`: median distance of a drawn image to the nearest that was trained on,
  shifts included, beside `nearest_held_out` of the test split: copies have about 0;
- `truncation`: accuracy and FID of samples within each threshold.

Of other sets there are `fid`, `fid_halves` and `inception_score` of the standard
network where `--inception` names its weights (`experiments/images/inception.py`).

With `--accumulate=k` the norms' statistics are those of a microbatch on all replicas, a
k-th of the global batch, unless `--stats_batch` sets the number of examples they span.
"""

import dataclasses
import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from experiments import config_flags, run_folder
from experiments.config_flags import (
    Amount,
    Count,
    Decay,
    Rate,
    Settings,
    Whole,
    check_batch,
)
from experiments.gan import Gan, orders, rows_of
from experiments.gan_pictures import THRESHOLDS, draw_pictures, draw_samples
from experiments.images.classifier import train_classifier
from experiments.images.image_sets import ImageSet, open_image_set
from experiments.images.inception import Inception
from experiments.images.sample_quality import (
    accuracy_by_class,
    frechet_distance,
    inception_score,
    nearest_distances,
)
from experiments.strategy_flag import StrategyName, named_strategy
from models import biggan
from replicator.errors import ArgumentError
from replicator.hooks import StateCallback, StateEvent, every
from replicator.nnx import BatchNorm, with_params

_MOST_JUDGED = 10_000  # images


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      dataset: `digits`, or a TFDS set that is on disk; the page above prepares one.
      data_dir: Folder of data sets; the usual one if empty.
      resolution: Height and width of the images: 16, 32, 64, 128 or 256.
      channels: The unit of the networks' widths; 96 in the paper.
      latent: Size of a latent vector.
      shared: Size of a class's embedding.
      attention: Height of the features that attend to each other; 0 for none.
      stats: Who shares batch statistics: `all` replicas, each `replica` for itself.
      stats_batch: Share over so many consecutive examples instead; 0 for `stats`.
      bfloat16: Whether activations are.
      global_batch: Examples of an update, of all replicas together.
      accumulate: Microbatches of an update.
      discriminator_steps: Updates of the discriminator to one of the generator.
      steps: Updates of the discriminator.
      progress_every: Updates from one `progress.png` to the next.
      generator_rate: Of the generator's Adam.
      discriminator_rate: Of the discriminator's Adam.
      decay: Of the average of the generator's parameters.
      orthogonal: Weight of the orthogonal regularisation; 1e-4 in the paper.
      truncation: Of the samples that are judged; 0 for none.
      inception: File of the weights of the Inception network; none if empty.
      standing: Batches that standing statistics are means over.
      strategy: How the state lies on devices; data_parallel keeps it whole.
      seed: Of everything.
      directory: Where checkpoints, metrics and pictures go.
    """

    dataset: str = "digits"
    data_dir: str = ""
    resolution: Count = 16
    channels: Count = 8
    latent: Count = 24
    shared: Count = 32
    attention: Whole = 0
    stats: Literal["all", "replica"] = "all"
    stats_batch: Whole = 0
    bfloat16: bool = False
    global_batch: Count = 64
    accumulate: Count = 1
    discriminator_steps: Count = 1
    steps: Count = 4000
    progress_every: Count = 500
    generator_rate: Rate = 2e-4
    discriminator_rate: Rate = 4e-4
    decay: Decay = 0.999
    orthogonal: Amount = 1e-4
    truncation: Amount = 0.0
    inception: str = ""
    standing: Count = 16
    strategy: StrategyName = "data_parallel"
    seed: Whole = 0
    directory: str = "runs/biggan"


# What may differ from sitting to sitting: the state learns the same.
FREE = {
    *("data_dir", "steps", "strategy", "directory", "progress_every"),
    *("truncation", "inception", "standing"),
}


def make_gan(
    rep: replicator.Replicator, config: Config, *, num_classes: int, image_channels: int
) -> Gan:
    """Return both players and their optimizers."""
    shape: dict[str, Any] = {
        "resolution": config.resolution,
        "num_classes": num_classes,
        "channels": config.channels,
        "image_channels": image_channels,
        "attention": config.attention or None,
        "compute_dtype": jnp.bfloat16 if config.bfloat16 else None,
    }
    norm = functools.partial(
        BatchNorm, stats=config.stats, stats_batch=config.stats_batch or None
    )
    return Gan(
        make_generator=functools.partial(
            biggan.Generator,
            latent=config.latent,
            shared=config.shared,
            norm=norm,
            **shape,
        ),
        make_discriminator=functools.partial(biggan.Discriminator, **shape),
        generator_tx=rep.wrap_optimizer(
            optax.adam(config.generator_rate, b1=0.0), name="generator"
        ),
        discriminator_tx=rep.wrap_optimizer(
            optax.adam(config.discriminator_rate, b1=0.0), name="discriminator"
        ),
        latent=config.latent,
        num_classes=num_classes,
        decay=config.decay,
        orthogonal=config.orthogonal,
    )


def problem(rep: replicator.Replicator, *, small: bool = False) -> tuple:
    """Return `step_fn`, `init_fn` and the shapes of a batch, for `replicator plan`.

    BigGAN for 128 pixels (the paper's table 1, channels 96), 4 images to a device: the
    paper's batch of 2,048 on 512.

    Args:
      rep: Where it is to train.
      small: Whether to shrink everything, for `--rehearse`.
    """
    if small:
        config = Config(channels=16, attention=8, global_batch=rep.mesh.size)
    else:
        config = Config(
            resolution=128,
            channels=96,
            latent=120,
            shared=128,
            attention=64,
            bfloat16=True,
            global_batch=4 * rep.mesh.size,
            generator_rate=5e-5,
            discriminator_rate=2e-4,
        )
    gan = make_gan(rep, config, num_classes=8 if small else 1000, image_channels=3)
    size, count = config.resolution, config.global_batch
    batch = {
        "image": jax.ShapeDtypeStruct((count, size, size, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((count,), jnp.int32),
    }
    return gan.step_fn, gan.init_fn, batch


def train(
    rep: replicator.Replicator, config: Config, image_set: ImageSet, gan: Gan
) -> dict:
    """Train from the last checkpoint on; return the state at the end."""
    directory = Path(config.directory)
    with rep.session(
        dataset=functools.partial(
            image_set.train_input_fn,
            global_batch=config.global_batch,
            seed=config.seed,
        ),
        init_fn=gan.init_fn,
        steps=config.steps,
        seed=config.seed,
        accumulate=config.accumulate,
        directory=directory,
        **run_folder.saved_in(directory, seconds=120),
        hooks=[_progress(config, gan)],
    ) as session:
        both = session.compile(gan.step_fn)
        critic = session.compile(gan.critic_step_fn)
        for batch in session.batches():
            is_turn = (session.steps_done + 1) % config.discriminator_steps == 0
            step = both if is_turn else critic
            session.after(step(batch, session.key))
        return jax.device_get(session.state)


def _progress(config: Config, gan: Gan) -> StateCallback:
    def draw(event: StateEvent) -> None:
        # With running statistics: standing ones are for the end.
        state = jax.device_get(event.state)
        generator = with_params(state["generator"], state["average"])
        generator.eval()
        path = Path(config.directory) / "progress.png"
        draw_samples(gan, generator, path, seed=config.seed, step=event.step)

    return StateCallback(draw, every(n_steps=config.progress_every))


def drawn(
    config: Config, gan: Gan, samplers: dict[float, Any], threshold: float, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return about so many images within a threshold, and what each is to be."""
    latents, labels = orders(
        gan,
        columns=max(1, count // gan.num_classes),
        seed=config.seed + 1,
        truncation=threshold or None,
    )
    images = rows_of(samplers[threshold], latents, labels)
    return images.reshape(-1, *images.shape[2:]), labels.ravel()


def judge(
    config: Config,
    gan: Gan,
    image_set: ImageSet,
    samplers: dict[float, Any],
    *,
    reader: Inception | None = None,
) -> dict[str, Any]:
    """Return the scores of drawn images, by the network that fits the set."""
    if config.dataset == "digits":
        return _judged_by_classifier(config, gan, image_set, samplers)
    if reader is None:
        return {}
    real, _ = image_set.arrays("train", limit=_MOST_JUDGED)
    images, _ = drawn(config, gan, samplers, config.truncation, len(real))
    return _statistics(reader.outputs(images), reader.outputs(real)[1])


def _judged_by_classifier(
    config: Config, gan: Gan, image_set: ImageSet, samplers: dict[float, Any]
) -> dict[str, Any]:
    classifier = train_classifier(
        image_set, seed=config.seed, directory=Path(config.directory) / "classifier"
    )
    real, _ = image_set.arrays("train")
    held_out, _ = image_set.arrays("test")
    features = classifier.features(real)

    def opinion(threshold: float) -> tuple[dict[str, Any], np.ndarray]:
        images, labels = drawn(config, gan, samplers, threshold, len(real))
        outputs = classifier.outputs(images)
        read = outputs[0].argmax(axis=1)
        by_class = accuracy_by_class(read, labels, gan.num_classes)
        found = {
            "sample_accuracy": float(np.mean(read == labels)),
            "by_class": [round(float(each), 3) for each in by_class],
        }
        return found | _statistics(outputs, features), images

    found, images = opinion(config.truncation)
    sweep = {str(each): opinion(each)[0] for each in THRESHOLDS}
    shown = _trained_on(config, image_set, epochs=8)
    return found | {
        "nearest": float(np.median(nearest_distances(images, shown))),
        "nearest_held_out": float(np.median(nearest_distances(held_out, shown))),
        "classifier_accuracy": classifier.accuracy,
        "truncation": {
            threshold: {key: each[key] for key in ("sample_accuracy", "fid")}
            for threshold, each in sweep.items()
        },
    }


def _statistics(
    outputs: tuple[np.ndarray, np.ndarray], real: np.ndarray
) -> dict[str, float]:
    """Compare (probabilities, features) of drawn images with features of real ones."""
    probabilities, features = outputs
    return {
        "fid": frechet_distance(features, real),
        "fid_halves": frechet_distance(real[::2], real[1::2]),
        "inception_score": inception_score(probabilities),
    }


def _trained_on(config: Config, image_set: ImageSet, *, epochs: int) -> np.ndarray:
    one = replicator.InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)
    size = len(image_set.sources["train"])
    batches = image_set.train_input_fn(one, global_batch=size, seed=config.seed)
    return np.concatenate(
        [batch["image"] for batch in itertools.islice(batches, epochs)]
    )


def run(config: Config) -> dict[str, Any]:
    """Train, draw and judge; return the numbers of the last line.

    Raises:
      ArgumentError: Flags do not fit each other, or the folder is that of a run with
        others; before anything is trained.
    """
    began = time.monotonic()
    image_set = open_image_set(
        config.dataset, resolution=config.resolution, data_dir=config.data_dir or None
    )
    if config.inception and config.dataset == "digits":
        raise ArgumentError(
            f"`--inception` must be empty for digits, got {config.inception}. Drop it."
        )
    reader = Inception(config.inception) if config.inception else None
    strategy = named_strategy(
        config.strategy, jax.device_count(), tensor_parallel={}, pieces=1
    )
    rep = replicator.Replicator(strategy=strategy)
    gan = make_gan(
        rep,
        config,
        num_classes=image_set.num_classes,
        image_channels=image_set.channels,
    )
    jax.eval_shape(gan.init_fn, jax.random.key(config.seed))  # networks that fit
    check_batch(config, rep.num_replicas)
    run_folder.claim(config.directory, config, free=FREE)
    state = train(rep, config, image_set, gan)
    trained_s = time.monotonic() - began
    thresholds = sorted({0.0, config.truncation, *THRESHOLDS})
    generators = gan.samplers(
        rep,
        state,
        truncations=[each or None for each in thresholds],
        batches=config.standing,
        global_batch=config.global_batch,
        seed=config.seed,
    )
    samplers = dict(zip(thresholds, generators, strict=True))
    draw_pictures(
        gan,
        image_set,
        samplers,
        directory=Path(config.directory),
        seed=config.seed,
        step=config.steps,
    )
    judged = judge(config, gan, image_set, samplers, reader=reader)
    seconds = time.monotonic() - began
    return judged | {"trained_s": trained_s, "seconds": seconds}


def main(config: Config) -> None:
    print(json.dumps(run(config)))


if __name__ == "__main__":
    config_flags.run(main, Config)

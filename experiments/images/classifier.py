"""Train a small network to read an image set: its opinion is what drawn images get.

Inception, the network of the literature, was trained on photographs, and its weights
are not on every machine. What is trained here on the set itself, on its split "train"
alone, gives class probabilities and features to compute the same statistics on
(`sample_quality`), in seconds; they compare with no others.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from experiments.images.image_sets import ImageSet
from models.resnet import ConvNorm
from replicator.base.trees import named_leaves
from replicator.errors import ArgumentError, check_count, check_whole
from replicator.inputs import InputContext
from replicator.nnx import BatchNorm, params_of, value_and_grad, with_params

FEATURES = 64
_CHUNK = 256  # images that are read at a time
_MOST_TESTED = 10_000  # held-out images that the accuracy is measured on
_LEARNING_RATE = 3e-3


class Network(nnx.Module):
    """3×3 convolutions with batch norm, all but the first of stride 2, down to 4×4."""

    def __init__(
        self, resolution: int, *, channels: int, num_classes: int, rngs: nnx.Rngs
    ) -> None:
        """Make an untrained network.

        Args:
          resolution: Height and width of the images, a power of 2 from 8 on.
          channels: Of the images.
          num_classes: Number of logits.
          rngs: Random keys for the parameters.
        """
        halvings = int(math.log2(resolution)) - 2
        widths = [min(16 << stage, FEATURES) for stage in range(halvings)] + [FEATURES]
        units = []
        for stage, width in enumerate(widths):
            units.append(
                ConvNorm(
                    channels,
                    width,
                    kernel=3,
                    stride=1 if stage == 0 else 2,
                    norm=BatchNorm,
                    compute_dtype=None,
                    rngs=rngs,
                )
            )
            channels = width
        self.units = nnx.List(units)
        self.head = nnx.Linear(channels, num_classes, rngs=rngs)

    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> tuple[Float[Array, "batch classes"], Float[Array, "batch features"]]:
        """Return the logits, and the features that they are linear in."""
        x = images
        for unit in self.units:
            x = jax.nn.relu(unit(x, None))
        features = x.mean(axis=(1, 2))
        return self.head(features), features


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classifier:
    """A trained network; `train_classifier` makes it.

    Attributes:
      network: Whose statistics are those of training.
      image_shape: Height, width and channels of what it reads.
      accuracy: Share of held-out images that it reads right.
    """

    network: Network
    image_shape: tuple[int, int, int]
    accuracy: float

    def outputs(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return class probabilities and features of so many images as there are.

        Args:
          images: Float [n, height, width, channels] in [-1, 1], of `image_shape`.

        Returns:
          Probabilities, float32 [n, classes], and features, float32 [n, 64].

        Raises:
          ArgumentError: Images have another shape.
        """
        if images.ndim != 4 or images.shape[1:] != self.image_shape or not len(images):
            raise ArgumentError(
                f"`images` must be [n, {', '.join(map(str, self.image_shape))}], got "
                f"{images.shape}. Train the classifier on images of that size."
            )
        return _outputs(self.network, images)

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        """Return the first of `outputs`: float32 [n, classes]."""
        return self.outputs(images)[0]

    def features(self, images: np.ndarray) -> np.ndarray:
        """Return the second of `outputs`: float32 [n, 64]."""
        return self.outputs(images)[1]


def train_classifier(
    image_set: ImageSet,
    *,
    seed: int = 0,
    steps: int = 1000,
    global_batch: int = 64,
    directory: str | os.PathLike[str] | None = None,
) -> Classifier:
    """Train a network on a set's split "train", or read one that was.

    It runs on one device, whatever there are: the same network for the same arguments.

    Args:
      image_set: What to read, with the augmentation that it has.
      seed: Of initialisation, order and augmentation.
      steps: Updates.
      global_batch: Images per update.
      directory: Folder to keep the network in; one there that was trained otherwise,
        or on another set, is trained anew. None keeps nothing.

    Returns:
      The classifier, with its accuracy on up to 10,000 images of the split "test".

    Raises:
      ArgumentError: An argument is no whole number, or below 1.
      OSError: The network cannot be read or written.
    """
    check_whole("seed", seed)
    check_count("steps", steps)
    check_count("global_batch", global_batch)
    made_for = _describe(image_set, seed=seed, steps=steps, global_batch=global_batch)
    path = None if directory is None else _path(Path(directory), image_set)
    network = Network(
        image_set.resolution,
        channels=image_set.channels,
        num_classes=image_set.num_classes,
        rngs=nnx.Rngs(seed),
    )
    kept = None if path is None else _load(path, network, made_for)
    if kept is not None:
        network, accuracy = kept
    else:
        network = _train(network, _batches(image_set, seed, global_batch), steps)
        accuracy = _accuracy(network, image_set)
        if path is not None:
            _save(path, network, accuracy, made_for)
    size = image_set.resolution
    return Classifier(
        network=network,
        image_shape=(size, size, image_set.channels),
        accuracy=accuracy,
    )


def _batches(image_set: ImageSet, seed: int, global_batch: int) -> Iterator[dict]:
    one = InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)
    return iter(image_set.train_input_fn(one, global_batch=global_batch, seed=seed))


def _train(network: Network, batches: Iterator[dict], steps: int) -> Network:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, _LEARNING_RATE, steps // 10, steps
    )
    optimizer = optax.adamw(schedule, weight_decay=1e-3)

    @functools.partial(jax.jit, donate_argnums=0)
    def step_fn(state: dict, batch: dict) -> dict:
        (_, network), grads = value_and_grad(_loss)(state["network"], batch)
        params = params_of(network)
        updates, opt = optimizer.update(grads, state["opt"], params)
        network = with_params(network, optax.apply_updates(params, updates))
        return {"network": network, "opt": opt}

    state = {"network": network, "opt": optimizer.init(params_of(network))}
    for batch in itertools.islice(batches, steps):
        state = step_fn(state, batch)
    return jax.device_get(state["network"])


def _loss(network: Network, batch: dict) -> Array:
    logits, _ = network(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


def _accuracy(network: Network, image_set: ImageSet) -> float:
    images, labels = image_set.arrays("test", limit=_MOST_TESTED)
    probabilities, _ = _outputs(network, images)
    return float(np.mean(probabilities.argmax(axis=1) == labels))


def _outputs(network: Network, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and features, of so many images at a time."""
    chunks = []
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK].astype(np.float32)
        # Filled up, so that every chunk runs the program that is compiled.
        rest = np.zeros((_CHUNK - len(chunk), *chunk.shape[1:]), np.float32)
        outputs = _read_chunk(network, np.concatenate([chunk, rest]))
        chunks.append([each[: len(chunk)] for each in jax.device_get(outputs)])
    probabilities, features = map(np.concatenate, zip(*chunks, strict=True))
    return probabilities, features


@jax.jit
def _read_chunk(network: Network, images: Array) -> tuple[Array, Array]:
    reader = nnx.clone(network)
    reader.eval()
    logits, features = reader(images)
    return jax.nn.softmax(logits), features


def _path(directory: Path, image_set: ImageSet) -> Path:
    name = image_set.name.replace("/", "-")
    return directory / f"classifier-{name}-{image_set.resolution}.npz"


def _describe(image_set: ImageSet, **training: int) -> str:
    """Write down what a network was trained on, and how."""
    first = image_set.sources["test"][0]["image"]
    about = {
        "name": image_set.name,
        "shape": first.shape,
        "classes": image_set.num_classes,
        "examples": len(image_set.sources["train"]),
        "augment": image_set.augment,
        "first": zlib.crc32(first.tobytes()),  # of the data in that folder
        **training,
    }
    return json.dumps(about, sort_keys=True)


def _load(path: Path, like: Network, made_for: str) -> tuple[Network, float] | None:
    """Return the network in a file and its accuracy, if it is the one meant."""
    if not path.exists():
        return None
    with np.load(path) as file:
        if str(file["made_for"]) != made_for:
            return None
        leaves = [file[name] for name, _ in named_leaves(like)]
        network = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return network, float(file["accuracy"])


def _save(path: Path, network: Network, accuracy: float, made_for: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another run may read while this one writes.
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    leaves = dict(named_leaves(network))
    np.savez(draft, made_for=made_for, accuracy=accuracy, **leaves)
    draft.replace(path)

"""Open a set of labelled images to learn to draw: the digits, or a TFDS set on disk.

TFDS sets are read from their files alone: neither their code, nor TensorFlow, nor the
network is needed. The files must be in the array_record format, which one command
prepares, once, where TensorFlow is installed:

    tfds build cifar10 --file_format=array_record --data_dir=DIR

`imagenet2012` wants its archives in DIR/downloads/manual first, as TFDS does. Images
are cropped to the square in their middle, and resized by bilinear interpolation, with
antialiasing where they shrink.
"""

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grain
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.digits import NUM_CLASSES, default_data_dir, digits_source
from experiments.images.tfds_files import Split, build_command, open_tfds_files
from experiments.pipeline_batches import pipeline_batches
from replicator.errors import ArgumentError, check_text, check_word
from replicator.inputs import InputContext

Augment: TypeAlias = Literal["flip", "shift", "none"]
Example: TypeAlias = dict[str, Any]
"""{"image": float32 [resolution, resolution, channels], "label": int32}."""

RESOLUTIONS = (8, 16, 32, 64, 128, 256)
_TFDS_DATA_DIR = "~/tensorflow_datasets"  # the default of TFDS
_GREY_LEVELS = 16  # of the digits, 0 to 16 in the files
_LOOKED_AT = 10_000  # images, for those that are shown
_BACKGROUND = -1.0  # of the digits, where a shift uncovers it
# A mirrored digit or letter is none.
_WRITING = {"digits", "uci_digits", "mnist", "emnist", "kmnist", "svhn_cropped"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Labelled images of one size; `open_image_set` makes it.

    Attributes:
      name: As it was opened.
      num_classes: Labels are 0 to `num_classes - 1`.
      resolution: Height and width, in pixels.
      channels: 1 (grey) or 3 (red, green, blue).
      augment: What training changes at random: `"flip"` left and right for one image
        in two; `"shift"` left or right by up to an eighth of the image, with
        background where nothing is; or `"none"`.
      sources: Examples of each split for random access, not augmented.
      threads: That decode examples while training; 0 where they are in memory.
    """

    name: str
    num_classes: int
    resolution: int
    channels: int
    augment: Augment
    # Not shown: grain writes out what it maps, and would write all images.
    sources: Mapping[Split, Sequence[Example]] = dataclasses.field(repr=False)
    threads: int

    def train_input_fn(
        self, context: InputContext, *, global_batch: int, seed: int
    ) -> grain.IterDataset:
        """Yield full batches for ever, shuffled and augmented anew in each epoch.

        The order of examples, and how each is changed, depends on `seed` alone: it is
        the same for any number of pipelines.

        Args:
          context: Which pipeline reads.
          global_batch: Examples per update.
          seed: Of the order and of the augmentation.

        Returns:
          An endless dataset of {"image": float32 [b, resolution, resolution, channels]
          in [-1, 1], "label": int32 [b]}, b of this pipeline.

        Raises:
          ArgumentError: The batch does not divide evenly over pipelines; or, later, an
            example is of none of the classes.
        """
        source = self.sources["train"]
        examples = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
        examples = examples.map(self._checked)
        if self.augment != "none":
            examples = examples.random_map(_AUGMENT[self.augment])
        return pipeline_batches(
            examples, context, global_batch=global_batch, threads=self.threads
        )

    def arrays(
        self, split: Split, *, limit: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read a split at once, in its order and not augmented, for statistics.

        Args:
          split: "train" or "test".
          limit: Examples to read, from the first on; all if None.

        Returns:
          Images, float32 [n, resolution, resolution, channels] in [-1, 1], and labels,
          int32 [n].

        Raises:
          ArgumentError: An example is of none of the classes.
        """
        source = self.sources[split]
        size = len(source) if limit is None else min(limit, len(source))
        shape = (size, self.resolution, self.resolution, self.channels)
        images, labels = np.empty(shape, np.float32), np.empty(size, np.int32)
        for index in range(size):
            example = self._checked(source[index])
            images[index], labels[index] = example["image"], example["label"]
        return images, labels

    def _checked(self, example: Example) -> Example:
        # The one-hot code of such a label is all zeros: nothing would show the mistake.
        if not 0 <= example["label"] < self.num_classes:
            raise ArgumentError(
                f"`sources` must hold labels from 0 to {self.num_classes - 1}, got "
                f"{example['label']} in `{self.name}`. Leave out what has no class."
            )
        return example


def open_image_set(
    name: str,
    *,
    resolution: int = 16,
    data_dir: str | os.PathLike[str] | None = None,
    augment: Augment | None = None,
) -> ImageSet:
    """Open "digits", or a TFDS set that is on disk.

    Args:
      name: "digits" (8×8 in 17 greys, 1,437 to train on and 360 for testing), or a
        TFDS set or one of its configurations: "cifar10", "cifar10_corrupted/fog_1".
        Of several versions on disk the newest is read.
      resolution: Height and width to resize to: 8, 16, 32, 64, 128 or 256.
      data_dir: Folder of data sets. None is the user's cache for digits, which are
        written there if they are not, and TFDS's own for others.
      augment: Changes in training, as in `ImageSet`; None shifts writing and flips
        all else.

    Returns:
      The set; its split "test" is the one called "validation" where there is one, as
      the test images of `imagenet2012` have no labels.

    Raises:
      ArgumentError: The set is not on disk, or not one of labelled images in
        array_record files; or an argument is none of those above.

    >>> digits = open_image_set("digits", resolution=16)
    >>> images, labels = digits.arrays("test")
    >>> images.shape, labels.shape
    ((360, 16, 16, 1), (360,))
    """
    check_text("name", name)
    if isinstance(resolution, bool) or resolution not in RESOLUTIONS:
        raise ArgumentError(
            f"`resolution` must be one of {', '.join(map(str, RESOLUTIONS))}, got "
            f"{resolution!r}. Use 16 for digits, 32 for `cifar10`."
        )
    if augment is None:
        augment = "shift" if name.partition("/")[0] in _WRITING else "flip"
    check_word("augment", augment, ("flip", "shift", "none"))
    if name == "digits":
        return _open_digits(resolution, data_dir or default_data_dir(), augment)
    root = Path(data_dir or os.environ.get("TFDS_DATA_DIR", _TFDS_DATA_DIR))
    return _open_tfds(name, resolution, root.expanduser(), augment)


def real_images(image_set: ImageSet, classes: int, each: int) -> np.ndarray:
    """Return images to show of the first classes; white where there are too few.

    Returns:
      Pixels from -1 to 1, float32 [classes, each, height, width, channels].
    """
    images, labels = image_set.arrays("train", limit=_LOOKED_AT)
    found = np.ones((classes, each, *images.shape[1:]), np.float32)
    for label in range(classes):
        some = images[labels == label][:each]
        found[label, : len(some)] = some
    return found


def _open_digits(
    resolution: int, data_dir: str | os.PathLike[str], augment: Augment
) -> ImageSet:
    def examples(split: Split) -> list[Example]:
        # Resized once: they are small enough to be kept.
        return [
            _example(_digit(each["image"]), each["label"], resolution)
            for each in digits_source(split, data_dir=data_dir)
        ]

    return ImageSet(
        name="digits",
        num_classes=NUM_CLASSES,
        resolution=resolution,
        channels=1,
        augment=augment,
        sources={"train": examples("train"), "test": examples("test")},
        threads=0,
    )


def _open_tfds(name: str, resolution: int, root: Path, augment: Augment) -> ImageSet:
    files = open_tfds_files(_newest_version(name, root), name=name)
    return ImageSet(
        name=name,
        num_classes=files.num_classes,
        resolution=resolution,
        channels=files.channels,
        augment=augment,
        sources={
            split: _Decoded(
                files.source(split),
                resolution=resolution,
                mode="L" if files.channels == 1 else "RGB",
            )
            for split in files.splits
        },
        threads=min(8, os.cpu_count() or 1),
    )


class _Decoded(Sequence[Example]):
    """A TFDS data source as examples, decoded when they are asked for."""

    def __init__(self, source: Any, *, resolution: int, mode: str) -> None:
        self._source, self._resolution, self._mode = source, resolution, mode

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        example = self._source[index]
        pixels = example["image"]
        if isinstance(pixels, bytes):
            image = Image.open(io.BytesIO(pixels)).convert(self._mode)
        else:
            image = Image.fromarray(pixels[..., 0] if self._mode == "L" else pixels)
        return _example(image, example["label"], self._resolution)


def _digit(pixels: np.ndarray) -> Image.Image:
    greys = pixels[..., 0].astype(np.float32) * np.float32(255 / _GREY_LEVELS)
    return Image.fromarray(greys)


def _example(image: Image.Image, label: Any, resolution: int) -> Example:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    resized = image.resize(
        (resolution, resolution),
        Image.Resampling.BILINEAR,
        box=(left, top, left + side, top + side),
    )
    pixels = np.asarray(resized, np.float32).reshape(resolution, resolution, -1)
    return {"image": pixels / np.float32(127.5) - 1, "label": np.int32(label)}


def _flipped(example: Example, rng: np.random.Generator) -> Example:
    if rng.random() < 0.5:
        return example
    return {**example, "image": example["image"][:, ::-1]}


def _shifted(example: Example, rng: np.random.Generator) -> Example:
    # Sideways alone: the digits fill their height, and moved up or down they would be
    # cut. (Fréchet distance of what is shifted to the digits, by our classifier at 16
    # pixels: 0.11 sideways, where that of their halves is 0.16; 9.1 both ways.)
    image = example["image"]
    size = len(image)
    left = int(rng.integers(-(size // 8), size // 8 + 1))
    moved = np.full_like(image, _BACKGROUND)
    moved[:, max(left, 0) : size + left] = image[:, max(-left, 0) : size - left]
    return {**example, "image": moved}


_AUGMENT = {"flip": _flipped, "shift": _shifted}


def _newest_version(name: str, root: Path) -> Path:
    """Return the folder of a set's files, or raise an error with what is on disk."""
    found: dict[str, list[Path]] = {}
    for pattern in ("*/*/dataset_info.json", "*/*/*/dataset_info.json"):
        for path in root.glob(pattern):
            if tfds.core.Version.is_valid(path.parent.name):
                called = path.parent.parent.relative_to(root).as_posix()
                found.setdefault(called, []).append(path.parent)
    if name not in found:
        raise ArgumentError(
            f"`name` must be 'digits' or a TFDS set that is on disk, got {name!r}; in "
            f"{root} there is {', '.join(sorted(found)) or 'none'}. Run "
            f"`{build_command(name, root)}`."
        )
    return max(found[name], key=lambda path: tfds.core.Version(path.name))

"""Decode JPEGs, crop them at random or in the middle, and cut them into batches.

Training sees a part of each image, of random place, area and aspect, and for
photographs half of them mirrored (Szegedy et al. 2015, "Going deeper with
convolutions", §6); a test sees the middle. Batches are bytes, a quarter of what floats
would be on their way to the device, which scales them.
"""

import dataclasses
import functools
import io
import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import grain
import numpy as np
from PIL import Image, UnidentifiedImageError

from experiments.images.damaged_files import DamagedFiles
from experiments.images.jpegs import Jpeg, JpegSet
from experiments.pipeline_batches import pipeline_batches
from replicator.errors import ArgumentError
from replicator.inputs import InputContext

_MIDDLE = 0.875  # of the shorter side, which a test sees
_WIDEST = math.log(4 / 3)  # of training crops, width to height; the narrowest is 3/4
_TRIES = 10  # at a crop that lies within the image
_MOST_THREADS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class JpegBatches:
    """Batches of a set of JPEGs.

    Attributes:
      jpegs: The images.
      resolution: Height and width of what is cropped, in pixels.
      crop_area: Smallest share of an image's area that training sees, from 0 to 1.
      flip: Whether half of the training images are mirrored.
      damaged: What is left out.
      workers: Processes that decode for training; 0 decodes in threads of this one.
    """

    jpegs: JpegSet
    resolution: int
    crop_area: float
    flip: bool
    damaged: DamagedFiles
    workers: int = 0

    def train_input_fn(
        self, context: InputContext, *, global_batch: int, seed: int
    ) -> grain.IterDataset:
        """Yield full batches for ever, shuffled and cropped anew in each epoch.

        Order and crops depend on `seed` alone, for any number of pipelines. The place
        of a damaged image is taken by the next one.

        Args:
          context: Which pipeline reads.
          global_batch: Images per update.
          seed: Of the order and the crops.

        Returns:
          An endless dataset of {"image": uint8 [b, resolution, resolution, 3],
          "label": int32 [b]}, b of this pipeline.

        Raises:
          ArgumentError: The batch does not divide evenly over pipelines; or, later,
            too many images are damaged, or a label is of no class.
        """
        whole = _WholeImages(self.jpegs, self.damaged)
        crop = functools.partial(
            _random_example,
            resolution=self.resolution,
            crop_area=self.crop_area,
            flip=self.flip,
        )
        images = grain.MapDataset.source(whole).seed(seed).shuffle().repeat()
        threads = 0 if self.workers else _threads()
        batches = pipeline_batches(
            images.random_map(crop), context, global_batch=global_batch, threads=threads
        )
        if not self.workers:
            return batches
        options = grain.MultiprocessingOptions(num_workers=self.workers)
        return batches.mp_prefetch(options)

    def eval_input_fn(
        self, context: InputContext, *, global_batch: int
    ) -> grain.IterDataset:
        """Yield the test images once, in order; the last batch may be smaller.

        Returns:
          A dataset of batches as in `train_input_fn`, with "mask": float32 [b], 0 in
          the places of damaged images and 1 elsewhere.
        """
        images = grain.MapDataset.source(self.jpegs.sources["test"]).map(self._tested)
        return pipeline_batches(
            images, context, global_batch=global_batch, threads=_threads()
        )

    def _tested(self, jpeg: Jpeg) -> dict[str, Any]:
        size = (self.resolution, self.resolution)
        image = decoded(jpeg, self.damaged)
        pixels = (
            np.zeros((*size, 3), np.uint8)
            if image is None
            else np.asarray(
                image.resize(size, Image.Resampling.BILINEAR, _middle(image))
            )
        )
        return {
            "image": pixels,
            "label": _checked(jpeg, self.jpegs.num_classes),
            "mask": np.float32(image is not None),
        }


def decoded(jpeg: Jpeg, damaged: DamagedFiles) -> Image.Image | None:
    """Return an image in colours; None if it is damaged, which is noted.

    Raises:
      ArgumentError: Too many are damaged.
    """
    try:
        return Image.open(io.BytesIO(jpeg.data)).convert("RGB")
    except UnidentifiedImageError:
        damaged.add(jpeg.name, f"{len(jpeg.data)} bytes that begin no image")
    # What its readers stumble over: OSError, but also SyntaxError, ValueError,
    # IndexError or struct.error. No file is read here, so it is the bytes.
    except Exception as reason:
        damaged.add(jpeg.name, str(reason))
    return None


def images_per_s(batches: Iterable[dict[str, Any]], *, seconds: float) -> float:
    """Return how many images a pipeline decodes and crops in a second, on its own.

    Args:
      batches: An endless dataset of the pipeline; its first batch, with which it
        starts, is left out.
      seconds: How long to read.
    """
    stream = iter(batches)
    next(stream)
    began, images = time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds or not images:
        images += len(next(stream)["label"])
    return images / passed


def crop_box(
    width: int, height: int, rng: np.random.Generator, *, crop_area: float
) -> tuple[float, float, float, float]:
    """Draw a part of an image: left, top, right and bottom, in pixels.

    Its share of the area is uniform from `crop_area` to 1, its aspect log-uniform from
    3/4 to 4/3. An image so narrow that none is found within it gives its middle.
    """
    for _ in range(_TRIES):
        area = width * height * rng.uniform(crop_area, 1)
        aspect = math.exp(rng.uniform(-_WIDEST, _WIDEST))
        wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and high <= height:
            left, top = rng.uniform(0, width - wide), rng.uniform(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class _WholeImages(Sequence[tuple[Image.Image, np.int32]]):
    """Decoded training images; the next one stands in the place of a damaged one."""

    def __init__(self, jpegs: JpegSet, damaged: DamagedFiles) -> None:
        self._jpegs, self._damaged = jpegs.sources["train"], damaged
        self._num_classes = jpegs.num_classes

    def __len__(self) -> int:
        return len(self._jpegs)

    def __getitem__(self, index: Any) -> Any:
        for place in range(index, index + len(self)):
            jpeg = self._jpegs[place % len(self)]
            image = decoded(jpeg, self._damaged)
            if image is not None:
                return image, _checked(jpeg, self._num_classes)
        raise ArgumentError(
            f"`--data` must hold whole JPEGs, got {len(self)} to train on that are all "
            "damaged. Copy them again."
        )


def _random_example(
    whole: tuple[Image.Image, np.int32],
    rng: np.random.Generator,
    *,
    resolution: int,
    crop_area: float,
    flip: bool,
) -> dict[str, Any]:
    image, label = whole
    pixels = np.asarray(
        image.resize(
            (resolution, resolution),
            Image.Resampling.BILINEAR,
            box=crop_box(*image.size, rng, crop_area=crop_area),
        )
    )
    if flip and rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    return {"image": pixels, "label": label}


def _middle(image: Image.Image) -> tuple[float, float, float, float]:
    reach = _MIDDLE * min(image.size) / 2
    x, y = image.width / 2, image.height / 2
    return x - reach, y - reach, x + reach, y + reach


def _checked(jpeg: Jpeg, num_classes: int) -> np.int32:
    # The one-hot code of such a label is all zeros: nothing would show the mistake.
    if not 0 <= jpeg.label < num_classes:
        raise ArgumentError(
            f"`--data` must hold labels from 0 to {num_classes - 1}, got {jpeg.label} "
            f"of {jpeg.name}. Leave out what has no class."
        )
    return np.int32(jpeg.label)


def _threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)

"""Labelled images in the files of a TFDS set, read without TensorFlow or its code.

The files must be in the array_record format, which one command prepares, once, where
TensorFlow is installed: `build_command` returns it.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorflow_datasets as tfds

from replicator.errors import ArgumentError

Split: TypeAlias = Literal["train", "test"]

# Without types, as TFDS leaves the shape of a feature open to all.
_PIXELS: Any = (tfds.features.Image, tfds.features.Tensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsFiles:
    """Files of a set of labelled images; `open_tfds_files` makes it.

    Attributes:
      builder: Of TFDS.
      channels: 1 (grey) or 3 (red, green, blue).
      num_classes: Number of labels.
      splits: The name in TFDS of each split; "validation" is the test split where there
        is one, as the test images of `imagenet2012` have no labels.
      encoded: Whether images are files of their own (JPEG, PNG) instead of arrays.
    """

    builder: Any
    channels: int
    num_classes: int
    splits: Mapping[Split, str]
    encoded: bool

    def source(self, split: Split) -> Any:
        """Open a split for random access; images that are encoded stay bytes."""
        # Pillow decodes: TFDS would leave a grey JPEG among coloured ones grey.
        decoders = {"image": tfds.decode.SkipDecoding()} if self.encoded else None
        return self.builder.as_data_source(
            split=self.splits[split], decoders=decoders, file_format="array_record"
        )


def open_tfds_files(folder: Path, *, name: str, argument: str = "name") -> TfdsFiles:
    """Open the files of one version of a TFDS set.

    Args:
      folder: Of the version: it holds `dataset_info.json`.
      name: Of the set, for errors.
      argument: That names the set, for errors.

    Raises:
      ArgumentError: It is not a set of labelled images in array_record files, with a
        split to train on and one that is held out.
    """
    builder: Any = tfds.builder_from_directory(folder)
    _check_format(argument, name, builder, folder)
    channels, num_classes = _check_features(argument, name, builder.info.features)
    return TfdsFiles(
        builder=builder,
        channels=channels,
        num_classes=num_classes,
        splits=_check_splits(argument, name, builder.info.splits),
        encoded=isinstance(builder.info.features["image"], tfds.features.Image),
    )


def build_command(name: str, root: Path | str) -> str:
    """Return the command that writes a set's files into a folder of data sets."""
    return f"tfds build {name} --file_format=array_record --data_dir={root}"


def _check_format(argument: str, name: str, builder: Any, folder: Path) -> None:
    formats = {each.value for each in builder.info.available_file_formats()}
    if "array_record" not in formats:
        raise ArgumentError(
            f"`{argument}` must be a set in array_record files, got {name!r}, whose "
            f"files in {folder} are {', '.join(sorted(formats))}. Run "
            f"`{build_command(name, 'DIR')}` with another folder."
        )


def _check_features(argument: str, name: str, features: Any) -> tuple[int, int]:
    """Return the numbers of channels and of classes."""
    image: Any = dict(features).get("image")
    label: Any = dict(features).get("label")
    is_image = (
        isinstance(image, _PIXELS)
        and len(image.shape) == 3
        and image.shape[-1] in (1, 3)
        and image.np_dtype == np.uint8
    )
    is_label = isinstance(label, tfds.features.ClassLabel)
    num_classes = label.num_classes if is_label else None
    if not is_image or not num_classes:
        raise ArgumentError(
            f"`{argument}` must be a set with features `image` (uint8, of 1 or 3 "
            f"channels) and `label` (of classes), got {name!r} with "
            f"{_in_words(features)}. Use one like `cifar10`."
        )
    return image.shape[-1], num_classes


def _in_words(features: Any) -> str:
    return ", ".join(
        f"`{name}` ({type(each).__name__})" for name, each in dict(features).items()
    )


def _check_splits(argument: str, name: str, splits: Any) -> dict[Split, str]:
    held_out = [each for each in ("validation", "test") if each in splits]
    if "train" not in splits or not held_out:
        raise ArgumentError(
            f"`{argument}` must be a set with splits `train`, and `validation` or "
            f"`test`, got {name!r} with {', '.join(f'`{each}`' for each in splits)}. "
            "Use one like `cifar10`."
        )
    return {"train": "train", "test": held_out[0]}

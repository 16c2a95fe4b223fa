"""JPEGs and their classes, from folders or from the files of a TFDS set.

Folders are laid out as ImageNet usually is: a folder for each class, in `train` and in
`val` (or `validation`, or `test`), whose names in their order are the labels:

    DIR/train/n01440764/n01440764_10026.JPEG
    DIR/val/n01440764/ILSVRC2012_val_00000293.JPEG

A TFDS set is the folder of one version, which holds `dataset_info.json`, in the
array_record format (`experiments.images.tfds_files`). What is read is encoded still:
`experiments.images.jpeg_batches` decodes.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.images.tfds_files import Split, TfdsFiles, open_tfds_files
from replicator.errors import ArgumentError

_HELD_OUT = ("val", "validation", "test")
_SUFFIXES = {".jpg", ".jpeg"}  # or in capitals


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Jpeg:
    """One image, not decoded.

    Attributes:
      name: Of its file; or its place in the set.
      data: The file's bytes.
      label: Its class, from 0.
    """

    name: str
    data: bytes
    label: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class JpegSet:
    """JPEGs of known classes; `open_jpegs` makes it.

    Attributes:
      num_classes: Labels are 0 to `num_classes - 1`.
      sources: The images of each split, for random access.
    """

    num_classes: int
    # Not shown: grain writes out what it maps, and would list all files.
    sources: Mapping[Split, Sequence[Jpeg]] = dataclasses.field(repr=False)


def open_jpegs(folder: str | os.PathLike[str], *, argument: str = "folder") -> JpegSet:
    """Open folders of classes, or a TFDS set; no image is read yet.

    Args:
      folder: Of the images, laid out as above.
      argument: That names the folder, for errors.

    Raises:
      ArgumentError: It is laid out otherwise; a class has no JPEG; the splits have
        different classes; or the TFDS set is not one of encoded images with labels.
      OSError: It cannot be read.
    """
    path = Path(folder)
    if (path / "dataset_info.json").exists():
        return _open_tfds(path, argument)
    train = path / "train"
    held_out = [path / name for name in _HELD_OUT if (path / name).is_dir()]
    if not train.is_dir() or not held_out:
        found = sorted(each.name for each in path.iterdir()) if path.is_dir() else []
        raise ArgumentError(
            f"`{argument}` must be a folder with `train` and `val`, each with a folder "
            f"of JPEGs for each class, or one with `dataset_info.json` of TFDS, got "
            f"{path} with {', '.join(found[:5]) or 'nothing'}. Name another."
        )
    sources = [ClassFolders(train, argument), ClassFolders(held_out[0], argument)]
    _check_same_classes(argument, *sources)
    return JpegSet(
        num_classes=len(sources[0].classes),
        sources={"train": sources[0], "test": sources[1]},
    )


class ClassFolders(Sequence[Jpeg]):
    """The JPEGs of one split, in the order of their classes and names.

    Attributes:
      folder: Of the split.
      classes: Names of the classes, in the order of their labels.
    """

    def __init__(self, folder: Path, argument: str = "folder") -> None:
        """List the files.

        Args:
          folder: Of the split: one folder for each class.
          argument: That names the images, for errors.

        Raises:
          ArgumentError: There is no class, or one without a JPEG.
        """
        self.folder = folder
        self.classes = sorted(each.name for each in os.scandir(folder) if each.is_dir())
        if not self.classes:
            raise ArgumentError(
                f"`{argument}` must have a folder of JPEGs for each class in "
                f"`{folder.name}`, got none in {folder}. Sort the images by class."
            )
        self._files: list[tuple[int, str]] = []
        for label, name in enumerate(self.classes):
            files = sorted(filter(_is_jpeg, os.listdir(folder / name)))
            if not files:
                raise ArgumentError(
                    f"`{argument}` must have JPEGs of each class, got none in "
                    f"{folder / name}. Add some, or delete the folder in each split."
                )
            self._files += [(label, file) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        label, file = self._files[index]
        path = self.folder / self.classes[label] / file
        return Jpeg(name=str(path), data=path.read_bytes(), label=label)


class TfdsJpegs(Sequence[Jpeg]):
    """The images of one split of a TFDS set."""

    def __init__(self, files: TfdsFiles, split: Split) -> None:
        """Open the split."""
        self._source, self._split = files.source(split), split

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        example = self._source[index]
        name = example.get("file_name", f"{self._split}[{index}]")
        return Jpeg(
            name=name.decode() if isinstance(name, bytes) else name,
            data=example["image"],
            label=int(example["label"]),
        )


def _open_tfds(folder: Path, argument: str) -> JpegSet:
    files = open_tfds_files(folder, name=folder.parent.name, argument=argument)
    if not files.encoded:
        raise ArgumentError(
            f"`{argument}` must be a set of encoded images, got {folder}, whose images "
            "are arrays. Use one like `imagenet2012`."
        )
    return JpegSet(
        num_classes=files.num_classes,
        sources={split: TfdsJpegs(files, split) for split in files.splits},
    )


def _is_jpeg(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _SUFFIXES


def _check_same_classes(argument: str, train: ClassFolders, test: ClassFolders) -> None:
    for one, other in ((train, test), (test, train)):
        if alone := sorted(set(one.classes) - set(other.classes)):
            raise ArgumentError(
                f"`{argument}` must have the same classes in each split, got "
                f"{', '.join(alone[:5])} in `{one.folder.name}` alone, "
                f"{len(alone)} of {len(one.classes)}. Complete the other, or delete it."
            )

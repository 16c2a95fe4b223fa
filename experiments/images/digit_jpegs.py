"""Write scikit-learn's digits as JPEGs in folders of classes, three of them damaged.

They stand in for photographs where there are none: the same reading, decoding and
cropping, and files that cannot be decoded, as copies of large sets have.
"""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.digits import default_data_dir, digits_source, written_at_once
from experiments.images.tfds_files import Split

SIZE = 32  # height and width, in pixels
_DIGIT = 26  # of these the digit fills: a test sees the 28 in the middle
_LEVELS = 16  # of grey
_FOLDER = Path("digit_jpegs") / "1.0.0"

DAMAGED = ("train/0/cut.jpg", "train/5/page.jpg", "val/7/empty.jpg")
"""Files of the set that cannot be decoded."""


def digit_jpegs(*, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the digits as JPEGs; write it first if it is not there.

    Args:
      data_dir: Where it stands; the user's cache if None.

    Returns:
      A folder with `train` (1,437 digits) and `val` (360), each with folders `0` to
      `9` of grey JPEGs of 32 × 32 pixels, and the files of `DAMAGED` among them.

    Raises:
      OSError: The files cannot be written.
    """
    root = Path(data_dir) if data_dir is not None else default_data_dir()
    root.mkdir(parents=True, exist_ok=True)
    if not (root / _FOLDER).exists():
        with written_at_once(root, _FOLDER) as scratch:
            _write(scratch / _FOLDER, data_dir)
    return root / _FOLDER


def _write(folder: Path, data_dir: str | os.PathLike[str] | None) -> None:
    names: dict[Split, str] = {"train": "train", "test": "val"}
    for split, name in names.items():
        for label in range(10):
            (folder / name / str(label)).mkdir(parents=True)
        for index, example in enumerate(digits_source(split, data_dir=data_dir)):
            path = folder / name / str(example["label"]) / f"{index:04}.jpg"
            path.write_bytes(_encoded(example["image"]))
    whole = next((folder / "train" / "0").iterdir()).read_bytes()
    contents = (whole[:-40], b"<html>404 Not Found</html>", b"")
    for name, content in zip(DAMAGED, contents, strict=True):
        (folder / name).write_bytes(content)


def _encoded(pixels: Any) -> bytes:
    greys = Image.fromarray((pixels[..., 0] * (255 / _LEVELS)).astype(np.uint8))
    image = Image.new("L", (SIZE, SIZE))
    margin = (SIZE - _DIGIT) // 2
    digit = greys.resize((_DIGIT, _DIGIT), Image.Resampling.BICUBIC)
    image.paste(digit, (margin, margin))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()

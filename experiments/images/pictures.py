"""Put images beside each other in one, as PNG and for TensorBoard."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tensorboardX import SummaryWriter

_GAP = 1  # pixels between images
_WIDE = 640  # a picture is enlarged up to about this width
_LETTERS = 14  # pixels of the text beside it
_MARGIN = 6


def tiled(images: np.ndarray) -> np.ndarray:
    """Return one picture of rows of images.

    Args:
      images: Pixels from -1 to 1, [rows, columns, height, width, 1 or 3].

    Returns:
      The picture, uint8 [height, width, 1 or 3], white between images.
    """
    pixels = ((np.clip(images, -1, 1) + 1) * 127.5).round().astype(np.uint8)
    padding = ((0, 0), (0, 0), (_GAP, 0), (_GAP, 0), (0, 0))
    padded = np.pad(pixels, padding, constant_values=255)
    rows, columns, height, width, channels = padded.shape
    picture = padded.transpose(0, 2, 1, 3, 4)
    return picture.reshape(rows * height, columns * width, channels)


def save_picture(
    images: np.ndarray,
    path: Path,
    *,
    step: int | None = None,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> None:
    """Write rows of images as a PNG file, enlarged so that a person sees the pixels.

    Args:
      images: As of `tiled`.
      path: The file; its folder is made.
      step: Where the picture also stands in TensorBoard, under `tensorboard` beside the
        file and by the file's name; None leaves it out there.
      rows: What stands before each row; nothing if empty.
      columns: What stands above each column, from its left edge on; "" for nothing.
    """
    picture = tiled(images)
    path.parent.mkdir(parents=True, exist_ok=True)
    factor = max(1, round(_WIDE / picture.shape[1]))
    large = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    image = Image.fromarray(large[..., 0] if large.shape[-1] == 1 else large)
    _labelled(image, rows, columns).save(path)
    if step is not None:
        with SummaryWriter(str(path.parent / "tensorboard")) as writer:
            writer.add_image(path.stem, picture, step, dataformats="HWC")


def _labelled(
    image: Image.Image, rows: Sequence[str], columns: Sequence[str]
) -> Image.Image:
    """Return a picture with text on white, to the left of it and above."""
    font = ImageFont.load_default(_LETTERS)
    left = max(
        (math.ceil(font.getlength(text)) + 2 * _MARGIN for text in rows), default=0
    )
    top = _LETTERS + _MARGIN if columns else 0
    size = (left + image.width, top + image.height)
    found = Image.new(image.mode, size, "white")
    found.paste(image, (left, top))
    pen = ImageDraw.Draw(found)
    for index, text in enumerate(rows):
        middle = top + (index + 0.5) * image.height / len(rows)
        pen.text((left - _MARGIN, middle), text, fill="black", font=font, anchor="rm")
    for index, text in enumerate(columns):
        x = left + index * image.width / len(columns)
        pen.text((x + _MARGIN / 2, top - 2), text, fill="black", font=font, anchor="ls")
    return found

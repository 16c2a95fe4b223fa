"""Pictures of what a GAN draws: samples, ways between them, and truncation."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.gan import Gan, orders, rows_of
from experiments.images.image_sets import ImageSet, real_images
from experiments.images.pictures import save_picture

THRESHOLDS = (2.0, 1.0, 0.5, 0.1)
"""Of the truncation sweep."""

_ROWS, _COLUMNS = 10, 12  # of pictures, at most: classes, and images of each
_REAL = 3  # real images beside those of a class


def draw_samples(gan: Gan, generator: Any, path: Path, *, seed: int, step: int) -> None:
    """Draw a row of samples for each class."""
    latents, labels = orders(gan, columns=_COLUMNS, seed=seed)
    images = rows_of(generator, latents[:_ROWS], labels[:_ROWS])
    save_picture(images, path, step=step, rows=_classes(gan))


def draw_pictures(
    gan: Gan,
    image_set: ImageSet,
    samplers: dict[float, Any],
    *,
    directory: Path,
    seed: int,
    step: int,
) -> None:
    """Draw samples, ways from one to another, and samples within each threshold.

    Args:
      gan: Both players.
      image_set: What they learned from.
      samplers: A generator for each threshold, and for 0: none.
      directory: Where the pictures go.
      seed: Of the latents.
      step: Updates that were made.
    """
    columns = _COLUMNS
    generator, classes = samplers[0.0], _classes(gan)
    latents, labels = orders(gan, columns=columns, seed=seed)
    shown = slice(0, _ROWS)
    real = real_images(image_set, len(classes), _REAL)

    def save(name: str, images: np.ndarray, **labels: list[str]) -> None:
        save_picture(images, directory / f"{name}.png", step=step, **labels)

    images = rows_of(generator, latents[shown], labels[shown])
    white = np.ones_like(images[:, :1])
    save(
        "samples",
        np.concatenate([images, white, real], axis=1),
        rows=classes,
        columns=["drawn", *[""] * columns, "real", *[""] * (_REAL - 1)],
    )
    share = np.linspace(0, 1, columns, dtype=np.float32)[None, :, None]
    between = (1 - share) * latents[:, :1] + share * latents[:, 1:2]
    save(
        "interpolations",
        rows_of(generator, between[shown], labels[shown]),
        rows=classes,
    )
    rows = []
    for threshold in THRESHOLDS:
        latents, labels = orders(gan, columns=2, seed=seed, truncation=threshold)
        images = rows_of(samplers[threshold], latents[shown], labels[shown])
        rows.append(images.reshape(-1, *images.shape[2:]))
    rows.append(real[:, :2].reshape(-1, *real.shape[2:]))
    save(
        "truncation",
        np.stack(rows),
        rows=[*(f"within {threshold:g}" for threshold in THRESHOLDS), "real"],
        columns=[text for each in classes for text in (each, "")],
    )


def _classes(gan: Gan) -> list[str]:
    return [str(each) for each in range(min(_ROWS, gan.num_classes))]

"""Serve the UCI handwritten digits: 1,797 real 8×8 images that scikit-learn carries.

A TFDS builder writes them once as array_record files, which grain reads at random:
TensorFlow is never imported, and nothing comes from the network. Every fifth example is
for testing. Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten
Digits, UCI Machine Learning Repository, 1998.
"""

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

from experiments.pipeline_batches import pipeline_batches
from replicator.inputs import InputContext

NUM_CLASSES = 10
_LEVELS = 16  # of grey, 0 to 16 in the files
_TEST_EVERY = 5


class UciDigits(tfds.core.GeneratorBasedBuilder):
    """Writes the digits as `image` uint8 [8, 8, 1] and `label`."""

    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded. TFDS 4.9.10 would look for a file of checksums by way of
    # `importlib_resources`, which it does not require.
    url_infos = None

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Optical recognition of handwritten digits (UCI).",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager  # nothing is downloaded
        return {
            "train": self._generate_examples(test=False),
            "test": self._generate_examples(test=True),
        }

    def _generate_examples(self, test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        images, labels = load_digits(return_X_y=True)
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            if (index % _TEST_EVERY == 0) == test:
                pixels = image.reshape(8, 8, 1).astype(np.uint8)
                yield index, {"image": pixels, "label": int(label)}


def default_data_dir() -> Path:
    """Return the folder of datasets in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "replicator" / "datasets"


def digits_source(
    split: Literal["train", "test"], *, data_dir: str | os.PathLike | None = None
) -> Any:
    """Open one split for random access; write the files first if there are none.

    Args:
      split: "train" (1,437 examples) or "test" (360).
      data_dir: Where the files lie; `default_data_dir()` if None.

    Returns:
      A sequence of {"image": uint8 [8, 8, 1], "label": int}, also a grain source.
    """
    root = Path(data_dir) if data_dir is not None else default_data_dir()
    root.mkdir(parents=True, exist_ok=True)
    if not _version_dir(root).exists():
        build_digits(root)
    builder: Any = _builder(
        root
    )  # its decorators hide the signature from type checkers
    return builder.as_data_source(split=split)


def build_digits(root: Path) -> None:
    """Write all files beside their place, then move them there in one step.

    Args:
      root: The folder of datasets; it exists.

    Raises:
      OSError: The files cannot be written or moved.
    """
    tfds.disable_progress_bar()
    with (
        written_at_once(root, _version_dir(Path())) as scratch,
        contextlib.redirect_stdout(io.StringIO()),  # it prints how it goes
    ):
        _builder(scratch).download_and_prepare()


@contextlib.contextmanager
def written_at_once(root: Path, folder: Path) -> Iterator[Path]:
    """Yield a scratch folder in which to write `folder`, then move that in one step.

    Processes may write at once: the first to finish wins, the others change nothing.

    Args:
      root: Where the folder is to stand; it exists.
      folder: Relative to `root`, and to the scratch folder.

    Raises:
      OSError: The folder cannot be written or moved.
    """
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
    try:
        yield scratch
        target = root / folder
        target.parent.mkdir(exist_ok=True)
        try:
            (scratch / folder).rename(target)
        except OSError:
            # Another process was faster; its files are the same.
            if not target.exists():
                raise
    finally:
        shutil.rmtree(scratch)


def digits_arrays(
    split: Literal["train", "test"], *, data_dir: str | os.PathLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return all examples of one split at once, for programs that need no pipeline.

    Args:
      split: "train" (1,437 examples) or "test" (360).
      data_dir: As of `digits_source`.

    Returns:
      Images, float32 [n, 64] in 0..1, and labels, int32 [n].
    """
    examples = [_to_arrays(each) for each in digits_source(split, data_dir=data_dir)]
    images = np.stack([example["image"].ravel() for example in examples])
    return images, np.stack([example["label"] for example in examples])


def train_input_fn(
    context: InputContext,
    *,
    global_batch: int,
    seed: int = 0,
    data_dir: str | os.PathLike | None = None,
) -> grain.IterDataset:
    """Yield full batches for ever, shuffled anew in each epoch.

    Batch t of pipeline i is examples [i·b, (i+1)·b) of global batch t, whatever the
    number of pipelines: the order of examples depends on `seed` alone.

    Returns:
      An endless dataset of {"image": float32 [b, 8, 8, 1] in 0..1, "label": int32 [b]}.
    """
    shuffled = _examples("train", data_dir).seed(seed).shuffle().repeat()
    return pipeline_batches(shuffled, context, global_batch=global_batch)


def eval_input_fn(
    context: InputContext,
    *,
    global_batch: int,
    data_dir: str | os.PathLike | None = None,
) -> grain.IterDataset:
    """Yield the test examples once a pass, in order; the last batch may be smaller.

    Returns:
      A dataset of batches as in `train_input_fn`.
    """
    examples = _examples("test", data_dir)
    return pipeline_batches(examples, context, global_batch=global_batch)


def _examples(
    split: Literal["train", "test"], data_dir: str | os.PathLike | None
) -> grain.MapDataset:
    # Read whole: TFDS takes longer to decode one of these small images than a step of
    # a small network takes for a batch of them.
    source = digits_source(split, data_dir=data_dir)
    return grain.MapDataset.source([_to_arrays(example) for example in source])


def _to_arrays(example: dict[str, Any]) -> dict[str, Any]:
    return {
        "image": example["image"].astype(np.float32) / np.float32(_LEVELS),
        "label": np.int32(example["label"]),
    }


def _builder(root: Path) -> UciDigits:
    return UciDigits(data_dir=root, file_format="array_record")


def _version_dir(root: Path) -> Path:
    return root / UciDigits.name / str(UciDigits.VERSION)

"""Read images with the Inception network of 2015, as FID and Inception Score do.

torch-fidelity has it, with TensorFlow's way of resizing to 299×299. It is not among the
requirements, as it brings PyTorch: `pip install 'jax-replicator[fid]'`. The weights are
a file of its release v0.2.0, weights-inception-2015-12-05-6726825d.pth, or of
pytorch-fid's "fid_weights", with the same bytes; nothing is downloaded here.
"""

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from replicator.errors import ArgumentError

FILE_NAME = "weights-inception-2015-12-05-6726825d.pth"
_SHA256_BEGINS = "6726825d"
_CHUNK = 64  # images that are read at a time


class Inception:
    """The network, on the CPU or PyTorch's GPU; read with it as with a `Classifier`."""

    def __init__(self, weights: str | os.PathLike[str]) -> None:
        """Load the weights.

        Args:
          weights: The file, whatever its name.

        Raises:
          ArgumentError: It is not there, or not this one.
          ImportError: torch-fidelity is not installed.
        """
        path = Path(weights).expanduser()
        _check_weights(path)
        try:
            self._torch: Any = importlib.import_module("torch")
            library: Any = importlib.import_module("torch_fidelity")
        except ImportError as missing:
            raise ImportError(
                "`Inception` must have torch-fidelity, got none installed. Run `pip "
                "install 'jax-replicator[fid]'`."
            ) from missing
        network = library.FeatureExtractorInceptionV3(
            "inception-v3-compat",
            ["2048", "logits_unbiased"],
            feature_extractor_weights_path=str(path),
        )
        self._device = "cuda" if self._torch.cuda.is_available() else "cpu"
        self._network = network.to(self._device)

    def outputs(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return class probabilities and features.

        Args:
          images: Float [n, height, width, channels] in [-1, 1], of 1 or 3 channels;
            rounded to 256 levels, as the literature does.

        Returns:
          Probabilities, float32 [n, 1008], of the logits without their bias; and
          features, float32 [n, 2048].

        Raises:
          ArgumentError: `images` are none.
        """
        if images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
            raise ArgumentError(
                "`images` must be [n, height, width, 1 or 3], got "
                f"{images.shape}. Pass one image or more."
            )
        chunks = [
            self._outputs(images[start : start + _CHUNK])
            for start in range(0, len(images), _CHUNK)
        ]
        probabilities, features = map(np.concatenate, zip(*chunks, strict=True))
        return probabilities, features

    def _outputs(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        levels = np.clip(np.rint((images + 1) * 127.5), 0, 255).astype(np.uint8)
        coloured = np.broadcast_to(levels, (*levels.shape[:3], 3)).transpose(0, 3, 1, 2)
        pixels = self._torch.from_numpy(np.ascontiguousarray(coloured))
        features, logits = self._network(pixels.to(self._device))
        return logits.softmax(dim=1).cpu().numpy(), features.cpu().numpy()


def _check_weights(path: Path) -> None:
    # Not only that numbers compare: PyTorch may run code from a file of another.
    if not path.is_file():
        raise ArgumentError(
            f"`weights` must be a file, got {path}. Put {FILE_NAME} there, of "
            "torch-fidelity's release v0.2.0."
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(_SHA256_BEGINS):
        raise ArgumentError(
            f"`weights` must be {FILE_NAME}, whose SHA-256 begins so, got {path} with "
            f"{digest[:8]}. Copy the file anew."
        )

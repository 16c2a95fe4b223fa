"""The network of FID: what it is given, and what it says to other files.

The real one runs where torch-fidelity is installed and INCEPTION_WEIGHTS names its
weights, which is on no machine of ours.
"""

import os

import numpy as np
import pytest

from experiments.images.inception import FILE_NAME, Inception
from replicator.errors import ArgumentError


def test_weights_that_are_not_there_are_refused(tmp_path):
    message = (
        rf"^`weights` must be a file, got {tmp_path}/w\.pth\. Put {FILE_NAME} there"
    )
    with pytest.raises(ArgumentError, match=message):
        Inception(tmp_path / "w.pth")


def test_other_weights_are_refused_before_they_are_loaded(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_bytes(b"others")
    with pytest.raises(ArgumentError, match=rf"got {path} with [0-9a-f]{{8}}\. Copy"):
        Inception(path)


@pytest.mark.slow
def test_noise_is_of_no_class_that_photographs_have():
    pytest.importorskip("torch_fidelity")
    if "INCEPTION_WEIGHTS" not in os.environ:
        pytest.skip("INCEPTION_WEIGHTS names no file")
    images = np.random.default_rng(0).uniform(-1, 1, (3, 32, 32, 3))
    probabilities, features = Inception(os.environ["INCEPTION_WEIGHTS"]).outputs(images)

    assert (probabilities.shape, features.shape) == ((3, 1008), (3, 2048))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)

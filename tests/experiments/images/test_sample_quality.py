"""The statistics of drawn images against closed forms."""

import doctest

import numpy as np
import pytest

from experiments.images import sample_quality
from experiments.images.sample_quality import (
    accuracy_by_class,
    frechet_distance,
    inception_score,
    nearest_distances,
)
from replicator.errors import ArgumentError


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def gaussian(rng, mean, covariance, *, size=400):
    """Draw features whose sample mean and covariance are exactly those given."""
    noise = rng.normal(size=(size, len(mean)))
    noise -= noise.mean(axis=0)
    white = noise @ np.linalg.inv(np.linalg.cholesky(np.cov(noise.T)).T)
    return mean + white @ np.linalg.cholesky(covariance).T


def test_the_distance_of_a_set_to_itself_is_zero(rng):
    features = 100 * rng.normal(size=(300, 64))
    assert frechet_distance(features, features) < 1e-6


def test_the_distance_is_zero_too_for_fewer_features_than_dimensions(rng):
    features = rng.normal(size=(10, 64))
    assert frechet_distance(features, features) < 1e-6


def test_the_distance_is_symmetric(rng):
    a, b = rng.normal(size=(50, 8)), 2 * rng.normal(size=(70, 8)) + 1
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)


def test_only_the_means_differ(rng):
    covariance = np.array([[2.0, 0.5], [0.5, 1.0]])
    a = gaussian(rng, np.zeros(2), covariance)
    b = gaussian(rng, np.array([3.0, 4.0]), covariance)
    assert frechet_distance(a, b) == pytest.approx(25.0, rel=1e-9)


def test_diagonal_covariances_give_the_distance_of_standard_deviations(rng):
    a = gaussian(rng, np.zeros(3), np.diag([1.0, 4.0, 9.0]))
    b = gaussian(rng, np.zeros(3), np.diag([4.0, 4.0, 1.0]))
    assert frechet_distance(a, b) == pytest.approx(1.0 + 0.0 + 4.0, rel=1e-9)


def test_covariances_that_do_not_commute_agree_with_the_root_of_their_product(rng):
    first = np.array([[2.0, 0.9], [0.9, 1.0]])
    second = np.array([[1.0, -0.3], [-0.3, 3.0]])
    a, b = (gaussian(rng, np.zeros(2), each) for each in (first, second))
    root = np.sqrt(np.linalg.eigvals(first @ second)).sum()
    expected = np.trace(first + second) - 2 * root
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_sure_and_varied_classes_score_their_number():
    assert inception_score(np.eye(10)[np.arange(50) % 10]) == pytest.approx(10.0)


@pytest.mark.parametrize("row", [np.full(10, 0.1), np.eye(10)[3]])
def test_images_that_are_all_alike_score_one(row):
    assert inception_score(np.tile(row, (20, 1))) == pytest.approx(1.0)


def test_a_score_is_the_exponential_of_the_information():
    sure = 0.9
    rows = np.array([[sure, 1 - sure], [1 - sure, sure]])
    entropy = -(sure * np.log(sure) + (1 - sure) * np.log(1 - sure))
    assert inception_score(rows) == pytest.approx(2 * np.exp(-entropy))


def test_the_nearest_is_found_over_more_than_one_chunk(rng):
    a, b = rng.normal(size=(2100, 2, 3)), rng.normal(size=(5, 2, 3))
    expected = np.sqrt(((a[:, None] - b) ** 2).sum(axis=(2, 3)).min(axis=1))
    np.testing.assert_allclose(nearest_distances(a, b), expected, rtol=1e-12)


def test_a_copy_has_no_distance(rng):
    images = rng.uniform(-1, 1, size=(30, 16, 16, 1)).astype(np.float32)
    assert nearest_distances(images[7:9], images).tolist() == [0.0, 0.0]


def test_a_class_without_labels_has_no_accuracy():
    accuracies = accuracy_by_class(np.array([0, 2, 2]), np.array([0, 0, 2]), 3)
    np.testing.assert_array_equal(accuracies, [0.5, np.nan, 1.0])


def test_the_examples_in_docstrings_run():
    assert doctest.testmod(sample_quality) == (0, 4)


REFUSED = {
    "features": (
        lambda: frechet_distance(np.zeros((1, 2)), np.zeros((5, 2))),
        r"`features_a` and `features_b` must be \[n, d\] and \[m, d\] with n and m at "
        r"least 2, got \(1, 2\) and \(5, 2\)\. Pass features of more images\.",
    ),
    "NaN": (
        lambda: frechet_distance(np.zeros((3, 2)), np.array([[0, 1], [np.nan, 0]])),
        r"`features_b` must be finite, got NaN or infinity in 1 of 2 rows\. Look at "
        r"the images: their network may have diverged\.",
    ),
    "probabilities": (
        lambda: inception_score(np.ones((3, 2))),
        r"`probabilities` must be \[n, classes\] whose rows sum to 1, got \(3, 2\)\. "
        r"Apply a softmax\.",
    ),
    "images": (
        lambda: nearest_distances(np.zeros((3, 2)), np.zeros((0, 2))),
        r"`b` must hold one or more of the shape of those in `a`, \(2,\), got "
        r"\(0, 2\)\. Resize them\.",
    ),
    "predictions": (
        lambda: accuracy_by_class(np.zeros(3, int), np.zeros(2, int), 2),
        r"`predictions` must be as many as labels, \(2,\), got \(3,\)\. Take the "
        r"argmax over classes\.",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arrays_are_refused(call, message):
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        call()

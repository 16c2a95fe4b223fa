"""The classifier whose opinion drawn digits get."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments.images.classifier import train_classifier
from experiments.images.image_sets import open_image_set
from replicator.errors import ArgumentError

FEW = {"steps": 3, "global_batch": 8}


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # of optax itself
        yield


@pytest.fixture(scope="module")
def digits():
    return open_image_set("digits", resolution=8)


@pytest.fixture(scope="module")
def classifier(digits):
    return train_classifier(digits, **FEW)


def params_of(classifier):
    return jax.tree.leaves(jax.device_get(classifier.network))


def are_equal(one, other):
    pairs = zip(params_of(one), params_of(other), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def test_each_image_has_probabilities_and_features(classifier, digits):
    images, _ = digits.arrays("test")  # more than a chunk
    probabilities, features = (
        read(images) for read in (classifier.probabilities, classifier.features)
    )

    assert (probabilities.shape, probabilities.dtype) == ((360, 10), np.float32)
    assert (features.shape, features.dtype) == ((360, 64), np.float32)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)


def test_an_image_is_read_alike_alone_and_among_others(classifier, digits):
    images, _ = digits.arrays("test", limit=300)
    np.testing.assert_array_equal(
        classifier.features(images)[257:258], classifier.features(images[257:258])
    )


def test_the_accuracy_is_that_on_the_held_out_images(classifier, digits):
    images, labels = digits.arrays("test")
    predicted = classifier.probabilities(images).argmax(axis=1)
    assert classifier.accuracy == np.mean(predicted == labels)


def test_a_seed_is_a_network(classifier, digits):
    assert are_equal(train_classifier(digits, **FEW), classifier)
    assert not are_equal(train_classifier(digits, seed=1, **FEW), classifier)


def test_a_network_that_was_kept_is_not_trained_again(classifier, digits, tmp_path):
    train = functools.partial(train_classifier, digits, directory=tmp_path, **FEW)
    first = train()
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    again = train()

    assert path.name == "classifier-digits-8.npz"
    assert path.stat().st_mtime_ns == written
    assert are_equal(first, again)
    assert are_equal(first, classifier)
    assert again.accuracy == classifier.accuracy


@pytest.mark.parametrize("change", ["seed", "set"])
def test_one_that_was_trained_otherwise_is_trained_anew(change, digits, tmp_path):
    train_classifier(digits, directory=tmp_path, **FEW)
    other = digits
    if change == "set":
        swapped = {"train": digits.sources["test"], "test": digits.sources["train"]}
        other = dataclasses.replace(digits, sources=swapped)
    options = FEW | ({"seed": 1} if change == "seed" else {})

    kept = train_classifier(other, directory=tmp_path, **options)
    assert are_equal(kept, train_classifier(other, **options))


def test_images_of_another_size_are_refused(classifier):
    message = r"^`images` must be \[n, 8, 8, 1\], got \(2, 16, 16, 1\)\. Train the"
    with pytest.raises(ArgumentError, match=message):
        classifier.probabilities(np.zeros((2, 16, 16, 1), np.float32))


def test_no_steps_are_refused(digits):
    with pytest.raises(ArgumentError, match="`steps` must be at least 1, got 0"):
        train_classifier(digits, steps=0)


@pytest.mark.slow
def test_97_percent_of_held_out_digits_are_read():
    assert train_classifier(open_image_set("digits", resolution=16)).accuracy >= 0.97

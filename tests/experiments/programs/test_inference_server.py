import numpy as np
import pytest

from experiments.programs.inference_server import BATCH, logits_of, serve, train


@pytest.fixture(scope="module")
def params(digits):
    return train(*digits["train"], steps=60)


def answers_one_by_one(params, images):
    return np.stack([logits_of(params, image[None])[0] for image in images])


def test_merged_answers_are_those_of_calls_one_by_one(launcher, params, digits):
    images, labels = digits["test"]
    found = serve(launcher, params, images[:120], actors=3, side_by_side=10)
    expected = answers_one_by_one(params, images[:120])
    # Only the order of 64 products in a sum differs.
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-4)
    assert np.mean(found["logits"].argmax(axis=1) == labels[:120]) > 0.9
    assert 120 / BATCH <= found["batches"] < 120


def test_calls_that_are_made_together_are_one_batch(params, digits):
    images = digits["test"][0][: 2 * BATCH]
    found = serve("threads", params, images, actors=1, side_by_side=BATCH)
    assert 2 <= found["batches"] <= BATCH


def test_a_call_alone_is_answered_too(params, digits):
    images = digits["test"][0][:3]
    found = serve("threads", params, images, actors=1, side_by_side=1)
    assert found["batches"] == 3
    expected = answers_one_by_one(params, images)
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-4, atol=1e-4)

import jax.numpy as jnp
import numpy as np
import pytest

from models.rotary import Rotary, rotate
from replicator.errors import ArgumentError


def test_a_product_of_rotated_features_depends_on_their_distance():
    same = jnp.ones((1, 6, 1, 4))
    products = rotate(same)[0, :, 0] @ rotate(2 * same)[0, :, 0].T

    np.testing.assert_allclose(products[1:, 1:], products[:-1, :-1], rtol=1e-5)
    assert abs(products[0, 3] - products[0, 0]) > 0.1


def test_only_pairs_that_turn_slowly_are_slowed_down():
    scaled = Rotary(factor=8.0, slow=1.0, fast=4.0, context=100)
    ratios = scaled.speeds(8) / Rotary().speeds(8)
    turns = 100 * Rotary().speeds(8) / (2 * np.pi)

    np.testing.assert_allclose(ratios[turns > 4], 1)
    np.testing.assert_allclose(ratios[turns < 1], 1 / 8)
    between = ratios[(turns > 1) & (turns < 4)]
    assert between.size
    assert ((between > 1 / 8) & (between < 1)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 0.0}, "`base` must be above 0 and finite, got 0.0"),
        ({"factor": float("inf")}, "`factor` must be above 0 and finite, got inf"),
        ({"fast": 1.0}, "`fast` must be above `slow`, got 1.0 and 1.0. Use 4.0"),
    ],
    ids=str,
)
def test_speeds_that_cannot_be_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        Rotary(**options)

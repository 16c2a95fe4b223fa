"""Trees over rows: sums to draw from, and the lowest."""

import numpy as np
import pytest

from replicator.launchpad_bridge.replay.sum_tree import LowestTree, SumTree

CAPACITIES = [1, 2, 3, 5, 8, 1000]


def tree_of(masses):
    tree = SumTree(len(masses))
    tree.set(np.arange(len(masses)), np.array(masses, np.float64))
    return tree


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_point_leads_to_the_row_whose_stretch_holds_it(capacity):
    # Whole numbers: sums are exact, so the plain answer is the only one.
    masses = np.random.default_rng(capacity).integers(0, 4, capacity) + 0.0
    masses[-1] = 1
    points = np.arange(masses.sum())
    plain = np.searchsorted(np.cumsum(masses), points, side="right")
    np.testing.assert_array_equal(tree_of(masses).find(points), plain)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_no_row_of_mass_0_or_behind_the_last_is_found_at_the_total(capacity):
    random = np.random.default_rng(0)
    for _ in range(200):
        masses = random.random(capacity) * (random.random(capacity) < 0.5)
        masses[random.integers(capacity)] = random.random() + 1e-300
        tree = tree_of(masses)
        around = tree.total * (1 + np.arange(-4, 5) * 2.0**-53)
        found = tree.find(np.minimum(around, tree.total))
        assert (masses[found] > 0).all()


def test_tiny_masses_beside_huge_ones_lead_to_no_row_of_0():
    random = np.random.default_rng(0)
    masses = 10.0 ** random.integers(-300, 290, 64) * (random.random(64) < 0.5)
    masses[7] = 5e-324
    tree = tree_of(masses)
    found = tree.find(tree.total * random.random(10_000))
    assert (masses[found] > 0).all()


def test_every_parent_is_the_sum_of_its_children_after_many_changes():
    random, tree = np.random.default_rng(0), SumTree(1000)
    for _ in range(300):
        tree.set(random.integers(0, 1000, 64), random.random(64) ** 9)
    nodes = tree._nodes
    parents = np.arange(1, 1024)
    sums = nodes[2 * parents] + nodes[2 * parents + 1]
    np.testing.assert_array_equal(nodes[parents], sums)


def test_of_one_row_set_twice_the_last_mass_counts():
    tree = tree_of([1, 1, 1])
    tree.set(np.array([2, 0, 2]), np.array([5.0, 3.0, 7.0]))
    assert tree.masses.tolist() == [3, 1, 7]
    assert tree.total == 11


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_lowest_leave_first(capacity):
    values, tree = np.random.default_rng(0).random(capacity), LowestTree(capacity)
    tree.set(np.arange(capacity), values)
    np.testing.assert_array_equal(tree.pop(capacity), np.argsort(values))


def test_a_row_that_was_taken_out_is_not_the_lowest():
    tree = LowestTree(3)
    tree.set(np.arange(3), np.array([1.0, 2.0, 3.0]))
    tree.set(np.array([0]), np.array([np.inf]))
    assert tree.pop(1).tolist() == [1]

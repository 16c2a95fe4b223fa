import dataclasses

import numpy as np
import pytest

from experiments.programs.federated_averaging import (
    Federation,
    accuracy,
    cut_unlike,
    federate,
    first_params,
    train_alone,
    weighted_mean,
)

SMALL = Federation(clients=4, sampled=2, rounds=25)


def test_clients_learn_together_what_none_of_them_has_seen(launcher, digits):
    found = federate(launcher, digits["train"], digits["test"], SMALL)
    shards = cut_unlike(digits["train"], SMALL)
    alone = [accuracy(train_alone(shard, SMALL), digits["test"]) for shard in shards]
    assert accuracy(first_params(SMALL.seed), digits["test"]) < 0.3
    assert max(alone) < 0.75
    assert np.mean(found["accuracies"][-5:]) > 0.85
    assert accuracy(found["params"], digits["test"]) == found["accuracies"][-1]


def test_each_round_has_other_clients(digits):
    short = dataclasses.replace(SMALL, clients=6, sampled=3, rounds=12, local_steps=1)
    sampled = federate("threads", digits["train"], digits["test"], short)["sampled"]
    assert all(len(set(who)) == 3 for who in sampled)
    assert {client for who in sampled for client in who} == set(range(6))
    assert len({tuple(who) for who in sampled}) > 4


@pytest.mark.parametrize("clients", [4, 10, 40])
def test_shards_hold_each_example_once_and_are_unlike(clients, digits):
    images, labels = digits["train"]
    federation = dataclasses.replace(SMALL, clients=clients)
    shards = cut_unlike((images, labels), federation)
    assert len(shards) == clients
    assert min(len(own) for _, own in shards) >= 1
    held = np.concatenate([own_images for own_images, _ in shards])
    assert sorted(map(bytes, held)) == sorted(map(bytes, images))
    largest = [np.bincount(own).max() / len(own) for _, own in shards]
    assert np.mean(largest) > 0.3  # of one kind, where like shards have a tenth


def test_a_client_counts_by_its_examples():
    one, three = {"w": np.float32([1, 2])}, {"w": np.float32([5, 10])}
    mean = weighted_mean([(one, 1), (three, 3)])
    np.testing.assert_allclose(mean["w"], [4, 8])
    assert mean["w"].dtype == np.float32

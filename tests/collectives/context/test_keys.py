import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator
from replicator import strategies
from replicator.collectives import example_keys, replica_key
from replicator.collectives.context.microbatch import Microbatch, in_microbatch
from tests.helpers import on_replicas
from tests.steps import adam, regression_batch, replicas, trainer


def example_bits(key, n):
    return jax.vmap(jax.random.bits)(example_keys(key, n))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_draws_per_example_do_not_depend_on_the_number_of_replicas(make_key):
    key = make_key(3)
    alone = example_bits(key, 8)
    assert len(set(alone.tolist())) == 8
    for n in (2, 8):
        found = on_replicas(
            lambda _, n=n: example_bits(key, 8 // n), np.ones(n, np.float32), n=n
        )
        assert found.ravel().tolist() == alone.tolist()


def test_each_replica_has_its_own_key(key):
    bits = on_replicas(
        lambda _: jax.random.bits(replica_key(key)), np.ones(8, np.float32)
    )
    assert len(set(bits.tolist())) == 8
    assert bits[0] == jax.random.bits(replica_key(key))


def test_the_key_of_an_example_is_the_key_folded_with_its_position(key):
    expected = jax.random.fold_in(key, 2)
    assert jnp.array_equal(example_keys(key, 3)[2], expected)


def test_an_example_keeps_its_key_in_any_microbatch(key):
    alone = example_bits(key, 8)
    parts = []
    for index in range(4):
        with in_microbatch(Microbatch(index, 4)):
            rows = on_replicas(
                lambda _: example_bits(key, 1), np.ones(2, np.float32), n=2
            )
        parts += rows.ravel().tolist()
    assert parts == alone.tolist()


def test_each_microbatch_has_its_own_replica_key(key):
    bits = set()
    for index in range(4):
        with in_microbatch(Microbatch(index, 4)):
            bits.add(int(jax.random.bits(replica_key(key))))
    assert len(bits) == 4


CUTS = [
    *((n, k, None) for n, k in itertools.product((1, 2, 8), (1, 2))),
    *((n, k, strategies.fsdp()) for n, k in itertools.product((4,), (1, 2))),
]


@pytest.mark.parametrize(("n", "accumulate", "strategy"), CUTS)
def test_places_count_the_examples_of_the_global_batch(n, accumulate, strategy):
    rep = replicas(n, strategy=strategy)
    init_fn, train = trainer(rep.wrap_optimizer(adam()))

    def step_fn(state, batch):
        places = replicator.example_places(len(batch["y"]))
        return train(state, batch)[0], {"places": replicator.Concat(places)}

    step = rep.compile(step_fn, accumulate=accumulate)
    _, metrics = step(rep.init(init_fn), regression_batch())
    assert metrics["places"].tolist() == list(range(16))
    assert metrics["places"].dtype == jnp.int32

"""The collector of cycles: off while something is traced, and as it was afterwards."""

import gc

import jax.numpy as jnp
import pytest

from replicator import Replicator, all_reduce
from replicator.base.host.collection_pause import collection_paused


def test_it_is_off_inside_and_on_again_after_it():
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_error():
    with pytest.raises(RuntimeError), collection_paused():
        raise RuntimeError
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off():
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_meanwhile_is_not_young_afterwards(quick_collections):
    gc.collect()
    with collection_paused():
        made = [[] for _ in range(10_000)]
    assert sum(gc.get_count()) < len(made)


def test_what_somebody_froze_stays_frozen():
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with collection_paused():
            made = [[] for _ in range(100)]
        # Nearly: what was frozen may be freed meanwhile, by any thread.
        assert gc.get_freeze_count() > before / 2
        assert made
    finally:
        gc.unfreeze()


def test_a_step_and_an_init_are_traced_without_it():
    seen = []

    def init_fn(key):
        seen.append(gc.isenabled())
        return jnp.zeros(3)

    def step_fn(state, batch):
        seen.append(gc.isenabled())
        return state + all_reduce(batch.mean()), {}

    rep = Replicator()
    rep.compile(step_fn)(rep.init(init_fn), jnp.ones(8))
    assert set(seen) == {False}

"""A bit that flips in one device's copy of the state is found, and where it flipped."""

import logging
import platform
import random

import jax
import jax.numpy as jnp
import optax
import pytest

import replicator
from replicator import strategies
from replicator.checkpoint import CheckpointStore
from replicator.errors import ArgumentError, ReplicaMismatchError
from replicator.monitoring.events import read_events
from replicator.testing.faults import Injector, effects, parse
from replicator.training.replica_check import first_comparison
from tests.steps import assert_equal_bits, regression_batch, replicas, trainer

BATCHES = [regression_batch(seed=seed) for seed in range(3)]


def parts(n=4, **options):
    rep = replicas(n, **options)
    return rep, *trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))


def train(n=4, *, fault=None, strategy=None, **options):
    rep, init_fn, step_fn = parts(n, strategy=strategy)
    options = {"steps": 9, "check_replicas_every": 3, "display": False} | options
    hooks = [Injector(parse(fault))] if fault else []
    return rep.run(step_fn, BATCHES, init_fn=init_fn, hooks=hooks, **options)


def test_a_flipped_bit_is_found_with_its_leaf_replica_device_and_host():
    with pytest.raises(ReplicaMismatchError) as found:
        train(fault="flip a bit in the state on replica 2 of 4 at step 6")
    assert found.value.step == 6
    assert found.value.leaf.startswith("user/")
    assert (
        f"`{found.value.leaf}` must be equal on all devices that hold it, got other "
        f"bits on replica 2 (device 2, process 0, host {platform.node()}) at step 6."
    ) in str(found.value)


def test_of_two_copies_both_are_named():
    with pytest.raises(ReplicaMismatchError, match=r"replica 0 \(.* and replica 1 \("):
        train(2, fault="flip a bit in the state on replica 1 of 2 at step 3")


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        (strategies.zero1(whole_below_bytes=0), r"shard 0 \(.* and .*|shard 3 \("),
        (strategies.hybrid(shard=2, whole_below_bytes=0), r"replica 1, shard 1 \("),
    ],
    ids=["zero1", "hybrid"],
)
def test_copies_of_a_strategy_are_compared(strategy, place):
    with pytest.raises(ReplicaMismatchError, match=place):
        train(
            strategy=strategy,
            fault="flip a bit in the state on replica 3 of 4 at step 3",
        )


def test_an_undisturbed_run_ends_as_without_the_check():
    assert_equal_bits(train().state, train(check_replicas_every=None).state)


def test_a_rollback_ends_with_the_bits_of_an_undisturbed_run(tmp_path):
    saved = {"checkpoint_dir": tmp_path / "saved", "checkpoint_every": 2}
    broken = train(
        fault="flip a bit in the state on replica 1 of 4 at step 5",
        on_mismatch="rollback",
        directory=tmp_path / "run",
        **saved,
    )
    assert_equal_bits(broken.state, train().state)
    back = [e for e in read_events(tmp_path / "run") if e["kind"] == "rolled_back"]
    assert [(each["step"], each["found"][:23]) for each in back] == [
        (6, "other bits on replica 1")
    ]


def test_no_wrong_state_is_saved(tmp_path):
    with pytest.raises(ReplicaMismatchError, match="at step 4"):
        train(
            fault="flip a bit in the state on replica 1 of 4 at step 3",
            checkpoint_dir=tmp_path,
            **{"checkpoint_every": 2, "check_replicas_every": 1000},
        )
    assert CheckpointStore(tmp_path).steps() == (2,)


def test_the_last_state_is_compared():
    with pytest.raises(ReplicaMismatchError, match="at step 9"):
        train(
            fault="flip a bit in the state on replica 1 of 4 at step 8",
            check_replicas_every=1000,
        )


def test_a_restored_state_is_compared():
    rep, init_fn, step_fn = parts()
    session = rep.session(
        step_fn, BATCHES, init_fn=init_fn, steps=3, check_replicas_every=1
    )
    spec = session._spec
    state = spec.first.born()
    assert first_comparison(spec, state, step=7) is not None
    damaged = effects.flip_copied_bit(state, (3, 4), random.Random(0))
    with pytest.raises(ReplicaMismatchError, match="before the first step"):
        first_comparison(spec, damaged, step=7)


def test_an_own_loop_is_watched():
    rep, init_fn, _ = parts()
    fault = Injector(parse("flip a bit in the state on replica 2 of 4 at step 2"))
    grow = jax.jit(lambda state: jax.tree.map(lambda x: x + x, state))
    options = {"init_fn": init_fn, "steps": 4, "check_replicas_every": 1}

    def loop():
        with rep.session(**options, hooks=[fault], display=False) as session:
            for _ in session.steps():
                session.after({}, state=grow(session.state))

    with pytest.raises(ReplicaMismatchError, match=r"replica 2 .* at step 2"):
        loop()


def test_what_has_no_second_copy_is_listed_once(tmp_path, caplog):
    rep, init_fn, step_fn = parts()

    def own_init(key):
        return init_fn(key) | {"seen": replicator.PerReplica(jnp.zeros(()))}

    def step(state, batch):
        seen = replicator.PerReplica(state["seen"].value + batch["y"].sum())
        after, metrics = step_fn(state, batch)
        return after | {"seen": seen}, metrics

    with caplog.at_level(logging.WARNING, "replicator"):
        rep.run(
            *(step, BATCHES),
            **{"init_fn": own_init, "steps": 4, "check_replicas_every": 2},
            **{"directory": tmp_path, "display": False},
        )
    listed = [e["leaves"] for e in read_events(tmp_path) if e["kind"] == "unwatched"]
    assert listed == [["user/seen/value"]]
    assert caplog.text.count("does not watch 1 leaves") == 1


@pytest.mark.parametrize(
    ("n", "strategy"), [(1, None), (4, strategies.fsdp(whole_below_bytes=0))]
)
def test_a_state_without_copies_is_refused(n, strategy):
    with pytest.raises(ArgumentError, match="`check_replicas_every` must have arrays"):
        train(n, strategy=strategy)


def test_the_program_of_the_step_is_the_same():
    rep, init_fn, step_fn = parts()

    def text(**options):
        made = rep.session(step_fn, BATCHES, init_fn=init_fn, steps=3, **options)
        step, shapes = made._spec.step, made._spec.first.shapes
        return step.lower(shapes, BATCHES[0]).as_text()

    assert text(check_replicas_every=1) == text()
    assert "all_reduce" in text()

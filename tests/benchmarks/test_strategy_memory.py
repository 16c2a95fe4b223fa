import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import tasks
from benchmarks.step.placed_step import PAIRS, placed_step
from benchmarks.step.step_pair import replicator_init, replicator_step
from benchmarks.strategy_memory.ahead_of_time import activation_gathers
from benchmarks.strategy_memory.shards import uneven
from replicator import Replicator
from replicator.engine.inspection.collectives import Collective

WEIGHTS = [(20, 2048, 8192), (20, 2048, 3, 16, 128), (2048,)]
GATHER = Collective(
    kind="all-gather",
    count=20,
    wire_bytes=1,
    axes=("shard",),
    devices=256,
    arrays=("bf16[1,2048,8192]",),
    source="",
    variable="",
    op_name="",
)


@pytest.mark.parametrize(
    ("kind", "array", "count"),
    [
        ("all-gather", "bf16[1,2048,8192]", 0),
        ("all-gather", "bf16[2048,6144]", 0),  # a weight whose heads are one dimension
        ("collective-permute", "bf16[8,8192]", 0),  # a piece of a weight
        ("all-gather", "bf16[1,1152,2048]", 20),
        ("all-to-all", "bf16[1,1152,8]", 20),
        ("all-reduce", "bf16[1,1152,2048]", 0),
    ],
)
def test_gathers_of_what_is_no_part_of_a_weight_are_counted(kind, array, count):
    found = dataclasses.replace(GATHER, kind=kind, arrays=(array,))

    assert activation_gathers([found], WEIGHTS) == count


def test_bytes_on_devices_are_compared_with_an_equal_part(mesh):
    cut = NamedSharding(mesh, PartitionSpec("replica"))
    whole = NamedSharding(mesh, PartitionSpec())
    pieces = jax.device_put(np.ones(80, np.float32), cut)
    copies = jax.device_put(np.ones(80, np.float32), whole)

    assert uneven([pieces]) == 0
    assert uneven([pieces, copies]) == (10 + 80) / 20 - 1


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "multiplied"), PAIRS)
def test_the_step_by_hand_makes_the_same_update(strategy, multiplied):
    task = tasks.language_model(
        16, vocabulary=128, width=64, heads=4, context=16, remat=True
    )
    tx = optax.sgd(0.1, momentum=0.9)
    rep = Replicator(strategy=strategy)
    init_fn, step_fn = replicator_init(task, tx), replicator_step(task, tx)
    state = rep.init(init_fn)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = placed_step(task, tx, where, multiplied=multiplied)
    by_hand, _ = step(state, task.batch)
    ours, _ = rep.compile(step_fn)(rep.init(init_fn), task.batch)

    for leaf, other in zip(
        jax.tree.leaves(ours), jax.tree.leaves(by_hand), strict=True
    ):
        np.testing.assert_allclose(leaf, other, atol=1e-6)

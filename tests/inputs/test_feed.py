import queue
import re
import threading

import grain
import jax
import numpy as np
import pytest

from replicator.errors import ArgumentError, BatchError
from replicator.inputs import InputOptions, open_input
from tests.helpers import replicated_layout
from tests.inputs.helpers import batches, read, values


def _blocks(context):
    """Deal out three global batches of 16 examples to the pipelines, in order."""
    share = context.batch_size(16)
    for start in range(context.pipeline_index * share, 48, 16):
        yield {"x": np.arange(start, start + share)}


def _order(items):
    return np.concatenate([value["x"].ravel() for value in values(items)])


@pytest.mark.parametrize("mode", ["single", "per_host", "per_replica"])
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_the_order_of_examples_does_not_depend_on_the_replicas(mode, replicas):
    items = read(_blocks, replicated_layout(replicas), mode=mode)

    np.testing.assert_array_equal(_order(items), np.arange(48))


@pytest.mark.parametrize("mode", ["single", "per_host"])
@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize(("accumulate", "steps_per_call"), [(2, 1), (1, 3), (2, 2)])
def test_the_order_holds_under_accumulation_and_stacking(
    mode, replicas, accumulate, steps_per_call
):
    items = read(
        _blocks,
        replicated_layout(replicas),
        mode=mode,
        accumulate=accumulate,
        steps_per_call=steps_per_call,
    )

    np.testing.assert_array_equal(_order(items), np.arange(48))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_replica_reads_its_own_pipeline(accumulate, layout):
    def input_fn(context):
        return [{"x": np.full(2, context.pipeline_index)}]

    (item,) = read(
        input_fn, layout, mode="per_replica", accumulate=accumulate, epochs=1
    )
    for replica, shard in enumerate(item.value["x"].addressable_shards):
        assert (np.asarray(shard.data) == replica).all()


def _unequal(context):
    """Pipeline i has i + 1 examples, in batches of two."""
    first = 10 * context.pipeline_index
    mine = np.arange(first, first + context.pipeline_index + 1)
    return [{"x": mine[start : start + 2]} for start in range(0, len(mine), 2)]


def test_pipelines_that_end_at_different_times_lose_nothing():
    items = values(read(_unequal, replicated_layout(4), mode="per_replica", epochs=1))
    found = [item["x"][item["mask"] == 1] for item in items]

    assert sorted(np.concatenate(found)) == [0, 10, 11, 20, 21, 22, 30, 31, 32, 33]
    assert [item["x"].shape for item in items] == [(8,), (8,)]


def test_pipelines_start_their_next_epoch_together():
    items = read(_unequal, replicated_layout(4), mode="per_replica", steps=4)

    assert [item.examples for item in items] == [7, 3, 7, 3]


def test_rounds_that_are_all_uneven_are_not_dropped_for_ever():
    message = (
        "`dataset` must yield at least one batch, got only uneven ones, all dropped. "
        "Look at its source, its filters and its batch size."
    )

    with pytest.raises(BatchError, match=re.escape(message)):
        read(_unequal, replicated_layout(4), mode="per_replica", remainder="drop")


def test_an_error_names_the_pipeline(layout):
    def input_fn(context):
        return [{"x": np.zeros(3 if context.pipeline_index == 5 else 0)}]

    with pytest.raises(BatchError, match=r"got 0 \(batch 0 of pipeline 0\)"):
        read(input_fn, layout, mode="per_replica")


def test_a_list_is_read_epoch_after_epoch(layout):
    items = read(batches(8, 8), layout, steps=5)

    assert [item.value["x"][0].item() for item in items] == [0, 8, 0, 8, 0]
    assert [item.index for item in items] == [0, 1, 2, 3, 4]


def test_an_iterator_ends(layout):
    assert len(read(iter(batches(8, 8)), layout)) == 2


def test_an_iterable_that_can_be_read_once_ends(layout):
    class Wrapped:
        def __init__(self):
            self._batches = iter(batches(8, 8))

        def __iter__(self):
            yield from self._batches

    assert len(read(Wrapped(), layout)) == 2


def test_epochs_count_passes(layout):
    assert len(read(batches(8, 8), layout, epochs=3)) == 6


def test_an_iterator_cannot_be_read_twice(layout):
    message = (
        "`epochs` must be 1 for an iterator, which can be read once, got 2. "
        "Pass an iterable that starts anew, like a list."
    )

    with pytest.raises(ArgumentError, match=re.escape(message)):
        open_input(iter(batches(8)), layout, options=InputOptions(epochs=2))


def test_a_step_limit_leaves_the_rest_of_an_iterator(layout):
    numbers = (batch for batch in batches(8, 8, 8))
    read(numbers, layout, steps=2)

    assert next(numbers)["x"][0] == 16


def test_grain_feeds_the_mesh(layout):
    dataset = (
        grain.MapDataset.range(20)
        .map(lambda i: {"x": np.float32(i)})
        .batch(8)
        .to_iter_dataset()
    )
    items = read(dataset, layout, steps=4)

    assert [item.examples for item in items] == [8, 8, 4, 8]


def test_a_learner_feeds_itself_from_a_queue(layout):
    waiting = queue.Queue()
    actor = threading.Thread(target=lambda: [waiting.put(b) for b in batches(8, 8)])
    actor.start()
    with open_input(lambda context: waiting.get, layout) as items:
        found = [next(items).value["x"][0].item() for _ in range(2)]
        waiting.put(batches(8)[0])  # the thread reads on: let it end at once
    actor.join()

    assert found == [0, 8]


def test_a_producer_may_reuse_its_memory(layout):
    # 64-byte alignment is what lets JAX take memory over on a CPU.
    memory = np.zeros(8 * 16 + 16, np.float32)
    offset = -memory.ctypes.data % 64 // 4
    batch = memory[offset : offset + 128].reshape(8, 16)

    def produce():
        for i in range(4):
            batch[:] = i
            yield {"x": batch}

    items = values(read(produce(), layout))

    assert [item["x"].mean() for item in items] == [0, 1, 2, 3]


def test_stacked_steps_end_with_what_is_left(layout):
    items = read(batches(8, 8, 8, 8, 5), layout, steps_per_call=2, epochs=1)

    assert [item.value["x"].shape for item in items] == [(2, 8), (2, 8), (1, 8)]
    assert [item.steps for item in items] == [2, 2, 1]
    assert [item.index for item in items] == [0, 2, 4]
    assert [item.examples for item in items] == [16, 16, 5]


def test_device_arrays_pass_through(layout):
    (item,) = read([{"x": jax.device_put(np.arange(8))}], layout, epochs=1)

    np.testing.assert_array_equal(item.value["x"], np.arange(8))


def test_a_failing_input_function_fails_in_the_callers_hands(layout):
    def input_fn(context):
        raise FileNotFoundError(f"no shard {context.pipeline_index}")

    with pytest.raises(FileNotFoundError, match="no shard 0"):
        open_input(input_fn, layout)

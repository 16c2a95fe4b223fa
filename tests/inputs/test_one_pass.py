import re

import jax
import numpy as np
import pytest

from replicator.errors import BatchError, NonFiniteError
from replicator.inputs import InputOptions
from replicator.inputs.one_pass import open_one_pass, recut
from tests.helpers import replicated_layout
from tests.inputs.helpers import batches


def read(dataset, replicas, *, replica_batch=4, **options):
    options = InputOptions(timeout_s=60.0, **options)
    layout = replicated_layout(replicas)
    with open_one_pass(
        dataset, layout, replica_batch=replica_batch, options=options
    ) as found:
        return [jax.device_get(batch) for batch in found]


def counted(found):
    """List the examples that the mask counts, in order."""
    return [x for each in found for x in each["batch"]["x"][each["mask"] == 1]]


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [(1,), (5, 5, 2), (40,), (3, 7, 1, 30, 2)])
def test_every_example_comes_once_in_order_for_batches_of_any_sizes(sizes, replicas):
    found = read(batches(*sizes), replicas)

    assert counted(found) == list(range(sum(sizes)))
    assert {len(each["mask"]) for each in found} == {4 * replicas}


def test_what_fills_up_repeats_examples_that_are_there():
    (last,) = recut(batches(2, 1), 8)

    np.testing.assert_array_equal(last["batch"]["x"], [0, 1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(last["mask"], [1, 1, 1, 0, 0, 0, 0, 0])


def test_a_list_is_read_once_whatever_the_options_of_the_training():
    found = read(batches(8, 8), 2, epochs=3, accumulate=2, remainder="drop")

    assert counted(found) == list(range(16))


def test_steps_count_batches_of_the_dataset():
    assert counted(read(batches(5, 5, 5), 2, steps=2)) == list(range(10))


def test_a_producer_may_reuse_its_memory():
    memory = np.zeros(3, np.float32)

    def produce():
        for i in range(4):
            memory[:] = i
            yield {"x": memory}

    assert counted(read(produce(), 2)) == [i for i in range(4) for _ in range(3)]


def test_pipelines_of_replicas_that_end_at_different_times_lose_nothing():
    def input_fn(context):
        first = 10 * context.pipeline_index
        return [{"x": np.arange(first, first + 1 + 3 * context.pipeline_index)}]

    found = read(input_fn, 3, mode="per_replica")

    assert sorted(counted(found)) == [0, 10, 11, 12, 13, *range(20, 27)]


def test_an_iterator_of_the_users_own_can_be_read_on():
    numbers = (batch for batch in batches(4, 4, 4))
    read(numbers, 1, steps=2)

    assert next(numbers)["x"][0] == 8


REFUSED = {
    "empty": ([], BatchError, "`dataset` must yield at least one batch, got none."),
    "changing": (
        [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}],
        BatchError,
        "must yield `x` as float32[*,3] like its first batch, got float32[*,4] "
        "(batch 1)",
    ),
    "nan": (
        [{"x": np.zeros(3)}, {"x": np.array([0, np.nan])}],
        NonFiniteError,
        "must yield no NaN, got one in `x`, example 1 (batch 1)",
    ),
}


@pytest.mark.parametrize(("dataset", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_the_datasets_own_batch(dataset, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        read(dataset, 2)

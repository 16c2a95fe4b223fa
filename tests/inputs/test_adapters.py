import queue
import re

import grain
import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.inputs import InputContext
from replicator.inputs.adapters import check_read_anew, open_sources
from replicator.inputs.context import pipeline_contexts
from tests.helpers import replicated_layout

CONTEXT = InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)


def _open(dataset, **options):
    (source,) = open_sources(dataset, [CONTEXT], **options)
    return source


def _sums(source):
    return [int(np.sum(batch)) for batch in source.start()]


def _grain_loader():
    return grain.DataLoader(
        data_source=np.arange(4),
        sampler=grain.samplers.SequentialSampler(4, grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(2)],
    )


def _grain_map():
    return grain.MapDataset.source(np.arange(4)).batch(2)


ITERABLES = {
    "list": lambda: [np.array([0, 1]), np.array([2, 3])],
    "grain DataLoader": _grain_loader,
    "grain MapDataset": _grain_map,
    "grain IterDataset": lambda: _grain_map().to_iter_dataset(),
}
ITERATORS = {
    "generator": lambda: (batch for batch in ITERABLES["list"]()),
    "numpy iterator": lambda: iter(np.arange(4).reshape(2, 2)),
    "grain iterator": lambda: iter(_grain_map().to_iter_dataset()),
    "callable": lambda: iter(ITERABLES["list"]()).__next__,
}


@pytest.mark.parametrize("make", ITERABLES.values(), ids=ITERABLES)
def test_an_iterable_is_read_again_from_the_start(make):
    source = _open(make())

    assert source.repeats
    assert _sums(source) == _sums(source) == [1, 5]


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
def test_an_iterator_is_read_once(make):
    source = _open(make())

    assert not source.repeats
    assert _sums(source) == [1, 5]


def test_an_input_function_is_told_its_context():
    (source,) = open_sources(lambda context: [np.array([context.pipeline_index])], [
        InputContext(pipeline_index=3, num_pipelines=4, num_replicas=8)
    ])  # fmt: skip

    assert _sums(source) == [3]


def test_an_input_function_may_return_a_queue_to_read_from():
    waiting = queue.SimpleQueue()
    waiting.put(np.array([7]))
    source = _open(lambda context: waiting.get)

    assert int(next(source.start())[0]) == 7


def test_a_callable_without_required_argument_is_no_input_function():
    waiting = queue.Queue()
    waiting.put(np.array([7]))

    assert int(next(_open(waiting.get).start())[0]) == 7


def test_an_input_function_without_context_is_refused():
    def input_fn():
        yield np.array([7])

    message = (
        "`dataset` must return one batch per call where it takes no argument, "
        "got `generator`. Write `def input_fn(context)` to return many."
    )
    with pytest.raises(ArgumentError, match=re.escape(message)):
        next(_open(input_fn).start())


def test_a_user_can_bring_an_adapter():
    class Doubler:
        def claims(self, dataset):
            return isinstance(dataset, int)

        def iterate(self, dataset):
            yield np.array([2 * dataset])

    assert _sums(_open(21, adapters=[Doubler()])) == [42]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            {"x": np.zeros(8)},
            "`dataset` must yield batches, got one `dict`. "
            "Put it in a list to read it as one batch again and again.",
        ),
        (
            np.zeros(8),
            "`dataset` must yield batches, got one `ndarray`. "
            "Put it in a list to read it as one batch again and again.",
        ),
        (
            7,
            "`dataset` must be an iterable of batches or a callable, got `int`. "
            "Hand over an adapter for it in `adapters`.",
        ),
        (
            lambda context: None,
            "`dataset` must be an iterable of batches or a callable, got `NoneType`. "
            "Pass the batches, or end the input function with `return`.",
        ),
    ],
)
def test_what_yields_no_batches_is_refused(dataset, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        _open(dataset)


def test_one_iterable_cannot_feed_many_pipelines():
    message = (
        "`dataset` must be an input function for mode 'per_replica', got `list`. "
        "Write `def input_fn(context)`, or use mode 'per_host'."
    )

    contexts = pipeline_contexts("per_replica", replicated_layout(2))

    with pytest.raises(ArgumentError, match=re.escape(message)):
        open_sources([np.zeros(8)], contexts)


def test_a_torch_loader_yields_numpy():
    torch = pytest.importorskip("torch")
    rows = [{"x": torch.full((2,), float(i)), "y": i} for i in range(4)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    source = _open(loader)
    batches = list(source.start())

    assert source.repeats
    assert [type(leaf) for leaf in batches[0].values()] == [np.ndarray, np.ndarray]
    np.testing.assert_array_equal(batches[1]["y"], [2, 3])


def test_tf_data_yields_numpy():
    tf = pytest.importorskip("tensorflow")
    source = _open(tf.data.Dataset.range(4).batch(2))

    assert source.repeats
    assert _sums(source) == _sums(source) == [1, 5]


class Columns:
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    "dataset",
    [[], (), Columns(), lambda context: iter([])],
    ids=["list", "tuple", "columns", "input function"],
)
def test_what_can_be_read_again_is_accepted(dataset):
    check_read_anew("dataset", dataset, why="on_nonfinite='rollback'")


@pytest.mark.parametrize("dataset", [iter([]), (_ for _ in ()), lambda: np.ones(8)])
def test_what_is_gone_once_it_was_read_is_refused(dataset):
    with pytest.raises(ArgumentError, match="with `on_nonfinite='rollback'`, got `"):
        check_read_anew("dataset", dataset, why="on_nonfinite='rollback'")


def test_what_an_adapter_of_the_user_claims_is_read_anew():
    class Mine:
        def claims(self, dataset):
            return dataset == "mine"

        def iterate(self, dataset):
            return iter([])

    check_read_anew("dataset", "mine", adapters=(Mine(),))

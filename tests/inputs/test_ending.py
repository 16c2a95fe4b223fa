"""A dataset that says that it is endless is refused where its end is needed."""

import itertools

import grain
import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.inputs.adapters import ending

SAMPLER = grain.samplers.IndexSampler(8, shuffle=False, seed=0, num_epochs=None)


class InfiniteSampler:
    """A sampler of PyTorch, by its name."""


class Loader:
    """What PyTorch's `DataLoader` shows of its sampler."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(())


class _InfiniteConstantSampler:
    """PyTorch's own, for an `IterableDataset`, which may end."""


ENDLESS = {
    "itertools.cycle": itertools.cycle([1]),
    "itertools.count": itertools.count(),
    "itertools.repeat": itertools.repeat(1),
    "grain.RepeatMapDataset": grain.MapDataset.source([1, 2]).repeat().batch(2),
    "grain.RepeatIterDataset": grain.experimental.RepeatIterDataset(
        grain.MapDataset.source([1]).to_iter_dataset()
    ).batch(1),
    "grain.IndexSampler": grain.DataLoader(
        data_source=np.arange(8), sampler=SAMPLER, operations=[]
    ),
    "tests.InfiniteSampler": Loader(InfiniteSampler()),
}
FINITE = (
    [1],
    iter([1]),
    (each for each in itertools.count()),
    itertools.repeat(1, 3),
    grain.MapDataset.source([1, 2]).repeat(2).batch(2),
    Loader(_InfiniteConstantSampler()),
    Loader(Loader(())),
)


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_dataset_is_named(name):
    with pytest.raises(ArgumentError, match=f"`{name}`, which is endless"):
        ending("dataset", ENDLESS[name])


@pytest.mark.parametrize("number", range(len(FINITE)))
def test_any_other_is_returned(number):
    assert ending("dataset", FINITE[number]) is FINITE[number]


def test_the_result_of_an_input_function_is_looked_at():
    wrapped = ending("dataset", lambda context: itertools.cycle([1]))
    with pytest.raises(ArgumentError, match=r"`itertools\.cycle`"):
        wrapped(None)

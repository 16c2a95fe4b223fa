"""Wrap a dataset in one of its own kind, so that only the faults change its reading."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from replicator.base.types import Dataset, PyTree
from replicator.inputs.adapters import BUILT_IN

Touch = Callable[[PyTree], PyTree]
"""Takes each batch as it is read; may be late, and may return another."""


def faulty(dataset: Dataset, touch: Touch) -> Dataset:
    """Return `dataset` with each batch passed through `touch`."""
    if isinstance(dataset, list | tuple):
        return _FaultyList(dataset, touch)
    if isinstance(dataset, Iterator):
        return _FaultyPass(dataset, touch)
    if isinstance(dataset, Iterable) or any(a.claims(dataset) for a in BUILT_IN):
        return _FaultyIterable(dataset, touch)

    @functools.wraps(dataset)
    def call(*context: Any) -> Any:
        result = dataset(*context)
        return faulty(result, touch) if context else touch(result)

    return call


class _FaultyPass(Iterator):
    """One pass; it has `get_state` and `set_state` if the inner one has."""

    def __init__(self, batches: Iterator[PyTree], touch: Touch) -> None:
        self._batches = batches
        self._touch = touch

    def __next__(self) -> PyTree:
        return self._touch(next(self._batches))

    def __getattr__(self, name: str) -> Any:
        if name in ("get_state", "set_state", "close"):
            return getattr(self._batches, name)
        raise AttributeError(name)


class _FaultyList(list):
    """A list, which a resumed run reads from its middle on."""

    def __init__(self, batches: Iterable[PyTree], touch: Touch) -> None:
        super().__init__(batches)
        self._touch = touch

    def __iter__(self) -> Iterator[PyTree]:
        return _FaultyPass(super().__iter__(), self._touch)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _FaultyList(found, self._touch) if isinstance(index, slice) else found


class _FaultyIterable:
    def __init__(self, dataset: Any, touch: Touch) -> None:
        self._dataset = dataset
        self._touch = touch

    def __iter__(self) -> Iterator[PyTree]:
        for adapter in BUILT_IN:
            if adapter.claims(self._dataset):
                return _FaultyPass(adapter.iterate(self._dataset), self._touch)
        return _FaultyPass(iter(self._dataset), self._touch)

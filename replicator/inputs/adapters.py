"""Iterate over any kind of dataset, without importing the library that made it.

Lists, generators, NumPy iterators and grain's classes (`DataLoader`, `MapDataset`,
`IterDataset`) are plain iterables of batches. Other kinds need an adapter: two methods.
An iterable starts anew each time it is iterated; an iterator can be read once.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard

import jax

from replicator.base.types import Dataset, PyTree
from replicator.errors import ArgumentError
from replicator.inputs.context import InputContext


class Adapter(Protocol):
    """Reads one kind of dataset; pass your own to `InputOptions(adapters=...)`."""

    def claims(self, dataset: Any) -> bool:
        """Return whether this adapter reads `dataset`."""
        ...

    def iterate(self, dataset: Any) -> Iterator[PyTree]:
        """Start a pass over `dataset` that yields its batches as pytrees of NumPy."""
        ...


class TorchLoader:
    """Reads a PyTorch `DataLoader`; its tensors come off their device and graph.

    Give a loader with workers `multiprocessing_context="forkserver"`: JAX has threads,
    and a forked copy of a process that has threads may hang.
    """

    def claims(self, dataset: Any) -> bool:
        """Return whether `dataset` is a PyTorch `DataLoader` or a subclass of it.

        >>> TorchLoader().claims([1, 2])
        False
        """
        return any(
            kind.__name__ == "DataLoader" and _package(kind) == "torch"
            for kind in type(dataset).__mro__
        )

    def iterate(self, dataset: Any) -> Iterator[PyTree]:
        """Start a pass over `dataset`."""
        for batch in dataset:
            yield jax.tree.map(_numpy_from_tensor, batch)


class TensorFlowData:
    """Reads a `tf.data.Dataset`."""

    def claims(self, dataset: Any) -> bool:
        """Return whether `dataset` is a `tf.data.Dataset`.

        >>> TensorFlowData().claims([1, 2])
        False
        """
        return hasattr(dataset, "as_numpy_iterator") and any(
            _package(kind) == "tensorflow" for kind in type(dataset).__mro__
        )

    def iterate(self, dataset: Any) -> Iterator[PyTree]:
        """Start a pass over `dataset`."""
        return dataset.as_numpy_iterator()


BUILT_IN: tuple[Adapter, ...] = (TorchLoader(), TensorFlowData())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Data of one pipeline, read in passes one after the other.

    Attributes:
      start: Begins a pass.
      repeats: Whether another pass can begin when one has ended.
      same_passes: Whether every pass is known to yield the same batches.
      set_epoch: Functions that set the number of the pass in the data and its samplers.
    """

    start: Callable[[], Iterator[PyTree]]
    repeats: bool
    same_passes: bool = False
    set_epoch: Sequence[Callable[[int], object]] = ()

    def begin(self, epoch: int) -> Iterator[PyTree]:
        """Begin the pass of this number, from 0.

        >>> list(Source(start=lambda: iter([1, 2]), repeats=True).begin(0))
        [1, 2]
        """
        for set_epoch in self.set_epoch:
            set_epoch(epoch)
        return self.start()


def open_sources(
    dataset: Dataset,
    contexts: Sequence[InputContext],
    *,
    adapters: Sequence[Adapter] = (),
) -> list[Source]:
    """Open one source for each pipeline.

    A callable that requires an argument is an input function: it is called once for
    each pipeline, here, in the caller's thread. A callable that requires none yields a
    batch each time it is called, and ends by raising `StopIteration`.

    Args:
      dataset: Dataset of the user.
      contexts: Pipelines that this process reads.
      adapters: Adapters of the user, tried before the built-in ones.

    Raises:
      ArgumentError: `dataset` does not yield batches, or must feed several pipelines
        and is not an input function.

    >>> context = InputContext(pipeline_index=0, num_pipelines=1, num_replicas=8)
    >>> open_sources([1, 2], [context])[0].repeats
    True
    """
    readers = (*adapters, *BUILT_IN)
    if is_input_fn(dataset, adapters):
        return [_open_source(dataset(context), readers) for context in contexts]
    if contexts[0].num_pipelines > 1:
        raise ArgumentError(
            "`dataset` must be an input function for mode 'per_replica', got "
            f"{_kind(dataset)}. Write `def input_fn(context)`, or use mode 'per_host'."
        )
    return [_open_source(dataset, readers)]


def check_read_anew(
    name: str, dataset: Any, *, why: str = "", adapters: Sequence[Adapter] = ()
) -> None:
    """Refuse a dataset that cannot be read a second time.

    >>> check_read_anew("eval_dataset", iter([1, 2]))
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `eval_dataset` must be one that can be read ...

    Args:
      name: Name of the argument.
      dataset: Dataset of the user.
      why: Argument that requires it: "on_nonfinite='rollback'".
      adapters: Adapters of the user.

    Raises:
      ArgumentError: It is not a dataset, or can be read only once.
    """
    if is_input_fn(dataset, adapters):
        return
    if not _open_source(dataset, (*adapters, *BUILT_IN), name=name).repeats:
        raise ArgumentError(
            f"`{name}` must be one that can be read again"
            f"{f' with `{why}`' if why else ''}, got {_kind(dataset)}. Pass a "
            "list, a grain dataset or `input_fn(context)`."
        )


def check_datasets(name: str, given: Dataset | Mapping[str, Dataset]) -> None:
    """Check one finite dataset that is read again and again, or several by names.

    >>> check_datasets("eval_dataset", {"val": [{"x": 1.0}]})

    Raises:
      ArgumentError: One ends never, or cannot be read again; or a name is not one.
    """
    if not isinstance(given, Mapping):
        check_read_anew(name, given)
        ending(name, given)
        return
    named = all(isinstance(key, str) and key and "/" not in key for key in given)
    if not (given and named):
        raise ArgumentError(
            f"`{name}` must name each of several datasets by a string without "
            f'`/`, got {list(given)}. Write `{{"val": ..., "test": ...}}`.'
        )
    for key, dataset in given.items():
        check_read_anew(f"{name}[{key!r}]", dataset)
        ending(f"{name}[{key!r}]", dataset)


def ending(name: str, dataset: Dataset, *, adapters: Sequence[Adapter] = ()) -> Dataset:
    """Return a dataset that is to be read to its end; refuse one known to have none.

    A generator does not show whether it ends.

    >>> ending("dataset", itertools.cycle([1, 2]))
    Traceback (most recent call last):
    replicator.errors.ArgumentError: `dataset` must end where no `steps` are given, ...

    Args:
      name: Name of the argument.
      dataset: Dataset of the user; the result of an input function is checked later.
      adapters: Adapters of the user.

    Raises:
      ArgumentError: It is endless.
    """
    if is_input_fn(dataset, adapters):
        # By its one argument: the context.
        return functools.wraps(dataset)(
            lambda context: ending(name, dataset(context), adapters=adapters)
        )
    waiting = [dataset]
    for _ in range(_MOST_PARTS):
        if not waiting:
            break
        part = waiting.pop()
        if _is_endless(part):
            kind = type(part)
            whose = f"{_package(kind)}." if _package(kind) != "builtins" else ""
            raise ArgumentError(
                f"`{name}` must end where no `steps` are given, got "
                f"`{whose}{kind.__name__}`, which is endless. Pass `steps`, or one "
                "pass of the data."
            )
        # Containers of grain, PyTorch and Hugging Face.
        waiting += getattr(part, "_parents", ())
        inner = (getattr(part, name, None) for name in _INNER)
        waiting += [each for each in inner if each is not None]
    return dataset


_MOST_PARTS = 1000  # an object may make up its attributes
_INNER = ("batch_sampler", "sampler", "_sampler", "_ex_iterable", "ex_iterable")


def _is_endless(part: Any) -> bool:
    kind = type(part)
    if kind is itertools.repeat:
        try:
            part.__length_hint__()
        except TypeError:  # without a number of times
            return True
        return False
    match _package(kind):
        case "grain":
            return getattr(part, "_num_epochs", 1) is None
        case "datasets":
            return getattr(part, "num_times", 1) is None
        case "tensorflow" if hasattr(part, "cardinality"):
            return int(part.cardinality()) == -1
    if kind.__name__ == "_InfiniteConstantSampler":  # of a PyTorch `IterableDataset`
        return False
    return kind in (itertools.cycle, itertools.count) or "Infinite" in kind.__name__


def is_input_fn(
    dataset: Any, adapters: Sequence[Adapter] = ()
) -> TypeGuard[Callable[..., Any]]:
    """Return whether `dataset` is called once for each pipeline, with its context.

    >>> is_input_fn(lambda context: [])
    True
    """
    readers = (*adapters, *BUILT_IN)
    if isinstance(dataset, Iterable) or any(a.claims(dataset) for a in readers):
        return False
    return callable(dataset) and _requires_argument(dataset)


def _requires_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some C functions show no signature
        return False
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return any(
        parameter.kind in positional and parameter.default is inspect.Parameter.empty
        for parameter in parameters
    )


def _open_source(
    dataset: Any, adapters: Sequence[Adapter], *, name: str = "dataset"
) -> Source:
    for adapter in adapters:
        if adapter.claims(dataset):
            return Source(
                start=partial(adapter.iterate, dataset),
                repeats=True,
                set_epoch=_epoch_setters(dataset),
            )
    if isinstance(dataset, Mapping | str | bytes) or hasattr(dataset, "__array__"):
        raise ArgumentError(
            f"`{name}` must yield batches, got one {_kind(dataset)}. "
            "Put it in a list to read it as one batch again and again."
        )
    if isinstance(dataset, Iterable):
        if isinstance(dataset, list | tuple):
            return Source(start=partial(iter, dataset), repeats=True, same_passes=True)
        return Source(
            start=partial(iter, dataset),
            repeats=not isinstance(dataset, Iterator),
            same_passes=_package(type(dataset)) == "grain",
            set_epoch=_epoch_setters(dataset),
        )
    if callable(dataset):
        return Source(start=partial(_calls, dataset), repeats=False)
    if dataset is None:
        raise ArgumentError(
            f"`{name}` must be an iterable of batches or a callable, got `NoneType`. "
            "Pass the batches, or end the input function with `return`."
        )
    raise ArgumentError(
        f"`{name}` must be an iterable of batches or a callable, got "
        f"{_kind(dataset)}. Hand over an adapter for it in `adapters`."
    )


def _epoch_setters(dataset: Any) -> list[Callable[[int], object]]:
    """Return each `set_epoch` that a PyTorch training loop would have to call."""
    batches = getattr(dataset, "batch_sampler", None)
    owners = [dataset, batches, getattr(batches, "sampler", None)]
    owners += [getattr(dataset, name, None) for name in ("sampler", "dataset")]
    setters = (getattr(owner, "set_epoch", None) for owner in owners)
    return [each for each in setters if callable(each)]


def _calls(fetch: Callable[[], PyTree]) -> Iterator[PyTree]:
    while True:
        try:
            batch = fetch()
        except StopIteration:
            return
        if isinstance(batch, Iterator):
            raise ArgumentError(
                "`dataset` must return one batch per call where it takes no argument, "
                f"got {_kind(batch)}. Write `def input_fn(context)` to return many."
            )
        yield batch


def _numpy_from_tensor(leaf: Any) -> Any:
    if _package(type(leaf)) != "torch":
        return leaf
    return leaf.detach().cpu().numpy()


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _kind(value: Any) -> str:
    return f"`{type(value).__name__}`"

"""Handles: promises of a client, given to other nodes before anything runs.

    producer = program.add_node(lp.CourierNode(Producer), label="producer")
    program.add_node(lp.CourierNode(Consumer, producer), label="consumer")

`producer` is a handle. As an argument of another node it is an edge; when that node
starts it is dereferenced: `Consumer` is given a client.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from replicator.base.types import PyTree
from replicator.launchpad_bridge.running.containers import leaves_with_paths, map_leaves

Client = TypeVar("Client")
Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]


class Dereferenceable(abc.ABC, Generic[Client]):
    """An argument that is replaced when its node starts: a handle, a `Deferred`."""

    @abc.abstractmethod
    def dereference(self) -> Client:
        """Return the object that replaces it."""


class Handle(Dereferenceable[Client], Generic[Client]):
    """The interface of a node, for others: `dereference()` returns a client of it.

    Attributes:
      node: The node that made it; None where it was pickled or copied.
    """

    node: Any = None

    def connect(self, node: Any, label: str) -> None:
        """Note the user of this handle; called at launch, before addresses are known.

        Args:
          node: Node that has this handle as an argument.
          label: Label of its group.
        """

    def transform(self, executables: Sequence[Any]) -> Sequence[Any]:
        """Return the executables that use this handle, changed if need be."""
        return executables

    def __getstate__(self) -> dict[str, Any]:
        # A handle travels in recipes; its node does not.
        return {key: value for key, value in vars(self).items() if key != "node"}


class NoHandle(Handle[None]):
    """Handle of a node that has no methods for others."""

    def dereference(self) -> None:
        """Raise: there is no client."""
        raise NotImplementedError(
            "The handle of a PyNode cannot be dereferenced: it offers no methods. "
            "Use a CourierNode where others are to call it."
        )


class Composite(Dereferenceable[Client], Generic[Client]):
    """An argument with arguments of its own that may hold handles, as `Deferred`."""

    @property
    @abc.abstractmethod
    def arguments(self) -> "Arguments":
        """Return the arguments that may hold handles."""


def maybe_dereference(obj: Any) -> Any:
    """Return the object that replaces a handle or a `Deferred`; all else unchanged."""
    return obj.dereference() if isinstance(obj, Dereferenceable) else obj


def dereferenced(structure: PyTree) -> PyTree:
    """Return a structure with clients in place of the handles.

    >>> dereferenced({"args": [1, lp.Deferred(sum, [1, 2])]})
    {'args': [1, 3]}
    """
    return map_leaves(maybe_dereference, structure)


def handles_in(
    arguments: Arguments, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Handle[Any]]]:
    """Yield the handles among arguments with their paths, those in `Deferred` too.

    Args:
      arguments: Arguments of a node.
      path: Prefix of the paths, before "args[0]".
      seen: Identities of `Composite`s that were searched already.
    """
    seen = set() if seen is None else seen
    args, kwargs = arguments
    for part, name in ((args, "args"), (kwargs, "kwargs")):
        for leaf_path, leaf in leaves_with_paths(part, f"{path}{name}"):
            if isinstance(leaf, Handle):
                yield leaf_path, leaf
            elif isinstance(leaf, Composite) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield from handles_in(leaf.arguments, f"{leaf_path}.", seen)


def extract_handles(
    obj: PyTree, handles: list[Handle[Any]], visited: set[int] | None = None
) -> None:
    """Append the handles in `obj` to `handles`; those inside `Deferred` too."""
    handles.extend(handle for _, handle in handles_in(((obj,), {}), seen=visited))

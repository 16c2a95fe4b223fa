"""Layouts: they spread one function over devices, whatever the engine.

A layout is the one place that knows where state, batches and results lie. Modules above
it write the function of one replica, name for each argument and result how the
replicas' values are related to the value outside, and call the function that `spread`
returns with global arrays. An engine is a maker of layouts: `ReplicatedLayout` gives
each device a replica, `PartitionedLayout` makes all devices one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Protocol

from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from replicator.base.types import PyTree
from replicator.inputs.context import BatchLayout


@dataclasses.dataclass(frozen=True, slots=True)
class ValueKind:
    """Relation of a global value to the values that replicas have.

    Attributes:
      name: `"state"`: equal on all replicas, except leaves declared `PerReplica`, of
        which each replica has its own. `"examples"`: each replica has the rows of its
        own examples, in order. `"equal"`: whole on each replica. `"per_replica"`: each
        replica has a value; outside there is an array axis of replicas.
      axis: Array axis of examples, or of replicas.
    """

    name: Literal["state", "examples", "equal", "per_replica"]
    axis: int = 0


STATE = ValueKind("state")
EQUAL = ValueKind("equal")


def examples(axis: int = 0) -> ValueKind:
    """Return the kind of arrays whose axis `axis` counts examples.

    >>> examples(1)
    ValueKind(name='examples', axis=1)
    """
    return ValueKind("examples", axis)


def per_replica(axis: int = 0) -> ValueKind:
    """Return the kind of values of each replica, along a new axis.

    >>> per_replica()
    ValueKind(name='per_replica', axis=0)
    """
    return ValueKind("per_replica", axis)


class ProcessGroup(Protocol):
    """The processes of a run: they compare what must be the same in all of them.

    Both methods return at once where a mesh lies in one process.
    """

    def require_same_program(
        self, mesh: Mesh, key: Callable[[], str], *, name: str = "step_fn"
    ) -> None:
        """Return if the function `name` became the same program in all processes.

        Raises:
          ArgumentError: The keys of its programs differ.
        """

    def require_same_state(self, mesh: Mesh, state: PyTree) -> None:
        """Return if the arrays that each process holds whole are the same in all.

        Raises:
          ArgumentError: A leaf differs.
        """


class OneProcess(ProcessGroup):
    """The only process of a run: there is nothing to compare."""


class Layout(BatchLayout, Protocol):
    """A way to spread one function over devices.

    Shapes are arrays or `jax.ShapeDtypeStruct`s. A state is the user's, or a `RunState`
    around it: rules for paths apply to the user's part.
    """

    @property
    def processes(self) -> ProcessGroup:
        """The processes that share the mesh."""
        ...

    def pad_state(self, state: PyTree) -> PyTree:
        """Return a state as it is kept between steps.

        Args:
          state: Arrays, of NumPy, of JAX, or traced; padded for this layout already, or
            not, or for another one.

        Returns:
          The state, with `Padded` in place of the leaves that this layout pads.

        Raises:
          ArgumentError: As `state_shardings`.
        """
        ...

    def state_shardings(self, shapes: PyTree) -> list[NamedSharding]:
        """Return the sharding of each leaf of a state as it is kept, in leaf order.

        Not a tree of them: a node that checks itself takes only arrays.

        Raises:
          ArgumentError: This engine has no place for a leaf; names it.
        """
        ...

    def check_state(self, shapes: PyTree) -> None:
        """Refuse the first state of a run that this layout was not made for.

        Raises:
          ArgumentError: It was made for another one; names a variable or a rule.
        """

    def spread(
        self, fn: Callable[..., Any], *, inputs: tuple[ValueKind, ...], outputs: PyTree
    ) -> Callable[..., Any]:
        """Return the function of all replicas together, to be traced under `jit`.

        Args:
          fn: Function of one replica, of its own values.
          inputs: Kind of each argument.
          outputs: A prefix of the results of `fn`, with kinds as leaves. A result of
            kind state has the structure of the argument of that kind. `fn` gets the
            state without padding.

        Returns:
          A function of global arrays, with global results and the state as it is kept;
          every process can read all of a result that is neither state nor equal.
        """
        ...

    def check(
        self, traced: core.Jaxpr, state: PyTree, batch: PyTree, *, batch_axis: int
    ) -> None:
        """Refuse a traced step that this engine would run wrongly.

        Args:
          traced: The program `(state, batch, key)` around one spread function whose
            first result is the state.
          state: Its argument.
          batch: Its argument, as placed.
          batch_axis: Axis of the batch that counts examples.

        Raises:
          ReplicatorError: It would; the message names the leaf.
        """

    def describe(self) -> dict[str, Any]:
        """Return the engine and its mesh in plain JSON, for records."""
        ...

"""Nodes that run a function, or make an object and run it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from replicator.errors import check_not_async
from replicator.launchpad_bridge.handles import Arguments, NoHandle, dereferenced
from replicator.launchpad_bridge.launch_types import LaunchType
from replicator.launchpad_bridge.nodes.node import HandleT, Node, name_of
from replicator.launchpad_bridge.running.node_context import LaunchContext

_LOG = logging.getLogger(__name__)
Worked = TypeVar("Worked")


class PyNode(Node[HandleT], Generic[HandleT, Worked]):
    """Runs a function; handles among its arguments arrive as clients.

    >>> handle = program.add_node(lp.PyNode(print, "hello"), label="greeter")
    """

    def __init__(self, function: Callable[..., Worked], *args: Any, **kwargs: Any):
        """Store the function and its arguments.

        Args:
          function: Runs in the node; its return value is the node's result.
          *args: Its arguments, which may hold handles and `Deferred`s, nested.
          **kwargs: Its named arguments, likewise.

        Raises:
          ArgumentError: It is an `async def`.
        """
        super().__init__()
        check_not_async("function", function)
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self.collect_input_handles()

    @property
    def function(self) -> Callable[[], Worked]:
        """Return the function of the worker: it takes no arguments."""
        return self._call_function

    @property
    def arguments(self) -> Arguments:
        """Return the arguments, which may hold handles."""
        return (self._args, self._kwargs)

    @property
    def description(self) -> str:
        """Return the name of its function."""
        return name_of(self._function)

    def create_handle(self) -> Any:
        """Return a handle that cannot be dereferenced: it has no methods."""
        return self._track_handle(NoHandle())  # type: ignore[arg-type]

    @staticmethod
    def to_executables(
        nodes: Sequence[Any], label: str, launch_context: LaunchContext
    ) -> list[Callable[[], Any]]:
        """Return the function of the worker of each node."""
        return [node.function for node in nodes]

    @classmethod
    def default_launch_config(cls, launch_type: LaunchType) -> Any:
        """Return None: a node has no default resources."""
        return None

    def _call_function(self) -> Worked:
        args, kwargs = dereferenced(self.arguments)
        return self._function(*args, **kwargs)


class PyClassNode(PyNode[HandleT, Any], Generic[HandleT, Worked]):
    """Makes an object and calls its `run()`, if it has one.

    >>> class Evaluator:
    ...     def __init__(self, seed):
    ...         self.seed = seed
    ...     def run(self):
    ...         return 6 * self.seed
    >>> with lp.launch(lp.make_program(lp.PyClassNode(Evaluator, 7))) as run:
    ...     run.wait()
    >>> run.results["node0"]
    42
    """

    def __init__(self, constructor: Callable[..., Worked], *args: Any, **kwargs: Any):
        """Store the constructor and its arguments.

        Args:
          constructor: A class, or a function that returns an object; runs in the node.
          *args: Its arguments, which may hold handles and `Deferred`s, nested.
          **kwargs: Its named arguments, likewise.

        Raises:
          ArgumentError: The constructor, or the class's `run`, is an `async def`.
        """
        super().__init__(constructor, *args, **kwargs)
        check_not_async("run", getattr(constructor, "run", None))
        self._should_run = True
        self._instance: Worked | None = None
        self._is_constructed = False

    @property
    def constructor(self) -> Callable[..., Worked]:
        """Return the class or function that makes the object."""
        return self._function

    def disable_run(self) -> None:
        """Only make the object: a test calls its methods, step by step."""
        self._should_run = False

    def enable_run(self) -> None:
        """Call the object's `run()` again, as if `disable_run` had not been called."""
        self._should_run = True

    def run(self) -> Any:
        """Make the object, call its `run()`, return the result."""
        instance = self._construct_instance()
        if self._runs(instance):
            return instance.run()  # type: ignore[attr-defined]
        _LOG.warning(
            "run() not defined on the instance (or disable_run() was called.). "
            "Exiting..."
        )
        return None

    def forget_run(self) -> None:
        """Make the object anew in the next start."""
        self._instance = None
        self._is_constructed = False

    def _call_function(self) -> Any:
        return self.run()

    def _runs(self, instance: object) -> bool:
        return self._should_run and hasattr(instance, "run")

    def _construct_instance(self) -> Any:
        if not self._is_constructed:
            self._instance = super()._call_function()
            check_not_async("run", getattr(self._instance, "run", None))
            self._is_constructed = True
        return self._instance

    def __getstate__(self) -> dict[str, Any]:
        # Another process makes an object of its own.
        return {**super().__getstate__(), "_instance": None, "_is_constructed": False}

"""`Program`: a directed graph of nodes, written down before anything runs.

    program = lp.Program("training")
    learner = program.add_node(lp.CourierNode(Learner), label="learner")
    with program.group("actors", resources=lp.Resources(cpus=1)):
        for seed in range(8):
            program.add_node(lp.CourierNode(Actor, learner, seed))
    lp.launch(program, launch_type="threads").wait()

Nodes of one label are a group: alike, with the same resources, numbered in the order
they came. A handle among the arguments of a node is an edge.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from replicator.errors import ProgramError
from replicator.launchpad_bridge.graph import graph_of
from replicator.launchpad_bridge.protocols import Resources, Restart
from replicator.monitoring.drawing.layout import lay_out
from replicator.monitoring.drawing.mermaid import mermaid_of
from replicator.monitoring.drawing.svg import svg_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """Settings of a group.

    Attributes:
      resources: Needs of each of its workers; None if they were not set.
      restart: Restarts of a worker that fails; None if they were not set.
    """

    resources: Resources | None = None
    restart: Restart | None = None


class Program:
    """Nodes in groups, and the handles between them."""

    def __init__(self, name: str, *, trusted_memory: bool = False) -> None:
        """Begin with no nodes.

        Args:
          name: Name of the program, in logs and errors.
          trusted_memory: Whether nodes of one host use arrays of calls in memory that
            the sender can still write: see `MessageLimits`.
        """
        self.trusted_memory = trusted_memory
        self._name = name
        self._groups: dict[str, list[Any]] = {}
        self._settings: dict[str, GroupSettings] = {}
        self._current_group: str | None = None
        # Returns whether its run has ended; true of a program that was never launched.
        self._is_idle: Callable[[], bool] = lambda: True

    @property
    def name(self) -> str:
        """Return the program's name."""
        return self._name

    @property
    def groups(self) -> dict[str, list[Any]]:
        """Return the nodes by label, in the order in which they were added."""
        return self._groups

    @property
    def current_group(self) -> str:
        """Return the label of the group that is open.

        Raises:
          ProgramError: No group is open.
        """
        if self._current_group is None:
            raise ProgramError(
                "`current_group` must be read inside of `with program.group(...)`."
            )
        return self._current_group

    @property
    def is_running(self) -> bool:
        """Return whether it was launched, and has not ended."""
        return not self._is_idle()

    def to_svg(self) -> str:
        """Return a picture: workers in the boxes of their groups, handles as arrows.

        The same program gives the same text. It may be half written, and run or not.

        >>> _ = pathlib.Path("program.svg").write_text(program.to_svg())
        """
        return svg_of(lay_out(graph_of(self)))

    def to_mermaid(self) -> str:
        """Return the picture as Mermaid text, for READMEs and notes."""
        return mermaid_of(graph_of(self))

    def set_run(self, is_over: Callable[[], bool]) -> None:
        """Note that `launch` starts a run, which goes on until `is_over()`."""
        self._is_idle = is_over

    def get_all_nodes(self) -> list[Any]:
        """Return the nodes of all groups."""
        return list(itertools.chain.from_iterable(self._groups.values()))

    def settings(self, label: str) -> GroupSettings:
        """Return the settings of a group.

        >>> program = Program("training")
        >>> with program.group("actors", resources=Resources(cpus=1)):
        ...     pass
        >>> program.settings("actors").resources.cpus
        1
        """
        return self._settings.get(label, GroupSettings())

    def add_node(self, node: Any, label: str | None = None) -> Any:
        """Add a node; return its handle.

        Args:
          node: Node to run: anything with `create_handle()`.
          label: Label of its group. Leave it out inside of `with program.group(...)`.

        Returns:
          The handle, to be passed to other nodes.

        Raises:
          ProgramError: There is no label, or not that of the open group.
        """
        if self._current_group is not None:
            if label and label != self._current_group:
                raise ProgramError(
                    "The given label does not match the current group: "
                    f"{label} vs {self._current_group}."
                )
            label = self._current_group
        if not label:
            raise ProgramError(_NO_LABEL)
        self._groups.setdefault(label, []).append(node)
        belong_to = getattr(node, "belong_to", None)
        if callable(belong_to):
            belong_to(self, label)
        return node.create_handle()

    @contextlib.contextmanager
    def group(
        self,
        label: str,
        *,
        resources: Resources | None = None,
        restart: Restart | None = None,
    ) -> Iterator[None]:
        """Add the nodes of the block to one group; a group may be opened again.

        Args:
          label: Label of the group.
          resources: Needs of each of its workers.
          restart: Restarts of a worker that fails; none by default.

        Raises:
          ProgramError: There is no label, another group is open, or this group was
            given another value before.

        >>> program = Program("training")
        >>> with program.group("actors", restart=Restart(attempts=3)):
        ...     handle = program.add_node(lp.PyNode(print))
        >>> list(program.groups)
        ['actors']
        """
        if not label:
            raise ProgramError(_NO_LABEL)
        if self._current_group is not None:
            raise ProgramError("group() cannot be nested.")
        self._set(label, resources=resources, restart=restart)
        self._current_group = label
        try:
            yield
        finally:
            self._current_group = None

    def _set(self, label: str, **settings: Resources | Restart | None) -> None:
        known = self.settings(label)
        changes: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
        for name, value in changes.items():
            before = getattr(known, name)
            if before is not None and before != value:
                raise ProgramError(
                    f"`{name}` of group {label!r} must be set once, got {value} after "
                    f"{before}. Leave it out when you open the group again."
                )
        self._settings[label] = dataclasses.replace(known, **changes)


_NO_LABEL = "Label should not be empty."


def make_program(*nodes: Any, name: str = "launchpad") -> Program:
    """Return a program of nodes, each in a group of its own: "node0", "node1", ...

    Args:
      *nodes: Nodes to run.
      name: Name of the program.

    >>> with lp.launch(lp.make_program(lp.PyNode(print, "hello"))) as run:
    ...     run.wait()
    hello
    """
    program = Program(name)
    for index, node in enumerate(nodes):
        program.add_node(node, label=f"node{index}")
    return program

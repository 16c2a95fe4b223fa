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
from collections.abc import Iterator
from typing import Any, Protocol

from replicator.errors import ProgramError
from replicator.launchpad_bridge.graph import graph_of
from replicator.launchpad_bridge.protocols import Resources, Restart
from replicator.launchpad_bridge.view.drawing.layout import lay_out
from replicator.launchpad_bridge.view.drawing.mermaid import mermaid_of
from replicator.launchpad_bridge.view.drawing.svg import svg_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """What was said of a group.

    Attributes:
      resources: What each of its workers needs; None if nothing was said.
      restart: Whether a failed one is started again; None if nothing was said.
    """

    resources: Resources | None = None
    restart: Restart | None = None


class Running(Protocol):
    """What a program knows of its run."""

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        ...


class Program:
    """Nodes in groups, and the handles between them."""

    def __init__(self, name: str, *, trusted_memory: bool = False) -> None:
        """Begin with no nodes.

        Args:
          name: Of the program, in logs and errors.
          trusted_memory: Whether nodes of one host use all arrays of calls where they
            lie in memory that the sender can still write: `MessageLimits`.
        """
        self.trusted_memory = trusted_memory
        self._name = name
        self._groups: dict[str, list[Any]] = {}
        self._settings: dict[str, GroupSettings] = {}
        self._current_group: str | None = None
        self._run: Running | None = None

    @property
    def name(self) -> str:
        """Return its name."""
        return self._name

    @property
    def groups(self) -> dict[str, list[Any]]:
        """Return the nodes by label, in the order they were added."""
        return self._groups

    @property
    def current_group(self) -> str:
        """Return the label of the group that is open.

        Raises:
          ProgramError: None is.
        """
        if self._current_group is None:
            raise ProgramError(
                "`current_group` must be asked for inside of `with program.group(...)`."
            )
        return self._current_group

    @property
    def is_running(self) -> bool:
        """Return whether it was launched, and has not ended."""
        return self._run is not None and not self._run.is_over

    def to_svg(self) -> str:
        """Return a picture: workers in the boxes of their groups, handles as arrows.

        The same program gives the same text. It may be half written, and run or not.

        >>> _ = pathlib.Path("program.svg").write_text(program.to_svg())
        """
        return svg_of(lay_out(graph_of(self)))

    def to_mermaid(self) -> str:
        """Return the picture as Mermaid text, for READMEs and notes."""
        return mermaid_of(graph_of(self))

    def runs_as(self, run: Running) -> None:
        """Know its run; `launch` tells."""
        self._run = run

    def get_all_nodes(self) -> list[Any]:
        """Return the nodes of all groups."""
        return list(itertools.chain.from_iterable(self._groups.values()))

    def settings(self, label: str) -> GroupSettings:
        """Return what was said of a group."""
        return self._settings.get(label, GroupSettings())

    def add_node(self, node: Any, label: str | None = None) -> Any:
        """Add a node; return its handle.

        Args:
          node: What to run: anything with `create_handle()`.
          label: Of its group. Leave it out inside of `with program.group(...)`.

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
          label: Of the group.
          resources: What each of its workers needs.
          restart: Whether a failed one is started again; by default it is not.

        Raises:
          ProgramError: There is no label, another group is open, or something else was
            said of this group before.
        """
        if not label:
            raise ProgramError(_NO_LABEL)
        if self._current_group is not None:
            raise ProgramError("group() cannot be nested.")
        self._say(label, resources=resources, restart=restart)
        self._current_group = label
        try:
            yield
        finally:
            self._current_group = None

    def _say(self, label: str, **said: Resources | Restart | None) -> None:
        known = self.settings(label)
        changes: dict[str, Any] = {k: v for k, v in said.items() if v is not None}
        for what, value in changes.items():
            before = getattr(known, what)
            if before is not None and before != value:
                raise ProgramError(
                    f"`{what}` of group {label!r} must be said once, got {value} after "
                    f"{before}. Leave it out when you open the group again."
                )
        self._settings[label] = dataclasses.replace(known, **changes)


_NO_LABEL = "Label should not be empty."


def make_program(*nodes: Any, name: str = "launchpad") -> Program:
    """Return a program of nodes, each in a group of its own: "node0", "node1", ...

    Args:
      *nodes: What to run.
      name: Of the program.

    >>> with lp.launch(lp.make_program(lp.PyNode(print, "hello"))) as run:
    ...     run.wait()
    hello
    """
    program = Program(name)
    for index, node in enumerate(nodes):
        program.add_node(node, label=f"node{index}")
    return program

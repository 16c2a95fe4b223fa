"""Interface to the node of a program in which a session runs."""

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

STOPPED = "the program's stop"
"""In place of a signal's name: the node's program asked the run to stop."""


@runtime_checkable
class ProgramNode(Protocol):
    """The node in whose thread a session runs: `lp.context.get_context()` is one.

    A protocol, as `training/` does not import programs.
    """

    @property
    def stop_event(self) -> threading.Event:
        """Set when the node is to stop."""
        ...

    @property
    def fail(self) -> Callable[[str], None]:
        """Ends the node with an error; called from another thread than the node's."""
        ...

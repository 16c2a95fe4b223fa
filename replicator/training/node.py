"""What a session asks of the node of a program that it runs in, where it does."""

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

STOPPED = "the program's stop"
"""Stands where the name of a signal would, for who asked a run to stop."""


@runtime_checkable
class Node(Protocol):
    """The node whose thread a session runs in: `lp.context.get_context()` is one.

    It is handed over, as programs are above runs: nothing here knows of them.
    """

    @property
    def stop_event(self) -> threading.Event:
        """Set when the node is to stop."""
        ...

    @property
    def fail(self) -> Callable[[str], None]:
        """Ends the node with an error; called from another thread than the node's."""
        ...

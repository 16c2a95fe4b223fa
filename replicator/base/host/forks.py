"""Drop inherited connections and locks in a forked child.

A child has all objects and descriptors of its parent and none of its threads. Two
processes that write to one socket mix their messages; a child that keeps the socket of
a server that is killed hides that from its clients; one that frees an array of shared
memory would free it for the sender, too. So objects for one process register here, and
are called in the child before anything else runs there. No lock may be taken then: the
thread that held it does not exist in the child.
"""

import os
import weakref
from typing import Protocol


class Droppable(Protocol):
    """An object that belongs to the process that made it."""

    def drop_after_fork(self) -> None:
        """Be of no use in this process, which is a child of the one that made it.

        Takes no lock, as its holder is not in this process; sends nothing to others.
        """


_inherited: "weakref.WeakSet[Droppable]" = weakref.WeakSet()


def register_fork_drop(owner: Droppable) -> None:
    """Let `owner` know when it finds itself in a forked child."""
    _inherited.add(owner)


def _drop_all() -> None:
    for owner in list(_inherited):
        owner.drop_after_fork()
    _inherited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_all)

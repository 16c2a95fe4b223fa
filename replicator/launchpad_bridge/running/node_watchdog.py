"""End a node that hangs: its thread if that can be, else the process that it is in.

A thread ends by an error that is raised in it, at its next instruction of Python. One
that waits in foreign code forever (a collective, a lock) never comes to that: then only
its process can be ended, with all other nodes that run in it.
"""

import os
import threading
from collections.abc import Callable, Sequence

from replicator.base.host.standard_streams import say_raw
from replicator.errors import NodeFailedError
from replicator.exit_codes import HUNG
from replicator.launchpad_bridge.running.thread_interrupt import raise_in_thread

GRACE_S = 15.0
"""Seconds that a thread may take to end; and then the program, to stop."""


def fail_node(
    thread: threading.Thread,
    over: threading.Event,
    report: str,
    *,
    node: str,
    stop_program: Callable[[], None],
    others: Callable[[], Sequence[str]],
) -> None:
    """End a node with an error; returns when it has ended.

    Called in the thread of a watchdog, while the node's own stands still.

    Args:
      thread: Thread of the node.
      over: Set when the node has ended.
      report: Text of the error.
      node: Name of the worker.
      stop_program: Asks all nodes to stop; called if the thread cannot be ended.
      others: Returns the names of other workers in this process.
    """
    if over.is_set():  # its thread may run something else by now
        return

    class Failed(NodeFailedError):  # made by Python, without arguments
        def __init__(self) -> None:
            super().__init__(report, node=node)

    Failed.__name__ = Failed.__qualname__ = NodeFailedError.__name__
    raise_in_thread(thread, Failed)
    if over.wait(GRACE_S):
        return
    stop_program()
    # The others save what they have, and leave, before their process ends.
    if over.wait(GRACE_S):
        return
    left = others()
    along = f", and with it {', '.join(left)}" if left else ""
    say_raw(
        f"replicator: the thread of `{node}` waits in foreign code and cannot be ended."
        f" Ending its process{along}, with exit code {HUNG}.\n"
    )
    os._exit(HUNG)

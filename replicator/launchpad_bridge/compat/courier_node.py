"""`CourierNode` as programs of Launchpad expect it: all public names can be called.

Here a node has the methods that its class declares. Launchpad adds each callable in the
object's `dir`: functions that its constructor made, those that its properties return
(as in Acme's inference server), and the methods of a wrapped object that a wrapper
lists in `__dir__` (as Acme's checkpoints do).
"""

from collections.abc import Iterator
from typing import Any, Generic

from replicator.launchpad_bridge.graph import with_inner
from replicator.launchpad_bridge.nodes.courier_node import CourierNode as OurCourierNode
from replicator.launchpad_bridge.nodes.node import Node
from replicator.launchpad_bridge.nodes.py_node import Worked
from replicator.launchpad_bridge.program import Program
from replicator.rpc.server.methods import Method, is_offered, method_of_function

_HAND_OVER = "set_courier_server"


class CourierNode(OurCourierNode[Worked], Generic[Worked]):
    """Makes an object in its worker; others can call all of its public methods."""

    def methods(self, instance: Any) -> list[Method]:
        """Return the methods for clients."""
        declared = {method.name: method for method in super().methods(instance)}
        named = {method.name: method for method in _named_by_dir(instance)}
        return list({**named, **declared}.values())


def mark_late_arguments(program: Program) -> None:
    """Mark nodes that got handles after they were made, as `configure` does.

    Launchpad's own advice for nodes with handles of each other is to write to a node's
    arguments; circles of such nodes can run.
    """
    for node in program.get_all_nodes():
        for part in with_inner(node):
            if isinstance(part, Node):
                now = [id(handle) for _, handle in part.inputs()]
                then = [id(handle) for handle in part.input_handles]
                part.is_configured = part.is_configured or now != then


def _named_by_dir(instance: Any) -> Iterator[Method]:
    for name in dir(instance):
        is_public = name == "__call__" or not name.startswith("_")
        if is_public and name != _HAND_OVER and is_offered(type(instance), name):
            value = getattr(instance, name)
            if callable(value):
                yield method_of_function(name, value)

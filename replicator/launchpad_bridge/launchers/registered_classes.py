"""Take the script's own registered classes along to a worker.

A worker does not run the script, it gets functions and classes of it by value. So what
the script's top level has registered for `rpc` has to be registered there again. So has
a class that bears its full name, module and all: not its module has registered it, but
somebody else (`compat.own_classes`).
"""

from collections.abc import Callable
from typing import Any

from replicator.base.types import PyTree
from replicator.launchpad_bridge.protocols import NodeContext
from replicator.rpc.codec.registry import DEFAULT_REGISTRY, Entry

_SCRIPT = "__main__"


class WithRegisteredClasses:
    """Registers classes, then runs a node.

    Args:
      run: Of an executable.
    """

    def __init__(self, run: Callable[[NodeContext], PyTree]) -> None:
        self._run = run
        self._classes = [(entry.name, entry.cls) for entry in _of_script()]

    def __call__(self, context: NodeContext) -> PyTree:
        """Register, and run."""
        for name, cls in self._classes:
            DEFAULT_REGISTRY.register(cls, name)
        return self._run(context)

    def __getattr__(self, name: str) -> Any:
        # Whoever looks at the function sees the one inside.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._run, name)


def _of_script() -> list[Entry]:
    known = DEFAULT_REGISTRY._by_name.values()
    return [
        entry
        for entry in known
        if entry.cls.__module__ == _SCRIPT
        or entry.name == f"{entry.cls.__module__}.{entry.cls.__qualname__}"
    ]

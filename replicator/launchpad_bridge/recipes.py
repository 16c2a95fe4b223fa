"""Recipes: executables of workers in other processes, as bytes.

They are pickled by value with cloudpickle, so that functions and classes of a script,
lambdas and closures come along; and they travel only from a launcher to a worker of its
own, through a file or a pipe that it made: nothing that arrives on a socket is ever
loaded here. If one does not pickle, the error names the node, the argument and three
ways out.

A worker does not run the script. Definitions of the script that come along are put into
the worker's own `__main__`, where `pickle` looks for them; a process that a node spawns
finds them in a file beside the recipe, in place of the script. Classes that the
script's top level registered for `rpc` are registered there again. So is a class under
its full name, module included, which `compat.own_classes` registered.
"""

import functools
import io
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from replicator.errors import LaunchError
from replicator.launchpad_bridge.handles import Composite
from replicator.launchpad_bridge.nodes.py_node import PyClassNode
from replicator.launchpad_bridge.protocols import Executable
from replicator.launchpad_bridge.running.containers import children
from replicator.rpc.codec.registry import DEFAULT_REGISTRY
from replicator.rpc.security.private_files import create_private

_SCRIPTS = ("__main__", "__mp_main__")  # the second in what was spawned
_IN_PLACE_OF_SCRIPT = """
def __getattr__(name):
    from replicator.launchpad_bridge.recipes import find_definition

    return find_definition({path!r}, name)
"""
LRU_CACHE = type(functools.lru_cache(print))
_NAMED = (type, types.FunctionType, LRU_CACHE)  # pickled by name


def pack(executable: Executable) -> bytes:
    """Return the recipe of a worker.

    Raises:
      LaunchError: It does not pickle; names the node and the argument.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        # `defined` is full when the pickler comes to it: all of it has come by then.
        pickler.dump((_registered_classes(), executable, pickler.defined))
        return file.getvalue()
    except Exception as error:
        raise LaunchError(_unpicklable(executable, error)) from error


def write(executable: Executable, recipe: Path) -> Path:
    """Write what a worker runs to a private file; return its path.

    Args:
      executable: What to run.
      recipe: Path of the file, which must not exist.

    Raises:
      LaunchError: It cannot be pickled, or not be written.
    """
    data = pack(executable)
    try:
        with os.fdopen(create_private(recipe), "wb") as file:
            file.write(data)
    except OSError as error:
        raise LaunchError(
            f"`{executable.name}` cannot be started: its recipe of {len(data)} bytes "
            f"cannot be written: {error}."
        ) from error
    return recipe


def unpack(recipe: Path) -> Executable:
    """Return the executable of a recipe that this worker's own launcher made.

    Definitions of the script are in `__main__` then.
    """
    classes, executable, defined = loads(recipe.read_bytes())
    main = sys.modules["__main__"]
    if defined:
        vars(main).update(defined)
        sys.modules["__mp_main__"] = main
        main.__file__ = str(_in_place_of_script(recipe))
    for name, cls in classes:
        DEFAULT_REGISTRY.register(cls, name)
    return executable


def find_definition(recipe: str, name: str) -> Any:
    """Return what the script of a program defines, in a process that a node started.

    Args:
      recipe: Path of the node's recipe.
      name: Name looked up in `__main__`.

    Raises:
      AttributeError: The script does not define it.
    """
    main = sys.modules["__main__"]
    vars(main).pop("__getattr__", None)  # its caller: `unpack` defines all names
    unpack(Path(recipe))
    return getattr(main, name)


def _in_place_of_script(recipe: Path) -> Path:
    """Return a file that a spawned process runs in place of the script."""
    path = recipe.with_name(f"{recipe.name}.py")
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(_IN_PLACE_OF_SCRIPT.format(path=str(recipe)))
    return draft.replace(path)  # whole, whoever dies or reads it meanwhile


def dumps(value: Any) -> bytes:
    """Return a value as bytes, for a process of the same program.

    >>> loads(dumps(lambda x: x + 1))(2)
    3
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Return the value of `dumps`, as given by a process of the same program."""
    return cloudpickle.loads(data)


def is_picklable(value: Any) -> bool:
    """Return whether a value can be part of a recipe.

    >>> is_picklable(lambda: 1), is_picklable(sys._getframe())
    (True, False)
    """
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _registered_classes() -> list[tuple[str, type]]:
    return [
        (entry.name, entry.cls)
        for entry in DEFAULT_REGISTRY._by_name.values()
        if entry.cls.__module__ in _SCRIPTS
        or entry.name == f"{entry.cls.__module__}.{entry.cls.__qualname__}"
    ]


class _Pickler(cloudpickle.Pickler):
    """Pickles cached functions as well, without their caches.

    Attributes:
      defined: Definitions of the script's top level that have come along, by name.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.defined: dict[str, Any] = {}
        script = sys.modules["__main__"]
        if script.__name__ in _SCRIPTS[1:]:  # no other process can import it
            cloudpickle.register_pickle_by_value(script)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _NAMED) and obj.__module__ in _SCRIPTS:
            name = obj.__qualname__
            if vars(sys.modules["__main__"]).get(name) is obj:
                self.defined[name] = obj
        if isinstance(obj, LRU_CACHE) and getattr(obj, "__wrapped__", None):
            return reduce_cached(obj)
        return super().reducer_override(obj)


def reduce_cached(function: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the pickle reduction of a cached function, without its cache."""
    return _cached, (function.__wrapped__, function.cache_parameters())


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _unpicklable(executable: Executable, error: Exception) -> str:
    node = getattr(executable.run, "node", None)
    path, culprit = _culprit(node, error)
    has_thread = not getattr(executable.run, "own_process", False)
    threads = (
        "; or launch with threads, which pickle nothing (`launch_type='threads'`, in "
        "tests `serialize_py_nodes=False`)"
    )
    return (
        f"The nodes associated to {executable.label!r} ({executable.name!r}, {node!r}) "
        f"were not serializable using cloudpickle: {path} "
        f"({_shown(culprit)}) raised {type(error).__name__}: {error}. "
        "Make it where the node runs, with `lp.Deferred(constructor, ...)` or in the "
        "constructor; or make it picklable (`__getstate__`)"
        f"{threads if has_thread else ''}."
    )


def _culprit(node: Any, error: Exception) -> tuple[str, Any]:
    """Return the path and value of a node's smallest part that does not pickle."""
    for path, part in _parts(node):
        if not is_picklable(part):
            return _smallest(path, part)
    return "it", error


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    for inner in getattr(node, "inner_nodes", ()):
        for path, part in _parts(inner):
            yield f"{path} of the inner {inner!r}", part
    args, kwargs = getattr(node, "arguments", ((), {}))
    yield from children(args, "args") or ()
    yield from children(kwargs, "kwargs") or ()
    if getattr(node, "_function", None) is not None:
        kind = "constructor" if isinstance(node, PyClassNode) else "function"
        yield f"the {kind}", node._function
    yield "the node", node


def _smallest(path: str, part: Any) -> tuple[str, Any]:
    if isinstance(part, Composite):
        args, kwargs = part.arguments
        inner = [*(children(args, "args") or ()), *(children(kwargs, "kwargs") or ())]
        below = [(f"{path}.{name}", value) for name, value in inner]
    else:
        below = children(part, path) or []
    if not below and hasattr(part, "__dict__") and not callable(part):
        below = [(f"{path}.{name}", value) for name, value in vars(part).items()]
    for below_path, value in below:
        if value is not part and not is_picklable(value):
            return _smallest(below_path, value)
    return path, part


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = type(value).__qualname__
    return text if len(text) <= 80 else f"{text[:77]}..."

"""Modules of `launchpad` and `courier`: the names of each, and their objects.

Real programs import from deep inside (`launchpad.nodes.python.local_multi_processing`).
All of these modules are made here, from one table, when the package is imported.
"""

import copyreg
import functools
import itertools
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import replicator.launchpad_bridge as lp
from replicator.errors import LaunchError, RpcError
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.compat import launch_flags
from replicator.launchpad_bridge.compat.courier_client import Client
from replicator.launchpad_bridge.compat.courier_node import CourierNode
from replicator.launchpad_bridge.compat.courier_server import Server
from replicator.launchpad_bridge.compat.launch_flags import FLAGS, LAUNCH_TYPE, launch
from replicator.launchpad_bridge.compat.reverb_node import ReverbHandle
from replicator.launchpad_bridge.launch_types import LaunchType
from replicator.launchpad_bridge.running.node_context import LaunchContext, get_context


def _check_nodes_are_serializable(label: str, nodes: Any) -> None:
    for node in nodes:
        if not recipes.is_picklable(node):
            raise LaunchError(
                f"The nodes associated to {label!r} were not serializable using "
                f"cloudpickle, got {node!r}. Use `lp.Deferred`, or "
                "`serialize_py_nodes=False`."
            )


def _enable_lru_cache_pickling_once() -> None:
    """Make other picklers than ours send cached functions by value."""
    copyreg.pickle(recipes.LRU_CACHE, recipes.reduce_cached)


def _exit_gracefully_on(signum: signal.Signals) -> Callable[[], Any]:
    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one does not break the exit
        sys.exit(0)

    return functools.partial(signal.signal, signum, leave)


def _launch_as(launch_type: LaunchType) -> types.ModuleType:
    """Return a module whose `launch` launches in one way."""
    return _module(
        "launch", {"launch": functools.partial(launch, launch_type=launch_type)}
    )


def _top(*names: str) -> dict[str, Any]:
    return {name: getattr(lp, name) for name in names}


def _module(name: str, names: Mapping[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name, "Names of Launchpad, and their objects here.")
    vars(module).update(names)
    vars(module)["__getattr__"] = missing(name)
    return module


def missing(module: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a module, which refuses a name that it has not."""

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"`{module}` has no `{name}` here. See `replicator.launchpad_bridge` for "
            "an equivalent, or open an issue."
        )

    return __getattr__


_STOPS = _top("register_stop_handler", "unregister_stop_handler")
_STOPS |= _top("stop_event", "wait_for_stop")
_LAUNCH_TYPES = _top("LaunchType", "is_local_launch", "is_local_launch_or_test")
_ADDRESSES = _top("Address", "AbstractAddressBuilder", "SimpleLocalAddressBuilder")
_ADDRESSES |= _top("get_port_from_address")
_EXAMPLES = "launchpad.examples"
_TESTS = "launchpad.launch.test_multi"
_LOCAL = "launchpad.launch.local_multi"

MODULES: Mapping[str, Mapping[str, Any]] = {
    "launchpad.address": _ADDRESSES,
    "launchpad.context": {
        **_LAUNCH_TYPES,
        "LaunchContext": LaunchContext,
        "get_context": get_context,
    },
    _EXAMPLES: {},
    "launchpad.flags": {"FLAGS": FLAGS, "LAUNCH_TYPE": LAUNCH_TYPE},
    "launchpad.program": _top("Program", "make_program"),
    "launchpad.launch.launch": {"FLAGS": FLAGS, "launch": launch},
    "launchpad.launch.serialization": {
        "check_nodes_are_serializable": _check_nodes_are_serializable,
        "enable_lru_cache_pickling_once": _enable_lru_cache_pickling_once,
    },
    "launchpad.launch.signal_handling": {
        "exit_gracefully_on_sigint": _exit_gracefully_on(signal.SIGINT),
        "exit_gracefully_on_sigquit": _exit_gracefully_on(signal.SIGQUIT),
    },
    "launchpad.launch.worker_manager": _STOPS,
    f"{_TESTS}_threading": {"launch": _launch_as(LaunchType.TEST_MULTI_THREADING)},
    f"{_TESTS}_threading.address_builder": _top("bind_addresses"),
    f"{_TESTS}_processing": {"launch": _launch_as(LaunchType.TEST_MULTI_PROCESSING)},
    f"{_LOCAL}_threading": {"launch": _launch_as(LaunchType.LOCAL_MULTI_THREADING)},
    f"{_LOCAL}_processing": {"launch": _launch_as(LaunchType.LOCAL_MULTI_PROCESSING)},
    "launchpad.nodes.base": _top("Handle", "Node", "extract_handles"),
    "launchpad.nodes.cacher.node": _top("CacherNode"),
    "launchpad.nodes.courier.courier_utils": _top("batched_handler"),
    "launchpad.nodes.courier.node": {
        **_top("CourierClient", "CourierHandle"),
        "CourierNode": CourierNode,
        "COURIER_PORT_NAME": "courier",
    },
    "launchpad.nodes.dereference": _top(
        "Deferred", "Dereferenceable", "maybe_dereference"
    ),
    "launchpad.nodes.multi_processing_colocation.node": _top(
        "MultiProcessingColocation"
    ),
    "launchpad.nodes.multi_threading_colocation.node": _top("MultiThreadingColocation"),
    "launchpad.nodes.python.local_multi_processing": _top("PythonProcess"),
    "launchpad.nodes.python.node": _top("PyClassNode", "PyNode"),
    "launchpad.nodes.python.xm_docker": _top("DockerConfig"),
    "launchpad.nodes.reverb.node": {
        **_top("ReverbNode"),
        "ReverbHandle": ReverbHandle,
        "REVERB_PORT_NAME": "reverb",
    },
    "launchpad.program_stopper.program_stopper": _top("make_program_stopper"),
    "launchpad.stop_program.stop": _top("stop"),
    "courier.python.client": {
        "Client": Client,
        "list_methods": lp.list_methods,
        "StatusNotOk": RpcError,
    },
    "courier.python.py_server": {"Server": Server},
}
"""All modules below the two packages with names; modules above them exist, too."""

PACKAGES: Mapping[str, Mapping[str, Any]] = {
    "launchpad": {
        **{name: getattr(lp, name) for name in lp.__all__},
        "CourierNode": CourierNode,
        "LAUNCH_TYPE": LAUNCH_TYPE,
        "flags": launch_flags.flags,
        "launch": launch,
    },
    "courier": {"Client": Client, "Server": Server, "list_methods": lp.list_methods},
}
"""Names of the packages themselves."""


def fill(package: str) -> dict[str, Any]:
    """Make the modules of a package; return the names of the package itself.

    Args:
      package: "launchpad" or "courier".
    """
    made = {
        name: _module(name, MODULES.get(name, {}))
        for full in MODULES
        if full.startswith(f"{package}.")
        for name in list(itertools.accumulate(full.split("."), "{}.{}".format))[1:]
    }
    for name, module in made.items():
        above, _, last = name.rpartition(".")
        module.__package__ = name
        # Packages all, as far as `import` is concerned; of the examples also in fact.
        module.__path__ = _example_folders() if name == _EXAMPLES else []
        sys.modules[name] = module
        if above in made:
            vars(made[above])[last] = module
        if above == "launchpad.launch":
            # `lp.launch` is the function; `lp.launch.worker_manager` is used, too.
            setattr(launch, last, module)
        if isinstance(inner := vars(module).get("launch"), types.ModuleType):
            # `launch.worker_manager.wait_for_stop()`, as in programs of tests.
            vars(inner)["worker_manager"] = made["launchpad.launch.worker_manager"]
    below: dict[str, Any] = {
        name.removeprefix(f"{package}."): module
        for name, module in made.items()
        if name.count(".") == 1
    }
    return {**below, **PACKAGES[package]}


def _example_folders() -> list[str]:
    """Return the folders of a copy of Launchpad's examples: programs, like others."""
    folders = [os.path.join(path, *_EXAMPLES.split(".")) for path in sys.path]
    return [folder for folder in folders if os.path.isdir(folder)]

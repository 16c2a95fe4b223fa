"""Import what a script has imported, in a process that will be forked, if that is safe.

Imports are most of what a fresh interpreter needs before it can work: seconds for JAX
and what comes with it. A fork of a process that has done them starts in milliseconds.
That is safe as long as no backend has started and no thread runs: a fork copies
neither. Threads that end themselves before a fork (OpenBLAS's do) are no hindrance, so
one fork is tried before they are counted.
"""

import gc
import importlib
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path

# Tools around a program, of no use to its workers.
_LEFT_OUT = {"_pytest", "pytest", "pluggy", "xdist", "coverage", "pip", "setuptools"}
_LEFT_OUT |= {"IPython", "ipykernel", "debugpy", "pydevd", "_distutils_hack"}
# Of use to the launcher, large, and bound to the process that it was started in.
_LEFT_OUT |= {"ray"}
_OWN = "replicator"


def heavy_modules() -> list[str]:
    """List the modules that this process has imported from installed packages.

    Modules of the script's own are not among them: they may start JAX when they are
    imported, and each worker imports those that it needs.
    """
    # In the order of `sys.modules`, which is that of their first import.
    homes = _package_folders()
    return [
        name
        for name, module in list(sys.modules.items())
        if _is_wanted(name) and _lies_in(module, homes)
    ]


def preload(names: Iterable[str]) -> str | None:
    """Import modules; return why this process must not be forked, or None.

    Args:
      names: In the order of their first import. One that cannot be imported is left
        out: a worker that needs it will raise the error.
    """
    gc.disable()  # all of it stays; it has been off since the process began
    culprit = None
    for name in names:
        if name in sys.modules:
            continue
        # To name the module that starts a thread: one is at fault, none can be forked.
        threads = _count_threads()
        _import(name)
        if culprit is None and _count_threads() > threads and _threads_stay():
            culprit = name
    reason = _why_not_forkable(culprit)
    # What is there now is never looked at again, so its pages stay shared.
    gc.freeze()
    gc.enable()
    return reason


def _is_wanted(name: str) -> bool:
    top = name.partition(".")[0]
    return (
        not name.startswith("__")
        and top not in sys.stdlib_module_names
        and top not in _LEFT_OUT
    )


def _package_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    # Our own, wherever it lies: none of it starts anything when imported.
    folders.add(str(Path(sys.modules[_OWN].__file__ or "").parent))
    return tuple(folder.rstrip(os.sep) + os.sep for folder in folders)


def _lies_in(module: object, folders: tuple[str, ...]) -> bool:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and origin.startswith(folders)


def _import(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):
            # It may need what the script has set up before it was imported there.
            return


def _why_not_forkable(culprit: str | None) -> str | None:
    if _backend_runs():
        return "importing its packages starts JAX's backend"
    threads = _count_threads()
    if threads <= 1 or not _threads_stay():
        return None
    return f"importing {f'`{culprit}`' if culprit else 'its packages'} starts a thread"


def _backend_runs() -> bool:
    # A private name of JAX: public ones would start the backend.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


def _threads_stay() -> bool:
    """Fork once, as libraries that end their threads for a fork do so then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own, about the threads
        pid = os.fork()
    if pid == 0:  # nothing of this process may run twice
        os._exit(0)
    os.waitpid(pid, 0)
    return _count_threads() > 1


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))

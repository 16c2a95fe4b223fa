"""Run a script, or a module, as `python script.py` and `python -m module` do.

Its namespace stays `__main__` for as long as the process lives: its nodes run on after
its last line, and workers get its functions by value.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.compat.installing import install
from replicator.launchpad_bridge.running.exit_status import wait_for_runs


def run_script(path: str | Path, args: Sequence[str] = ()) -> None:
    """Run a script with `launchpad` and `courier` installed.

    Args:
      path: Path of the script.
      args: Its arguments, `sys.argv` after its own name.

    Raises:
      ArgumentError: It cannot be read.
      LaunchError: The packages cannot be installed.
    """
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(
            f"`path` must be a script that can be read, got {os.fspath(path)!r} "
            f"({error.strerror}). Use one, or `-m` and the name of a module."
        ) from error
    install()
    folder = str(Path(path).resolve().parent)
    _run(compile(source, path, "exec"), str(path), args, folder)


def run_module(name: str, args: Sequence[str] = ()) -> None:
    """Run a module with `launchpad` and `courier` installed.

    Args:
      name: Name of a module, or of a package with a `__main__`.
      args: Its arguments, `sys.argv` after its own path.

    Raises:
      ArgumentError: There is no such module.
      LaunchError: The packages cannot be installed.
    """
    install()
    sys.path.insert(1, str(Path.cwd()))
    spec = _spec(name)
    code = None if spec is None else getattr(spec.loader, "get_code", _none)(spec.name)
    if spec is None or code is None:
        raise ArgumentError(
            f"`name` must be a module that can be run, got {name!r}. Check its "
            "spelling, and the current folder."
        )
    _run(code, spec.origin or name, args, str(Path.cwd()), spec)


def _run(
    code: CodeType,
    path: str,
    args: Sequence[str],
    folder: str,
    spec: ModuleSpec | None = None,
) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__spec__ = spec
    if spec is not None:
        main.__package__ = spec.parent
        main.__loader__ = spec.loader
    sys.modules["__main__"] = main
    sys.argv[:] = [path, *args]
    if folder not in sys.path[:2]:
        sys.path.insert(1, folder)  # before all, as in Python, but for our packages
    try:
        exec(code, vars(main))
    except SystemExit:  # as `app.run` ends
        wait_for_runs()
        raise
    wait_for_runs()


def _spec(name: str) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            return importlib.util.find_spec(f"{name}.__main__")
        return spec
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _none(name: str) -> None:
    return None

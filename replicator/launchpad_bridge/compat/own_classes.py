"""Register the data classes of a program: Launchpad sends all that pickles.

Here only classes that both ends have registered may be sent: their names are looked up
in a table, nothing is imported or unpickled. So the named tuples, dataclasses and enums
of the script, of its modules, and of packages that import Launchpad themselves, as Acme
does, are registered when the program is launched, and in each worker before its node
runs (`recipes`).
"""

import contextlib
import dataclasses
import enum
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path

from replicator.errors import ArgumentError
from replicator.rpc.codec.registry import DEFAULT_REGISTRY

_OURS = str(Path(__file__).parents[2])
_NAME = "launchpad"


def register_own_classes() -> None:
    """Register the data classes that the program defines, if they are not yet."""
    for module in _own_modules():
        for value in list(vars(module).values()):
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and _is_data(value) and not DEFAULT_REGISTRY.entry_of(value):
                # One that is not made of its fields alone: sending it raises.
                with contextlib.suppress(ArgumentError):
                    DEFAULT_REGISTRY.register(
                        value, f"{value.__module__}.{value.__qualname__}"
                    )


def _own_modules() -> Iterator[types.ModuleType]:
    folders = _package_folders()
    found = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
    launchpad = sys.modules.get(_NAME)
    users = {
        _top(module)
        for module in found
        if any(value is launchpad for value in list(vars(module).values()))
    }
    for module in found:
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or path.startswith(_OURS):
            continue
        if not path.startswith(folders) or _top(module) in users:
            yield module


def _top(module: types.ModuleType) -> str:
    return module.__name__.partition(".")[0]


def _package_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    return tuple(folders)


def _is_data(cls: type) -> bool:
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum)

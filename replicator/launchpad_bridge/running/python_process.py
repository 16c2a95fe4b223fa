"""Launchpad's configurations of a group, translated to `Resources` and flags."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from replicator.errors import ProgramError
from replicator.launchpad_bridge.protocols import Resources


@dataclasses.dataclass
class PythonProcess:
    """Launchpad's configuration of a local process.

    Attributes:
      args: absl flags that the process sets, by name.
      env: Environment variables that it gets.
    """

    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class DockerConfig:
    """Launchpad's configuration of a container; no launcher here uses it.

    Attributes:
      code_directory: Folder of the program's code.
      docker_requirements: File that lists its packages.
      hw_requirements: Requirements of the machine.
      python_path: Folders of its packages.
    """

    code_directory: str | None = None
    docker_requirements: str | None = None
    hw_requirements: Any = None
    python_path: list[str] | None = None


def resources_of(label: str, wanted: Any) -> tuple[Resources, Mapping[str, Any]]:
    """Return the resources, and the flags, that a launch was given for a group.

    Args:
      label: Label of the group.
      wanted: `Resources` or `PythonProcess`; None for neither.

    Raises:
      ProgramError: It is something else.

    >>> resources_of("actors", PythonProcess(args={"seed": 3}))
    (Resources(cpus=None, gpus=None, memory_bytes=None), {'seed': 3})
    """
    match wanted:
        case None:
            return Resources(), {}
        case Resources():
            return wanted, {}
        case PythonProcess():
            env = {name: str(value) for name, value in wanted.env.items()}
            return Resources(env=env), dict(wanted.args)
    raise ProgramError(
        f"Launch config for {label} must be a PythonProcess or Resources, got "
        f"{wanted!r}. Use `lp.Resources(cpus=1, env={{...}})`."
    )


def set_flags(args: Mapping[str, Any]) -> None:
    """Set absl flags of this process, as if they were on its command line.

    A worker does not run the script: a flag that only the script defines is defined
    here, of the type of its value.

    Raises:
      ProgramError: absl is not installed.
    """
    if not args:
        return
    try:
        from absl import flags
    except ImportError as error:
        raise ProgramError(
            "`PythonProcess.args` sets absl flags, and there is no absl. Install "
            "`absl-py`, or use `env`."
        ) from error
    for name, value in args.items():
        if name not in flags.FLAGS:
            _define(flags, name, value)
    given = [
        _argument(name, value) for name, value in args.items() if value is not None
    ]
    flags.FLAGS([sys.argv[0], *given], known_only=True)


def _define(flags: Any, name: str, value: Any) -> None:
    text = "Given by `PythonProcess.args`."
    match value:
        case bool():
            flags.DEFINE_boolean(name, value, text)
        case int():
            flags.DEFINE_integer(name, value, text)
        case float():
            flags.DEFINE_float(name, value, text)
        case list():
            flags.DEFINE_list(name, value, text)
        case None:
            flags.DEFINE_string(name, None, text)
        case _:
            flags.DEFINE_string(name, str(value), text)


def _argument(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{'' if value else 'no'}{name}"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return f"--{name}={value}"

"""Launchpad's absl flags, and its `launch`, the only code here that reads them.

Workers get the flags that were given to the script: `flags.FLAGS` pickles as a name,
and given values are set in each worker before its node starts.
"""

import copyreg
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from replicator.launchpad_bridge.compat.controller import Controller
from replicator.launchpad_bridge.compat.courier_node import mark_late_arguments
from replicator.launchpad_bridge.compat.own_classes import register_own_classes
from replicator.launchpad_bridge.launch import launch as launch_program
from replicator.launchpad_bridge.launch_types import LaunchType
from replicator.launchpad_bridge.program import Program
from replicator.launchpad_bridge.protocols import Launcher
from replicator.launchpad_bridge.running.python_process import PythonProcess, set_flags

FLAGS = flags.FLAGS
_OUR_NAMES = ("threads", "processes", "test")
_PLAIN = (bool, int, float, str)

LAUNCH_TYPE = flags.DEFINE_enum(
    "lp_launch_type",
    LaunchType.LOCAL_MULTI_THREADING.value,
    [*(kind.value for kind in LaunchType), *_OUR_NAMES],
    "Launch type of `lp.launch` for a program that does not give one.",
    allow_override=True,
)
flags.DEFINE_integer(
    "lp_termination_notice_secs",
    10,
    "Seconds that nodes may take to stop before they are killed; a negative number "
    "for no limit.",
    allow_override=True,
)
for _name in ("tmux_open_window", "tmux_session_name"):
    flags.DEFINE_string(
        _name, None, "Not used: output is shown here, and kept.", allow_override=True
    )


def launch(
    programs: Program | Sequence[Program],
    launch_type: LaunchType | str | Launcher | None = None,
    xm_resources: Any = None,
    local_resources: Mapping[str, Any] | None = None,
    test_case: Any = None,
    terminal: str | None = None,
    *,
    serialize_py_nodes: bool | None = None,
    controller_xm_requirements: Any = None,
    log_dir: str | Path | None = None,
) -> Controller:
    """Launch a program as Launchpad does, with flags as defaults.

    Args:
      programs: The program. Of several only the first is launched.
      launch_type: Launch type; `--lp_launch_type` by default.
      xm_resources: Option of Google's cluster manager; not used.
      local_resources: Needs of groups, by label.
      test_case: A `unittest.TestCase`; its cleanup stops the run.
      terminal: Terminal in which processes show the output of nodes.
      serialize_py_nodes: Whether to check, in one process, that nodes pickle.
      controller_xm_requirements: Option of Google's cluster manager; not used.
      log_dir: Folder for the output of nodes; a temporary folder by default.

    Returns:
      The run: `wait()`, `stop()`.

    Raises:
      ProgramError: The program cannot run; nothing was started.
      ArgumentError: There is no such launch type here.
      LaunchError: The launcher cannot be opened, or a node does not pickle.
    """
    if not FLAGS.is_parsed():
        FLAGS(sys.argv, known_only=True)
    notice_s: int = FLAGS.lp_termination_notice_secs
    first = programs[0] if isinstance(programs, Sequence) and programs else programs
    if isinstance(first, Program):
        mark_late_arguments(first)
    register_own_classes()
    run = launch_program(
        programs,
        LAUNCH_TYPE.value if launch_type is None else launch_type,
        local_resources=_with_flags(first, local_resources or {}),
        test_case=test_case,
        terminal=terminal,
        serialize_py_nodes=serialize_py_nodes,
        log_dir=log_dir,
        stop_grace_s=notice_s if notice_s >= 0 else math.inf,
    )
    return Controller(run)


def _with_flags(program: Any, local_resources: Mapping[str, Any]) -> dict[str, Any]:
    """Give each worker the flags of this process, unless its group has others."""
    given = _given()
    found = dict(local_resources)
    for label in getattr(program, "groups", ()):
        match found.get(label):
            case None if program.settings(label).resources is None:
                found[label] = PythonProcess(args=given)
            case PythonProcess() as own:
                found[label] = PythonProcess(args={**given, **own.args}, env=own.env)
    return found


def _given() -> dict[str, Any]:
    """Return the flags of the command line; at least one, so that they are parsed."""
    present = _values(FLAGS[name] for name in FLAGS if FLAGS[name].present)
    return {"lp_launch_type": LAUNCH_TYPE.value, **present}


def _of_script() -> dict[str, Any]:
    """Return the flags that the script itself defines: a worker does not run it."""
    return _values(FLAGS.get_flags_for_module(sys.argv[0]))


def _values(found: Iterable[flags.Flag[Any]]) -> dict[str, Any]:
    """Return the values of flags that can be written on a command line."""
    return {flag.name: flag.value for flag in found if _is_plain(flag)}


def _is_plain(flag: flags.Flag[Any]) -> bool:
    if isinstance(flag.value, list):
        is_list = not isinstance(flag, flags.MultiFlag)
        return is_list and all(isinstance(part, str) for part in flag.value)
    return flag.value is None or isinstance(flag.value, _PLAIN)


def _restored(values: Mapping[str, Any]) -> flags.FlagValues:
    set_flags(values)
    return FLAGS


def _restored_holder(name: str, values: Mapping[str, Any]) -> flags.FlagHolder[Any]:
    return flags.FlagHolder(_restored(values), FLAGS[name])


def _reduce(values: flags.FlagValues) -> tuple[Any, ...]:
    return _restored, (_of_script(),)


def _reduce_holder(holder: flags.FlagHolder[Any]) -> tuple[Any, ...]:
    return _restored_holder, (holder.name, _of_script())


copyreg.pickle(flags.FlagValues, _reduce)  # type: ignore[arg-type]
copyreg.pickle(flags.FlagHolder, _reduce_holder)  # type: ignore[arg-type]

"""`launch`: start a program under a launcher."""

import logging
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from replicator.base.host.paths import checked_path
from replicator.base.host.standard_streams import lossy
from replicator.base.types import PyTree
from replicator.distributed.processes.states import Timeouts
from replicator.errors import ArgumentError, ProgramError
from replicator.launchpad_bridge.addresses.promises import Address
from replicator.launchpad_bridge.launch_types import (
    LaunchType,
    is_test,
    launch_type_of,
    launcher_name,
)
from replicator.launchpad_bridge.launchers.processes import Processes
from replicator.launchpad_bridge.launchers.test_mode import TestMode
from replicator.launchpad_bridge.launchers.threads import Threads
from replicator.launchpad_bridge.nodes.processes_colocation import (
    MultiProcessingColocation,
)
from replicator.launchpad_bridge.planning import all_addresses, make_plan
from replicator.launchpad_bridge.program import Program
from replicator.launchpad_bridge.protocols import Launcher
from replicator.launchpad_bridge.run import Run
from replicator.launchpad_bridge.run_folder import RunFolder
from replicator.launchpad_bridge.running import node_context

if TYPE_CHECKING:
    from replicator.launchpad_bridge.view.dashboard.serving import Dashboard

_LOG = logging.getLogger(__name__)


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
    resources: Mapping[str, Any] | None = None,
    log_dir: str | Path | None = None,
    stop_grace_s: float = 10.0,
    dashboard: bool = False,
) -> Run:
    """Check a program and start it; return the run, which may be waited for.

    A script that does not wait goes on, at its end, until the program has ended, and
    exits non-zero if a node failed.

    Args:
      programs: The program. Of several only the first is launched, as in Launchpad.
      launch_type: "threads" (the default), "processes", "test", "ray"; Launchpad's
        names for these; or a launcher.
      xm_resources: Option of Google's cluster manager; not used.
      local_resources: Needs of groups, by label: `PythonProcess` or `Resources`.
        Labels of other programs are ignored.
      test_case: A `unittest.TestCase`; its cleanup stops the run and raises a failure.
      terminal: Terminal in which "processes" shows the output of nodes.
      serialize_py_nodes: Whether to check, in one process, that the nodes could run in
        others; tests do by default.
      controller_xm_requirements: Option of Google's cluster manager; not used.
      resources: Needs of groups, by label, in place of those in the program.
      log_dir: Folder for the output of nodes. By default a temporary one, which is
        removed if the run ends well; it stays if a node failed, which the failure
        names, or if the output was shown nowhere else.
      stop_grace_s: Seconds that nodes may take to stop before they are killed.
      dashboard: Whether to serve a page on this host that shows the program, with its
        traffic, while it runs; its link is printed.

    Returns:
      The run.

    Raises:
      ProgramError: The program cannot run; nothing was started.
      ArgumentError: An argument breaks its rule.
      LaunchError: The launcher cannot be opened, or a node does not pickle.

    >>> program = lp.Program("sum")
    >>> _ = program.add_node(lp.PyNode(sum, [1, 2]), label="adder")
    >>> with lp.launch(program, launch_type="threads") as run:
    ...     run.wait()
    >>> run.results["adder"]
    3
    """
    program = _the_program(programs)
    launcher, kind = _launcher(launch_type, terminal, serialize_py_nodes)
    if stop_grace_s < 0:
        raise ArgumentError(
            f"`stop_grace_s` must be 0 or more seconds, got {stop_grace_s}. Use 10."
        )
    _check_idle(program)
    known = {k: v for k, v in (local_resources or {}).items() if k in program.groups}
    run = _started(
        program,
        launcher,
        resources={**known, **(resources or {})},
        launch_type=kind or launcher.name,
        log_dir=log_dir,
        timeouts=Timeouts(stop_grace_s=stop_grace_s, kills=2),
        test_frame=_test_frame() if kind is not None and is_test(kind) else None,
        has_dashboard=dashboard,
    )
    if test_case is not None:
        test_case.addCleanup(run.cleanup_after_test, test_case)
    return run


def _run_alone(colocation: MultiProcessingColocation) -> list[PyTree]:
    """Run a colocation outside of a program; it stops with the node that runs it."""
    program = Program("colocation")
    # Not `add_node`, which would bind it to this program: it may run again.
    program.groups["node"] = [colocation]
    stop_event = (node_context.of_thread() or node_context.loose_context()).stop_event
    with launch(program, LaunchType.LOCAL_MULTI_PROCESSING) as run:
        cancel = stop_event.when_set(run.stop)
        try:
            run.wait()
        finally:
            cancel()
    return run.results_of("node")


MultiProcessingColocation.run_alone = _run_alone


def _started(
    program: Program,
    launcher: Launcher,
    *,
    resources: Mapping[str, Any],
    launch_type: LaunchType | str,
    log_dir: str | Path | None,
    timeouts: Timeouts,
    test_frame: FrameType | None,
    has_dashboard: bool,
) -> Run:
    """Plan a run in a folder of its own and start it; remove all if that fails."""
    folder = RunFolder()
    try:
        plan = make_plan(
            program,
            run_id=uuid.uuid4().hex[:12],
            folder=folder.path,
            logs=_logs(folder, log_dir),
            launch_type=launch_type,
            resources=resources,
        )
        # Before the run, which closes it: that may be over at once.
        page = _dashboard(folder) if has_dashboard else None
    except BaseException:
        folder.close()
        raise
    addresses = all_addresses(program)
    # Otherwise the logs are the only copy of the nodes' output.
    is_shown = getattr(launcher, "shows_output", False)

    def close(is_well: bool) -> None:
        _close(addresses, page)
        folder.close(keeps_logs=not (is_well and is_shown))

    run = Run(
        plan,
        launcher,
        timeouts=timeouts,
        close=close,
        test_frame=test_frame,
    )
    program.set_run(lambda: run.is_over)
    run.start()
    for address in addresses:
        address.builder.look_up_in(run.made_by_launcher)
    return run


def _the_program(programs: Program | Sequence[Program]) -> Program:
    if not isinstance(programs, Sequence):
        programs = [programs]
    if not programs or not all(isinstance(p, Program) for p in programs):
        raise ArgumentError(
            f"`programs` must be an `lp.Program`, got {programs!r}. Make one and add "
            "nodes to it."
        )
    if len(programs) > 1:
        print(
            f"Multiple programs are provided. Launching only the first program, "
            f"{programs[0].name!r}...",
            file=lossy(sys.stdout),
        )
    return programs[0]


def _launcher(
    launch_type: LaunchType | str | Launcher | None,
    terminal: str | None,
    serialize_py_nodes: bool | None,
) -> tuple[Launcher, LaunchType | None]:
    """Return a launcher, and Launchpad's launch type for it."""
    if launch_type is None:
        launch_type = LaunchType.LOCAL_MULTI_THREADING
    if not isinstance(launch_type, str | LaunchType):
        return launch_type, _kind_of(launch_type)
    kind = launch_type_of(launch_type)
    match launcher_name(kind):
        case "threads":
            return Threads(serialize=bool(serialize_py_nodes)), kind
        case "test":
            return TestMode(serialize=serialize_py_nodes is not False), kind
        case "processes":
            return Processes(terminal=terminal), kind
        case _:
            return _ray(), kind


def _kind_of(launcher: Launcher) -> LaunchType | None:
    if isinstance(launcher, TestMode):
        return LaunchType.TEST_MULTI_THREADING
    try:
        return LaunchType(launcher.name)
    except ValueError:
        return None


def _check_idle(program: Program) -> None:
    if program.is_running:
        raise ProgramError(
            f"`program` must not be running, got {program.name!r}, which is. Wait for "
            "its run, or make the program again."
        )


def _logs(folder: RunFolder, log_dir: str | Path | None) -> Path:
    """Return the folder of logs; a user's folder is made when it is first written."""
    return checked_path("log_dir", log_dir) or folder.logs_path


def _test_frame() -> FrameType | None:
    """Return the frame of the test that called `launch`, if in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(__package__ or __name__)


def _ray() -> Launcher:
    from replicator.launchpad_bridge.launchers.on_ray.ray_cluster import Ray

    return Ray()


def _dashboard(folder: RunFolder) -> "Dashboard":
    # Imported here: each node of a program would import it otherwise.
    from replicator.launchpad_bridge.view.dashboard.serving import Dashboard

    page = Dashboard(folder.path)
    try:
        page.start()
    except BaseException:
        page.close()
        raise
    return page


def _close(addresses: Sequence[Address], page: "Dashboard | None") -> None:
    if page is not None:
        page.close()
    for address in addresses:
        address.builder.retire()

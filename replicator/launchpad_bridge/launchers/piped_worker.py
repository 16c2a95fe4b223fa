"""A worker behind any command that passes on input and output: `srun`, a container.

The recipe lies in the run's folder: the command must run where that can be read.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from replicator.errors import LaunchError
from replicator.launchpad_bridge import recipes
from replicator.launchpad_bridge.launchers import worker_end
from replicator.launchpad_bridge.launchers.guarded_worker import GuardedWorker
from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.worker_logs import log_paths
from replicator.launchpad_bridge.launchers.worker_process import Job, piped_interpreter
from replicator.launchpad_bridge.protocols import Executable, Exited, Plan, StopAsked
from replicator.launchpad_bridge.run_folder import what_stays
from replicator.rpc.security.private_files import create_private


@final
class PipedWorker(GuardedWorker):
    """One start of an executable, as the last words of a command; a `Worker`."""

    def __init__(
        self,
        command: Sequence[str],
        executable: Executable,
        attempt: int,
        *,
        plan: Plan,
        launch_type: str,
        report: Callable[[Exited | StopAsked], None],
    ) -> None:
        """Start it.

        Args:
          command: Runs the words that are put behind it, at the worker's place; such as
            `["srun", "--ntasks=1"]`. It gets the group's environment variables.
          executable: What the worker runs.
          attempt: Which start this is.
          plan: Of the run.
          launch_type: The launcher's name.
          report: Of the launcher; is told of the worker's end, once.

        Raises:
          LaunchError: The node does not pickle, or the command cannot be run.
        """
        name = executable.name
        environment = {**os.environ, **executable.resources.env}
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise LaunchError(
                f"`{name}` must be started by a command that can be run, got "
                f"{command[0]!r}. Install it."
            )
        names = [each.name for each in plan.executables]
        plan.logs.mkdir(parents=True, exist_ok=True)
        log = log_paths(plan.logs, names)[name]
        job = Job(
            program=plan.program,
            worker=name,
            launch_type=launch_type,
            recipe=str(_recipe(plan, executable, names.index(name), attempt)),
            attempt=attempt,
        )
        own = sorted(executable.resources.env)
        super().__init__(
            [*command, *piped_interpreter(job, read_surroundings(), own)],
            name=name,
            attempt=attempt,
            log=log,
            owner=plan.run_id,
            environ=environment,
            folder=plan.folder,
            keep=what_stays(plan.folder, plan.logs),
            on_stop_asked=lambda of: report(StopAsked(by=name, of=of)),
            on_end=lambda said, heard, lines: report(
                worker_end.exited(
                    name, attempt, said=said, heard=heard, lines=lines, log=str(log)
                )
            ),
        )


def _recipe(plan: Plan, executable: Executable, number: int, attempt: int) -> Path:
    data = recipes.pack(executable)
    recipe = plan.folder / f"recipe-{number}-{attempt}"
    with os.fdopen(create_private(recipe), "wb") as file:
        file.write(data)
    return recipe

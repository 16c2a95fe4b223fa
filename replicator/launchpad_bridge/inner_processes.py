"""Run the nodes of a `MultiProcessingColocation`: a small run below a worker.

The same driver, supervisor and launcher as for a whole program, without a `Run`: what
an inner worker raises is raised in the outer one, and who asks for a stop asks for one
of the whole program.
"""

import queue
from collections.abc import Callable
from typing import Any, final

from replicator.base.types import PyTree
from replicator.distributed.processes.states import Patience, Restart, StopAsked
from replicator.errors import NodeFailedError
from replicator.launchpad_bridge.driver import Driver
from replicator.launchpad_bridge.launchers.processes import Processes
from replicator.launchpad_bridge.nodes.processes_colocation import (
    MultiProcessingColocation,
)
from replicator.launchpad_bridge.protocols import (
    Executable,
    Exited,
    Plan,
    Workers,
)
from replicator.launchpad_bridge.run_folder import RunFolder
from replicator.launchpad_bridge.running.node_context import RunningContext
from replicator.launchpad_bridge.running.node_run import NodeRun
from replicator.launchpad_bridge.running.results import Unsendable

_STOP_GRACE_S = 5.0
_LOOK_S = 0.2


def run_in_processes(
    node: MultiProcessingColocation, context: RunningContext
) -> list[PyTree] | Unsendable:
    """Run the inner nodes of a worker in processes; return their results.

    Raises:
      NodeFailedError: One failed once too often.
      LaunchError: A process cannot be started.
    """
    folder = RunFolder()
    try:
        return _run(node, context, folder)
    finally:
        folder.close()


def _run(
    node: MultiProcessingColocation, context: RunningContext, folder: RunFolder
) -> list[PyTree] | Unsendable:
    plan = Plan(
        program=context.program,
        run_id=f"{context.run_id}.{context.worker}",
        folder=folder.path,
        logs=folder.path / "logs",
        executables=[
            _executable(node, index, context) for index in range(len(node.nodes))
        ],
    )
    over: queue.SimpleQueue[None] = queue.SimpleQueue()
    driver = Driver(
        plan,
        _Forwarding(context),
        patience=Patience(stop_grace_s=_STOP_GRACE_S),
        tell=lambda: over.put(None),
    )
    error = driver.open()
    if error is not None:
        raise error
    cancel = context.stop_event.when_set(lambda: driver.report(StopAsked(by="it")))
    try:
        _wait(driver, over)
    except BaseException:
        # This worker is killed: those below it must be gone before it is.
        # Two signals: the first asks for a stop, the second kills at once.
        for _ in range(2):
            driver.report(StopAsked(by="signal"))
        raise
    finally:
        cancel()
        driver.join()
    return _results(node, plan, driver)


def _wait(driver: Driver, changed: "queue.SimpleQueue[None]") -> None:
    while driver.finish is None:
        # Not for ever: what kills this worker is noticed between two looks.
        try:
            changed.get(timeout=_LOOK_S)
        except queue.Empty:
            continue


def _results(
    node: MultiProcessingColocation, plan: Plan, driver: Driver
) -> list[PyTree] | Unsendable:
    failed = driver.finish.failure if driver.finish is not None else None
    if failed is not None:
        retries = node.num_retries_on_failure
        error: BaseException | None = failed.exited.error
        text = str(error) if isinstance(error, NodeFailedError) else failed.text
        raise NodeFailedError(
            f"{text}\nnum_retries_on_failure (={retries}) is reached.", node=failed.name
        ) from (error.__cause__ if isinstance(error, NodeFailedError) else error)
    results = [driver.results.get(executable.name) for executable in plan.executables]
    # What one of them could not send to here, this worker cannot send on.
    return next((r for r in results if isinstance(r, Unsendable)), results)


def _executable(
    node: MultiProcessingColocation, index: int, context: RunningContext
) -> Executable:
    inner: Any = node.nodes[index]
    name = f"{context.worker}.{index}"
    run = NodeRun(
        node=inner,
        function=inner.function,
        name=name,
        run_id=context.run_id,
        resources=context.launch_config,
        targets=context.targets,
        launch_type=context.launch_type,
    )
    return Executable(
        label=context.worker,
        index=index,
        name=name,
        run=run,
        restart=Restart(
            attempts=node.num_retries_on_failure, progress_s=float("inf"), backoff_s=0.1
        ),
    )


@final
class _Forwarding:
    """Processes; an inner worker that asks for a stop asks the whole program."""

    name = "processes"

    def __init__(self, context: RunningContext) -> None:
        self._context = context

    def open(self, plan: Plan, report: Callable[[Exited | StopAsked], None]) -> Workers:
        def forward(event: Exited | StopAsked) -> None:
            if isinstance(event, StopAsked):
                self._context.stop_program()
            else:
                report(event)

        return Processes().open(plan, forward)

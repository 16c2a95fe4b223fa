"""What is printed of a run, by a debugger or a log, holds no secret."""

from pathlib import Path

from replicator.launchpad_bridge.launchers.launcher_environment import read_surroundings
from replicator.launchpad_bridge.launchers.on_ray.remote_worker import Task
from replicator.launchpad_bridge.launchers.worker_process import Job
from replicator.launchpad_bridge.protocols import Resources
from replicator.launchpad_bridge.view.watching.found_runs import FoundRun


def test_no_repr_holds_a_secret():
    task = Task(
        job=Job(program="p", worker="a", launch_type="ray", recipe=""),
        run_id="r",
        folder="/f",
        files={"secret": b"hidden"},
        logs="/l",
        recipe=b"hidden",
        environment={"API_KEY": "hidden"},
        gpus=None,
        surroundings=read_surroundings(),
        has_book=False,
    )
    run = FoundRun(
        folder=Path("/f"),
        program="p",
        run_id="r",
        pid=1,
        workers=1,
        started_s=0.0,
        link="http://localhost/hidden/",
    )
    for each in (task, run, Resources(env={"API_KEY": "hidden"})):
        assert "hidden" not in repr(each)

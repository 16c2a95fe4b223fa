"""The launchers on which programs lose nodes and messages."""

import pytest

import replicator.launchpad_bridge as lp


@pytest.fixture(scope="module", params=["processes", "ray"])
def launcher(request):
    """Return a launcher; all of a module's tests share one Ray, which takes seconds."""
    if request.param == "processes":
        yield lp.Processes(preload=(), terminal="output_to_files")
        return
    pytest.importorskip("ray")
    from replicator.launchpad_bridge.launchers.on_ray import ray_session
    from replicator.launchpad_bridge.launchers.on_ray.ray_cluster import Ray

    session = ray_session.connect(None, {"num_cpus": 4}, insecure=False)
    yield Ray()
    session.close()


@pytest.fixture
def running(launcher, tmp_path):
    """Return what launches a program, for the length of a block."""

    def running(program, *, stop_grace_s=2.0):
        logs = tmp_path / "logs"
        return lp.launch(program, launcher, log_dir=logs, stop_grace_s=stop_grace_s)

    return running

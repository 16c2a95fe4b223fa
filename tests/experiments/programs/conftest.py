"""Where the example programs are tried: threads at once, all else as slow tests."""

import tempfile

import pytest

import replicator.launchpad_bridge as lp
from experiments.digits import digits_arrays


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Return images and labels, by split."""
    data_dir = tmp_path_factory.mktemp("datasets")
    return {s: digits_arrays(s, data_dir=data_dir) for s in ("train", "test")}


@pytest.fixture(scope="session")
def one_ray():
    """Be connected to a Ray, which the launcher then takes: starts take seconds."""
    pytest.importorskip("ray")
    from replicator.launchpad_bridge.launchers.on_ray import ray_session

    session = ray_session.connect(None, {"num_cpus": 4}, insecure=False)
    yield
    session.close()


@pytest.fixture(
    params=[
        "threads",
        pytest.param("processes", marks=pytest.mark.slow),
        pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.nightly]),
    ]
)
def launcher(request, monkeypatch):
    """Be the launcher, or the name of one, on which a program is run."""
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    is_processes = request.param == "processes"
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        # Logs are kept beside the run's own folder, which is in the one for such.
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield (
            lp.Processes(terminal="output_to_files") if is_processes else request.param
        )

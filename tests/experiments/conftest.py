"""What all tests of experiments may use."""

import tempfile

import jax
import pytest

import replicator.launchpad_bridge as lp


@pytest.fixture
def standard_promotion():
    """Let dtypes mix, as parts of optax do; in all threads, as nodes may be threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


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
def launcher(request, monkeypatch, tmp_path_factory):
    """Be the launcher, or the name of one, on which a program is run."""
    tmp_path_factory.getbasetemp()  # is made at the first use: here, not in `folder`
    if request.param == "ray":
        request.getfixturevalue("one_ray")
    is_processes = request.param == "processes"
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        # Logs are kept beside the run's own folder, which is in the one for such.
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield (
            lp.Processes(terminal="output_to_files") if is_processes else request.param
        )

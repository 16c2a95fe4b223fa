"""Where the example programs are tried: threads at once, processes as slow tests."""

import pytest

import replicator.launchpad_bridge as lp
from experiments.digits import digits_arrays

LAUNCHERS = {
    "threads": lp.Threads,
    "processes": lambda: lp.Processes(terminal="output_to_files"),
}


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def launcher(request):
    return LAUNCHERS[request.param]()


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Return images and labels, by split."""
    data_dir = tmp_path_factory.mktemp("datasets")
    return {s: digits_arrays(s, data_dir=data_dir) for s in ("train", "test")}

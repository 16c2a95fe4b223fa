"""Where the example programs are tried: threads at once, processes as slow tests."""

import pytest

import replicator.launchpad_bridge as lp

LAUNCHERS = {
    "threads": lp.Threads,
    "processes": lambda: lp.Processes(terminal="output_to_files"),
}


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def launcher(request):
    return LAUNCHERS[request.param]()

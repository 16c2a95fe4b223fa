import numpy as np
import pytest

from experiments.programs.parameter_server import ParameterServer, learn


@pytest.fixture
def server():
    """Serve after three updates, where a gradient may have missed two."""
    server = ParameterServer(features=2, rate=1.0, max_staleness=2)
    for version in range(3):
        assert server.push(np.array([-1.0, 0.0]), version)
    return server


def test_a_gradient_of_the_bound_counts_the_less_for_its_age(server):
    assert server.push(np.array([0.0, -3.0]), version=1)
    np.testing.assert_allclose(server.report()["weights"], [3, 1])
    assert server.pull()["version"] == 4


def test_a_gradient_past_the_bound_changes_nothing(server):
    assert not server.push(np.array([0.0, -3.0]), version=0)
    np.testing.assert_allclose(server.report()["weights"], [3, 0])
    assert server.pull()["version"] == 3
    assert server.report()["refused"] == 1


def test_what_was_pulled_does_not_change_by_later_updates(server):
    pulled = server.pull()
    server.push(np.ones(2), version=3)
    np.testing.assert_array_equal(pulled["weights"], [3, 0])


def test_workers_that_do_not_wait_learn_within_the_bound(launcher):
    found = learn(launcher, workers=3, updates=200, features=4, max_staleness=5)
    assert sum(found["staleness"].values()) == 600
    assert max(found["staleness"]) <= 5
    assert found["distance"] < 1e-6


def test_the_server_is_spared_what_the_cacher_knows():
    found = learn(
        workers=2, updates=50, features=4, max_staleness=100, refresh_ms=60_000
    )
    assert found["refused"] == 0
    assert (found["pulled"], found["pulls"]) == (100, 1)


def test_with_no_age_allowed_every_gradient_is_of_the_newest_parameters():
    # Those that the cacher knows are old after the first update.
    found = learn(workers=2, updates=50, features=4, max_staleness=0, refresh_ms=60_000)
    assert found["staleness"] == {0: 100}
    assert found["refused"] > 0
    assert found["distance"] < 1e-2

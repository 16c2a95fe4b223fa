import numpy as np

from replicator.launchpad_bridge.trajectories.policy_lag import PolicyLag


def test_lags_are_counted_and_averaged_over_trajectories():
    lag = PolicyLag.at(10, np.array([10, 7, 7, 8], np.int64))
    assert lag == PolicyLag(counts={0: 1, 2: 1, 3: 2}, mean=2.0, largest=3)
    assert list(lag.counts) == [0, 2, 3]


def test_a_learner_that_went_back_sees_lags_below_zero():
    assert PolicyLag.at(2, np.array([4, 2])).counts == {-2: 1, 0: 1}

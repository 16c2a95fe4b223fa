"""What a guard deletes of a run whose launcher is gone."""

import os

from replicator.launchpad_bridge.launchers.forked import lifeline


def test_logs_stay_with_the_lock_by_which_the_next_launch_sweeps_them(tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "tls").mkdir()
    for name in ("launcher.lock", "secret", "logs/node.log", "tls/key"):
        (run / name).touch()
    lifeline.delete(run, keep=run / "logs")
    assert sorted(os.listdir(run)) == ["launcher.lock", "logs"]
    assert (run / "logs" / "node.log").exists()


def test_where_logs_lie_elsewhere_nothing_stays(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "launcher.lock").touch()
    lifeline.delete(run, keep=tmp_path / "logs")
    assert not run.exists()

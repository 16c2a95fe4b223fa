import json

import pytest

from tests.experiments.command import command

SMALL = ["--width=16", "--heads=2", "--context=16", "--steps=3", "--microbatches=2"]


@pytest.mark.slow
def test_four_stages_have_the_losses_of_one_device(tmp_path):
    done = command("pipeline_lm", f"--directory={tmp_path}", *SMALL)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss_difference"] < 1e-4
    assert found["live"] == [2, 2, 2, 1]
    assert "<svg" in (tmp_path / "schedule.svg").read_text()

import json

import pytest

from experiments import pipeline_lm
from replicator.errors import ArgumentError
from tests.experiments.command import command

SMALL = ["--width=16", "--heads=2", "--context=16", "--steps=3", "--microbatches=2"]


def test_layers_that_do_not_divide_over_stages_are_refused():
    config = pipeline_lm.Config(layers=3, stages=4)
    with pytest.raises(ArgumentError, match="`--layers` must divide evenly over 4"):
        pipeline_lm.main(config)


def test_one_stage_shares_no_table_with_itself():
    assert pipeline_lm._shared(pipeline_lm.Config(stages=1)) == {}


@pytest.mark.slow
def test_four_stages_have_the_losses_of_one_device(tmp_path):
    done = command("pipeline_lm", f"--directory={tmp_path}", *SMALL)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss_difference"] < 1e-4
    assert found["live"] == [2, 2, 2, 1]
    assert "<svg" in (tmp_path / "schedule.svg").read_text()

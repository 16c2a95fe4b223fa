"""A run that was written before modules moved loads, and goes on.

`stored/` holds what three updates of `run` left behind at commit a277037.
"""

import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import optax

from tests.steps import lenient, regression_batch, replicas, trainer

STORED = Path(__file__).parent / "stored" / "run_of_0_2_before_moves.tar.gz"


def trained(directory, steps):
    rep = replicas(2)
    init_fn, step_fn = trainer(rep.wrap_optimizer(lenient(optax.adam(1e-2))))
    return rep.run(
        step_fn,
        [regression_batch(seed=seed) for seed in range(4)],
        init_fn=init_fn,
        steps=steps,
        seed=0,
        directory=directory,
        checkpoint_dir=directory / "checkpoints",
        display=False,
    )


def test_it_goes_on_to_what_a_run_that_was_not_cut_comes_to(tmp_path):
    with tarfile.open(STORED) as stored:
        stored.extractall(tmp_path, filter="data")
    went_on = trained(tmp_path / "run", 6)
    assert went_on.step == 6
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        went_on.state,
        trained(tmp_path / "whole", 6).state,
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 6]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["arguments"]["steps"] == 6

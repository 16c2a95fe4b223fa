"""`replicator demo`: real digits, read well, in under a minute."""

import json
import time

import numpy as np
import pytest
from sklearn.datasets import load_digits

from replicator.cli import demo
from replicator.cli import main as cli
from tests.cli.test_main import run_cli


def test_every_fifth_digit_is_for_testing():
    train, test = demo.split_digits()
    assert (len(train["label"]), len(test["label"])) == (1437, 360)
    assert train["image"].shape[1:] == (8, 8, 1)
    assert (train["image"].min(), train["image"].max()) == (0.0, 1.0)


def test_the_digits_are_those_that_scikit_learn_carries():
    pixels, labels = load_digits(return_X_y=True)
    with np.load(demo._DIGITS) as stored:
        np.testing.assert_array_equal(stored["image"].reshape(-1, 64), pixels)
        np.testing.assert_array_equal(stored["label"], labels)


def test_an_epoch_has_every_digit_once():
    digits = {"label": np.arange(30)}
    batches = demo.shuffled_batches(digits, 10, seed=0)
    seen = np.concatenate([next(batches)["label"] for _ in range(3)])
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("option", ["--steps", "--global-batch"])
def test_a_count_below_1_is_bad_input(option, capsys):
    assert cli.main(["demo", option, "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_it_reads_unseen_digits_on_eight_fake_devices(tmp_path):
    started_s = time.monotonic()
    done = run_cli("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started_s < 240  # 12 s on two idle cores
    cells = [line.split() for line in done.stdout.splitlines()]
    [accuracy] = [line[2] for line in cells if line[:2] == ["test", "accuracy"]]
    assert float(accuracy.rstrip("%")) >= 97.0
    record = json.loads((tmp_path / "runs" / "demo" / "run.json").read_text())
    assert record["devices"]["count"] in (1, 8)  # one: a real accelerator
    assert (tmp_path / "runs" / "demo" / "metrics.jsonl").exists()

"""What `make demo` runs: real digits are read, and all that it names is there."""

import dataclasses
import re
from pathlib import Path

import jax
import pytest

from experiments import run_folder
from experiments.digits_resnet import Config, train
from tests.experiments.command import command
from tests.steps import replicas

PNG = b"\x89PNG\r\n"


def run_demo(tmp_path, *flags):
    # As the Makefile does; a width at which no path is cut.
    flags = [f"--directory={tmp_path}", *flags]
    return command("digits_resnet", *flags, devices=8, COLUMNS="250")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [
        ("data_parallel", 8),
        *(
            pytest.param(name, 1, marks=pytest.mark.nightly)
            for name in ("zero1", "zero2", "fsdp", "hybrid", "tensor_parallel")
        ),
    ],
)
def test_eight_devices_read_97_percent_of_unseen_digits(strategy, replicas, tmp_path):
    done = run_demo(tmp_path, f"--strategy={strategy}", "--profile_from=20")
    assert done.returncode == 0, done.stderr
    lines = [line.split("\u2502") for line in done.stdout.splitlines()]
    table = {cells[1].strip(): cells[2].strip() for cells in lines if len(cells) == 4}
    assert float(table["test accuracy"].partition("%")[0]) >= 97.0
    assert table["replicas"] == f"{replicas} (cpu)"
    assert table["strategy"] == f"{strategy}, 8 devices"
    assert Path(table["learning curve"]).read_bytes().startswith(PNG)
    assert Path(table["metrics"]).exists()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_one_that_ended_begins_anew(tmp_path):
    rep, config = replicas(2), Config(width=1, steps=4, directory=str(tmp_path))
    with jax.numpy_dtype_promotion("standard"):  # of optax's Adam
        first = train(rep, config)
        found = train(rep, dataclasses.replace(config, steps=6))
        ended = train(rep, dataclasses.replace(config, steps=5))
        run_folder.release(tmp_path)
        again = train(rep, config)
    assert [step for step, _ in found.curve] == [1, 2, 3, 4, 5, 6]
    assert found.curve[:4] == first.curve
    assert (ended.curve, ended.seconds) == (found.curve, 0.0)
    assert (ended.accuracy, ended.steps) == (found.accuracy, 6)
    assert again.curve == first.curve


@pytest.mark.slow
@pytest.mark.nightly
def test_the_demo_trains_each_time(tmp_path):
    for _ in range(2):
        done = run_demo(tmp_path, "--width=1", "--steps=3")
        assert done.returncode == 0, done.stderr
        assert re.search(r"throughput +. [1-9]", done.stdout), done.stdout
    assert not (tmp_path / "settings.json").exists()


@pytest.mark.slow
def test_statistics_of_a_replica_are_refused_where_there_is_one_replica(tmp_path):
    done = run_demo(tmp_path, "--strategy=fsdp", "--stats=replica")
    assert done.returncode != 0
    assert "`stats='replica'` must be left to strategies that replicate" in done.stderr

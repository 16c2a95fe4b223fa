import functools
import json

import pytest

from tests.experiments.command import command

run = functools.partial(command, "char_lm", devices=2)
SMALL = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--steps=4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        pytest.param("data_parallel", marks=pytest.mark.nightly),
        pytest.param("tensor_parallel", marks=pytest.mark.nightly),
    ],
)
def test_the_last_line_says_what_was_found(strategy, tmp_path):
    done = run(f"--strategy={strategy}", f"--directory={tmp_path}", *SMALL)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["bits_per_char"] < 8.5
    assert 1 < found["gzip_bits_per_char"] < 4
    assert (found["strategy"], found["devices"], found["steps"]) == (strategy, 2, 4)
    assert "--- step 4" in done.stdout
    assert json.loads((tmp_path / "run.json").read_text())


@pytest.mark.slow
def test_a_run_that_is_saved_goes_on_under_another_strategy(tmp_path):
    kept = [f"--checkpoint_dir={tmp_path / 'kept'}", f"--directory={tmp_path}", *SMALL]
    assert run("--strategy=zero1", *kept).returncode == 0
    done = run("--strategy=fsdp", *kept, "--steps=6")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 6
    assert "--- step 4" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategy=rules"], "value should be one of <data_parallel|zero1"),
        (["--sources=nowhere"], "`sources` must be a directory with Python files"),
        (["--minutes=0"], "`--minutes` must be above 0"),
        (["--width=20"], "`width` must be a multiple of 8 for 4 heads"),
        (["--context=1"], "`length` must be at least 2"),
    ],
    ids=str,
)
def test_bad_input_says_what_is_wrong(flags, message):
    done = run(*flags)

    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.slow
def test_one_device_has_nothing_to_cut():
    done = run("--strategy=fsdp", devices=1)

    assert done.returncode != 0
    assert "`strategy` must be data_parallel on one device" in done.stderr

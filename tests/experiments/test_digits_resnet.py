"""What `make demo` runs: real digits are read, and all that it names is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n"


@pytest.mark.slow
def test_eight_replicas_read_97_percent_of_unseen_digits(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.digits_resnet",
            f"--directory={tmp_path}",
            "--profile_from=20",
        ],
        cwd=ROOT,
        # As the Makefile does; a width at which no path is cut.
        env={**os.environ, "REPLICATOR_FAKE_DEVICES": "8", "COLUMNS": "250"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("\u2502") for line in done.stdout.splitlines()]
    table = {cells[1].strip(): cells[2].strip() for cells in lines if len(cells) == 4}
    assert float(table["test accuracy"].partition("%")[0]) >= 97.0
    assert table["replicas"] == "8 (cpu)"
    assert Path(table["learning curve"]).read_bytes().startswith(PNG)
    assert Path(table["metrics"]).exists()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))

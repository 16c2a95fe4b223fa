"""Run experiments as commands, as users do."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPERIMENTS = {  # the text of each
    path.stem: path.read_text()
    for path in sorted((ROOT / "experiments").glob("*.py"))
    if "config_flags.run(main, Config)" in path.read_text()
}


def command(name, *flags, devices=None, **environment):
    """Run an experiment on so many fake devices; return what it did."""
    if devices is not None:
        environment["REPLICATOR_FAKE_DEVICES"] = str(devices)
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def found_by(name, *flags, devices=None):
    """Run an experiment that ends well; return its last line."""
    done = command(name, *flags, devices=devices)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

"""The example of the room's README: a class in one process, called from another."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from replicator import rpc

pytestmark = pytest.mark.slow

README = Path(rpc.__file__).with_name("README.md")
SERVE, CALL = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_example_runs_in_two_processes(tmp_path):
    tmp_path.chmod(0o700)
    given = f"address = 'unix:{tmp_path}/counter'\n"
    server = subprocess.Popen([sys.executable, "-c", given + SERVE])
    try:
        said = subprocess.run(
            [sys.executable, "-c", given + CALL],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    finally:
        server.kill()
        server.wait(60)
    assert said.stdout.split() == ["3", "7", "12"]


def test_the_example_is_short():
    assert len([line for line in SERVE.splitlines() if line.strip()]) <= 10
    assert len([line for line in CALL.splitlines() if line.strip()]) <= 10

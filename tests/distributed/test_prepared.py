"""A process that waited runs a script as Python does, with variables it was given."""

import json
import os
import subprocess
import sys

import pytest

from replicator.distributed import prepared

SCRIPT = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv[1:],
    "name": os.path.basename(sys.argv[0]),
    "path": sys.path[0] or os.getcwd(),
    "main": __name__,
    "file": os.path.realpath(__file__),
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "given": os.environ.get("GIVEN"),
    "rest": sys.stdin.read(),
}))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "script.py").write_text(SCRIPT)
    return tmp_path


def run(folder, command, text=None):
    return subprocess.run(
        command, input=text, capture_output=True, text=True, cwd=folder, timeout=60
    )


@pytest.mark.parametrize("script", [["inner/script.py"], ["-m", "inner.script"]])
def test_a_script_runs_as_python_runs_it(folder, script):
    words = [*script, "3", "--flag"]
    plain = run(folder, [sys.executable, *words], "")
    command = prepared.command(sys.executable, ("json", "no_such_module"), words)
    waited = run(folder, command, json.dumps({"GIVEN": "yes"}) + "\nnot for it")
    assert plain.returncode == waited.returncode == 3, waited.stderr
    assert json.loads(waited.stdout) == json.loads(plain.stdout) | {"given": "yes"}


def test_an_error_of_the_script_ends_the_process_as_python_ends_it(folder):
    (folder / "bad.py").write_text("raise ValueError('of the script')")
    command = prepared.command(sys.executable, (), ["bad.py"])
    ended = run(folder, command, "{}\n")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ValueError: of the script"


def test_without_a_line_nothing_is_run(folder):
    command = prepared.command(sys.executable, (), ["inner/script.py", "3"])
    ended = run(folder, command, "")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_modules_are_imported_while_it_waits(folder):
    (folder / "noted.py").write_text("import os; os.write(1, b'imported ')")
    (folder / "script.py").write_text("import noted, os; os.write(1, b'ran')")
    command = prepared.command(sys.executable, ("noted",), ["script.py"], settle_s=0.0)
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
    ) as process:
        assert process.stdout.read(9) == b"imported "
        process.stdin.write(b"{}\n")
        process.stdin.close()
        assert process.stdout.read() == b"ran"

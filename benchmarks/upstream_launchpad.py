"""Run the tests that come with Launchpad against the modules that stand for it here.

Its wheel is fetched from the package index and unpacked: its tests, and the examples
that these import, nothing else of it. `launchpad` and `courier` are those of
`replicator.launchpad_bridge.compat`. Each test runs in a process of its own, as a
script does. Where the index has no such wheel, `passed` is null, and `skipped` says so.

What does not pass looks into Launchpad (`WorkerManager`, the processes of a
colocation), tests files that are Launchpad's own, or needs what is not there (Reverb,
Google's services); the lines above the last one name it.
"""

import ast
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

_LIMIT_S = flags.DEFINE_float("limit_s", 60.0, "Seconds that a test may take.")
_ONLY = flags.DEFINE_string("only", "", "Tests whose names hold this; all by default.")
_WHEEL = "dm-launchpad==0.5.2"
# For no Python of today: it is read as a file, not installed.
_BUILD = ["--python-version=3.10", "--implementation=cp", "--abi=cp310"]
_BUILD += ["--platform=manylinux2014_x86_64", "--only-binary=:all:", "--no-deps"]
_FETCH_S = 180.0
_AT_ONCE = 2
_SCRIPT = """
import sys
from replicator.launchpad_bridge.compat.installing import install
from replicator.launchpad_bridge.compat.scripts import run_script
folder, path, test = sys.argv[1:]
install()
import launchpad
# Where one test imports another from.
sys.modules["launchpad.launch"].__path__.append(f"{folder}/launchpad/launch")
run_script(path, [test])
"""
_MOCK = "from unittest.mock import *\n"  # a package of its own then


class Test(NamedTuple):
    """A test of the wheel: its file, and what `unittest` calls it."""

    file: str
    name: str

    @property
    def label(self) -> str:
        """Return both, in short."""
        return f"{self.file.removesuffix('_test.py')}.{self.name}"


def fetch(folder: Path) -> Path | str:
    """Return the wheel, fetched through pip; or why there is none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", *_BUILD]
    done = subprocess.run(
        [*command, "--dest", str(folder), _WHEEL],
        capture_output=True,
        text=True,
        timeout=_FETCH_S,
        check=False,
    )
    found = list(folder.glob("*.whl"))
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return found[0] if found else f"the index gave no {_WHEEL}: {last}"


def unpack(wheel: Path, folder: Path) -> list[Test]:
    """Unpack tests and examples of a wheel; return its tests."""
    found: list[Test] = []
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith("_test.py") or name.startswith("launchpad/examples/"):
                archive.extract(name, folder)
            if name.endswith("_test.py"):
                text = archive.read(name).decode()
                found += [Test(name, each) for each in tests_in(text)]
    (folder / "mock.py").write_text(_MOCK)
    return found


def tests_in(text: str) -> Iterator[str]:
    """Yield the names of the tests that a file defines."""
    kinds = [each for each in ast.parse(text).body if isinstance(each, ast.ClassDef)]
    for kind in kinds:
        for each in kind.body:
            if isinstance(each, ast.FunctionDef) and each.name.startswith("test"):
                yield f"{kind.name}.{each.name}"


def passes(test: Test, folder: Path) -> bool:
    """Run a test; tell whether it ran, and passed."""
    words = [str(folder), str(folder / test.file), test.name]
    with tempfile.TemporaryDirectory(prefix="lp") as kept:
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, *words],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join([os.getcwd(), str(folder)]),
                "TMPDIR": kept,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            out, _ = process.communicate(timeout=_LIMIT_S.value)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        return process.returncode == 0 and "Ran 1 test" in out and "\n\nOK\n" in out


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory(prefix="upstream-") as root:
        folder = Path(root)
        wheel = fetch(folder)
        if isinstance(wheel, str):
            print(json.dumps({"passed": None, "tests": 0, "skipped": wheel}))
            return
        tests = unpack(wheel, folder)
        chosen = [test for test in tests if _ONLY.value in test.label]
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            ends = list(pool.map(lambda test: passes(test, folder), chosen))
    for test, is_well in zip(chosen, ends, strict=True):
        print(f"{'passed' if is_well else 'FAILED'} {test.label}")
    print(json.dumps({"passed": sum(ends), "tests": len(tests), "skipped": None}))


if __name__ == "__main__":
    app.run(main)

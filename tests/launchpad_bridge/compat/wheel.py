"""Launchpad's own wheel: read as a file, as no current Python can install it.

It is fetched through pip, once, into pytest's cache. The repository has none of it.
"""

import subprocess
import sys
import zipfile

import pytest

WHEEL = "dm-launchpad==0.5.2"
FOR = "--python-version=3.10 --implementation=cp --abi=cp310"
PLATFORM = "--platform=manylinux2014_x86_64"
LIMIT_S = 180


def fetched(cache):
    """Return the wheel; skip where no registry has it."""
    folder = cache.mkdir("dm-launchpad")
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", *FOR.split(), PLATFORM]
        done = subprocess.run(
            [*command, "--dest", str(folder), WHEEL],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"no registry has {WHEEL}: {done.stderr[-300:]}")
    [wheel] = folder.glob("*.whl")
    return wheel


def sources(wheel):
    """Return the Python files of the wheel, by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".py")
        }

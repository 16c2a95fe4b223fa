"""Launchpad's own wheel and Acme's own source, read as files.

No current Python can install the one, nor what the other depends on. They are fetched
through pip, once, into pytest's cache. The repository has none of it.
"""

import subprocess
import sys
import tarfile
import zipfile

import pytest

WHEEL = "dm-launchpad==0.5.2"
FOR = "--python-version=3.10 --implementation=cp --abi=cp310"
PLATFORM = "--platform=manylinux2014_x86_64"
ACME = "dm-acme==0.4.0"
LIMIT_S = 180


def fetched(cache):
    """Return the wheel; skip where no registry has it."""
    options = ["--only-binary=:all:", *FOR.split(), PLATFORM]
    return _downloaded(cache.mkdir("dm-launchpad"), "*.whl", WHEEL, options)


def acme(cache, folder):
    """Put Acme's source into a folder, or skip where no registry has it."""
    packed = _downloaded(cache.mkdir("dm-acme"), "*.tar.gz", ACME, [])
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.glob("dm*acme-*")
    return source


def _downloaded(folder, pattern, name, options):
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        try:
            subprocess.run(
                [*command, *options, "--dest", str(folder), name],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=True,
            )
        except subprocess.SubprocessError as error:
            pytest.skip(f"no registry has {name} in {LIMIT_S} s: {error}")
    [packed] = folder.glob(pattern)
    return packed


def sources(wheel):
    """Return the Python files of the wheel, by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".py")
        }

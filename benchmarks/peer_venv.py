"""A virtual environment of its own for a peer: it wants other versions of packages."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LOG = logging.getLogger(__name__)
_MADE = "made"
_INSTALL_S = 1200.0


def peer_python(folder: Path, packages: Sequence[str]) -> Path | None:
    """Return the Python of a folder that has the packages, which is made if need be.

    Returns:
      None, after a warning, where they cannot be installed.
    """
    folder = folder.absolute()
    python = folder / "bin" / "python"
    if (folder / _MADE).exists():
        return python
    make = [sys.executable, "-m", "venv", "--clear", str(folder)]
    if not _done(make, packages) or not install(python, packages):
        return None
    (folder / _MADE).touch()
    return python


def install(python: Path, packages: Sequence[str]) -> bool:
    """Return whether the Python of a folder has packages, installing what it lacks."""
    print(f"Installing {', '.join(packages)} for {python}", flush=True)
    return _done([str(python), "-m", "pip", "install", "--quiet", *packages], packages)


def _done(command: Sequence[str], packages: Sequence[str]) -> bool:
    try:
        subprocess.run(command, check=True, timeout=_INSTALL_S)
    except (subprocess.SubprocessError, OSError) as error:
        _LOG.warning("%s cannot be installed: %s", ", ".join(packages), error)
        return False
    return True

"""Put our packages `launchpad` and `courier` on the path of modules."""

import importlib.util
import sys
from pathlib import Path

from replicator.errors import LaunchError

PACKAGES = str(Path(__file__).with_name("packages"))
"""Folder of these packages. `PYTHONPATH` may name it in place of `install`."""

FALLBACKS = str(Path(__file__).with_name("fallbacks"))
"""Folder of modules that are used only if no others of their names exist."""

_NAMES = ("launchpad", "courier")


def install() -> None:
    """Make `import launchpad` and `import courier` find ours; may be called twice.

    Workers have the module path of the launching process, so it holds for them, too.

    Raises:
      LaunchError: Others of these names were imported already, or absl is missing.
    """
    for name in _NAMES:
        path = getattr(sys.modules.get(name), "__file__", None) or PACKAGES
        if not path.startswith(PACKAGES):
            raise LaunchError(
                f"`{name}` must not be imported before it is installed, got that of "
                f"{path}. Call `install()` first, or remove that package."
            )
    if importlib.util.find_spec("absl") is None:
        raise LaunchError(
            "Programs of Launchpad take their flags from absl, which is missing. Run "
            "`pip install absl-py`."
        )
    # Before a copy of Launchpad that lies in the folder of a script.
    others = [path for path in sys.path if path not in (PACKAGES, FALLBACKS)]
    sys.path[:] = [PACKAGES, *others, FALLBACKS]

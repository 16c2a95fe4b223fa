"""Put packages named `launchpad` and `courier` where Python looks for modules."""

import importlib.util
import sys
from pathlib import Path

from replicator.errors import LaunchError

PACKAGES = str(Path(__file__).with_name("packages"))
"""The folder that holds them. `PYTHONPATH` may name it as well as `install` does."""

FALLBACKS = str(Path(__file__).with_name("fallbacks"))
"""A folder of modules that are ours only where there are no others."""

_NAMES = ("launchpad", "courier")


def install() -> None:
    """Let `import launchpad` and `import courier` find ours; may be called twice.

    Workers look for modules where the launching process does, so it is done for them.

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

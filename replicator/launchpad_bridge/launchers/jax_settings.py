"""Hand JAX's settings to workers: what a script has set holds in its nodes as well.

A script that says `jax.config.update("jax_enable_x64", True)` means all of its program;
under threads its nodes see it, so they do in other processes.
"""

import sys
from collections.abc import Collection, Mapping

Setting = bool | int | float | str | None


def read_settings() -> dict[str, Setting]:
    """Return JAX's settings in this process; nothing if it has not imported JAX."""
    jax = sys.modules.get("jax")
    if jax is None:
        return {}
    return {
        name: value
        for name, value in jax.config.values.items()
        if value is None or isinstance(value, bool | int | float | str)
    }


def apply_settings(
    settings: Mapping[str, Setting], *, given_by_environment: Collection[str] = ()
) -> None:
    """Set what differs here from `settings`, if this process has imported JAX.

    Args:
      settings: As `read_settings` returned them.
      given_by_environment: Environment variables that a group has of its own: the
        settings of these names stay as they are.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        return
    here = jax.config.values
    for name, value in settings.items():
        if name.upper() in given_by_environment or name not in here:
            continue
        if here[name] != value:
            jax.config.update(name, value)

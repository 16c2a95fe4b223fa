"""Arguments, paths and settings that a worker takes over from its launcher.

A script that calls `jax.config.update("jax_enable_x64", True)` means all of its
program: under threads its nodes see it, so they do in other processes.
"""

import dataclasses
import logging
import sys
from collections.abc import Collection, Mapping, Sequence

Setting = bool | int | float | str | None
"""A value of `jax.config` that other processes can be given."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LauncherEnvironment:
    """Environment of a launcher, in plain values.

    Attributes:
      argv: The script and its arguments.
      path: Folders in which Python looks for modules.
      jax_settings: Values of `jax.config`; empty if the launcher has not imported JAX.
      log_level: Level of the root logger, if it has a handler.
    """

    argv: Sequence[str]
    path: Sequence[str]
    jax_settings: Mapping[str, Setting]
    log_level: int | None

    def take_on(self, own_environment: Collection[str] = ()) -> None:
        """Make this process like the launcher, but for what it was given itself.

        Args:
          own_environment: Environment variables of the worker's group: settings that
            they stand for are not touched.
        """
        # In place: a module may hold a reference to the list.
        sys.argv[:] = self.argv
        apply_settings(self.jax_settings, given_by_environment=own_environment)
        if self.log_level is not None:
            logging.basicConfig(level=self.log_level)


def read_surroundings() -> LauncherEnvironment:
    """Return the environment of this process.

    >>> read_surroundings().argv == tuple(sys.argv)
    True
    """
    root = logging.getLogger()
    return LauncherEnvironment(
        argv=tuple(sys.argv),
        path=tuple(sys.path),
        jax_settings=read_settings(),
        log_level=root.level if root.handlers else None,
    )


def read_settings() -> dict[str, Setting]:
    """Return JAX's settings in this process; nothing if it has not imported JAX."""
    # Looked up, not imported: JAX takes a second, and a script may do without.
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
    """Change JAX's settings to `settings`, if this process has imported JAX.

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
        # Only what differs, as an update may have effects of its own.
        if here[name] != value:
            jax.config.update(name, value)

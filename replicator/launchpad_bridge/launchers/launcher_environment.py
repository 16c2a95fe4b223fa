"""What a worker finds as it is in the launcher: arguments, paths, settings."""

import dataclasses
import logging
import sys
from collections.abc import Collection, Mapping, Sequence

from replicator.launchpad_bridge.launchers import jax_settings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LauncherEnvironment:
    """Of the launcher, in plain values.

    Attributes:
      argv: The script and its arguments.
      path: Where modules are looked for.
      jax_settings: Of `jax.config`; empty if the launcher has not imported JAX.
      log_level: Of the root logger, if it has a handler.
    """

    argv: Sequence[str]
    path: Sequence[str]
    jax_settings: Mapping[str, jax_settings.Setting]
    log_level: int | None

    def take_on(self, own_environment: Collection[str] = ()) -> None:
        """Make this process like the launcher, but for what it was given itself.

        Args:
          own_environment: Environment variables of the worker's group: settings that
            they stand for are not touched.
        """
        sys.argv[:] = self.argv
        jax_settings.apply_settings(
            self.jax_settings, given_by_environment=own_environment
        )
        if self.log_level is not None:
            logging.basicConfig(level=self.log_level)


def read_surroundings() -> LauncherEnvironment:
    """Return those of this process."""
    root = logging.getLogger()
    return LauncherEnvironment(
        argv=tuple(sys.argv),
        path=tuple(sys.path),
        jax_settings=jax_settings.read_settings(),
        log_level=root.level if root.handlers else None,
    )

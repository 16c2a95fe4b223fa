"""Go back to an earlier state of one environment, by what it offers itself.

- `snapshot()` and `restore(snapshot)`, methods of its own. A snapshot is plain data and
  arrays (what `rpc` sends), and holds all that what follows depends on: state, random
  generators, counters. `restore` is called on an environment that was made alike, in
  another process too, before any `reset`.
- Atari of `ale_py` (an `ale`, `clone_state`, `restore_state`): the emulator's state
  with its random generator, which decides on sticky actions.

Only the outermost object is asked: a wrapper that counts steps or stacks frames, and
does not say how to go back, would go on from another state.
"""

from typing import Any

from replicator.base.types import PyTree
from replicator.errors import ArgumentError


def can_snapshot(environment: Any) -> bool:
    """Tell whether an environment offers a way back."""
    return _has_own(environment) or _is_ale(environment)


def snapshot(environment: Any) -> PyTree:
    """Return the state of an environment: plain data and arrays.

    Raises:
      ArgumentError: It offers none.
    """
    if _has_own(environment):
        return environment.snapshot()
    check_snapshots(environment)
    emulator = environment.clone_state(include_rng=True).serialize()
    # Beside the emulator's own: frames that are skipped at random are drawn from it.
    return emulator, environment.np_random.bit_generator.state


def restore(environment: Any, state: PyTree) -> None:
    """Put an environment into a state that `snapshot` returned.

    Raises:
      ArgumentError: It offers no way back.
    """
    if _has_own(environment):
        environment.restore(state)
        return
    check_snapshots(environment)
    emulator, generator = state
    make_state = type(environment.clone_state(include_rng=True))
    environment.restore_state(make_state(emulator))
    environment.np_random.bit_generator.state = generator


def check_snapshots(environment: Any) -> None:
    """Refuse an environment that offers no way back.

    Raises:
      ArgumentError: It has neither `snapshot` and `restore` nor Atari's emulator.
    """
    if not can_snapshot(environment):
        raise ArgumentError(
            "`environment` must have methods `snapshot` and `restore`, got "
            f"{type(environment).__name__}. Write them, in the outermost wrapper."
        )


def _has_own(environment: Any) -> bool:
    return _has(environment, "snapshot", "restore")


def _is_ale(environment: Any) -> bool:
    has_ale = hasattr(environment, "ale")
    return has_ale and _has(environment, "clone_state", "restore_state")


def _has(environment: Any, *methods: str) -> bool:
    return all(callable(getattr(environment, name, None)) for name in methods)

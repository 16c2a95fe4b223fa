"""Snapshot and restore the state of one environment, by methods of its own.

- `snapshot()` and `restore(snapshot)`. A snapshot is plain data and arrays (as `rpc`
  sends them), and holds all that later steps depend on: state, random generators,
  counters. `restore` is called on an environment made by the same arguments, in another
  process too, before any `reset`.
- Atari of `ale_py` (an `ale`, `clone_state`, `restore_state`): the emulator's state
  with its random generator, which decides on sticky actions.

Only the outermost object counts: a wrapper that counts steps or stacks frames, without
these methods, would go on from another state.
"""

from typing import Any

from replicator.base.types import PyTree
from replicator.errors import ArgumentError


def can_snapshot(environment: Any) -> bool:
    """Return whether an environment can be snapshot and restored.

    >>> class Counter:
    ...     def snapshot(self): ...
    ...     def restore(self, snapshot): ...
    >>> can_snapshot(Counter()), can_snapshot(object())
    (True, False)
    """
    return _has_own(environment) or _is_ale(environment)


def snapshot(environment: Any) -> PyTree:
    """Return the state of an environment: plain data and arrays.

    Raises:
      ArgumentError: It cannot be snapshot.
    """
    if _has_own(environment):
        return environment.snapshot()
    check_snapshots(environment)
    emulator = environment.clone_state(include_rng=True).serialize()
    # A second generator, beside the emulator's: it draws the number of skipped frames.
    return emulator, environment.np_random.bit_generator.state


def restore(environment: Any, state: PyTree) -> None:
    """Put an environment into a state that `snapshot` returned.

    Raises:
      ArgumentError: It cannot be restored.
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
    """Raise if an environment cannot be snapshot and restored.

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

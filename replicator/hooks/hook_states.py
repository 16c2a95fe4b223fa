"""States of hooks in a checkpoint: matched by type and order when they are loaded."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from replicator.errors import ArgumentError
from replicator.hooks.protocol import Hook
from replicator.hooks.user_hooks import HookOfUser

_log = logging.getLogger(__name__)


def hook_states(hooks: Sequence[Hook]) -> list[list[Any]]:
    """Return the name and the state of each hook, and whether it is the user's.

    Raises:
      ArgumentError: A state is not plain JSON; names the hook.
    """
    return [[_name(hook), _state(hook), _is_users(hook)] for hook in hooks]


def _state(hook: Hook) -> Any:
    state = hook.state_dict()
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as failure:
        raise ArgumentError(
            f"`{_name(hook)}.state_dict` must return plain JSON, got another value: "
            f"{failure}. Return finite numbers, strings, lists and dicts of them."
        ) from failure


def load_hooks(hooks: Sequence[Hook], saved: Sequence[Any]) -> None:
    """Load into each hook the state of the same one of its type; log the others.

    Args:
      hooks: Hooks of the run that goes on.
      saved: `hook_states` of the saved run; empty for a new one.
    """
    left = [(name, state, users) for name, state, *users in saved]
    for hook in hooks:
        # A hook of the user is not one of the run's own; before 0.3 this was not saved.
        same = ([], [_is_users(hook)])
        of_kind = [each for each in left if each[0] == _name(hook) and each[2] in same]
        if of_kind:
            left.remove(of_kind[0])
            if of_kind[0][1] is not None:
                hook.load_state(of_kind[0][1])
        elif saved and hook.state_dict() is not None:
            _log.warning(
                "The run was saved without this `%s`: it starts anew.", _name(hook)
            )
    for name, state, _ in left:
        if state is not None:
            _log.warning(
                "The run was saved with a `%s` that it now lacks: its state is lost.",
                name,
            )


def _name(hook: Hook) -> str:
    return type(getattr(hook, "inner", hook)).__name__


def _is_users(hook: Hook) -> bool:
    return isinstance(hook, HookOfUser)

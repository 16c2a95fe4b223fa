"""Show a user's hook the user's state, not the run's."""

import dataclasses

from replicator.hooks.protocol import Hook, StateEvent


class HookOfUser(Hook):
    """A hook of the user, which gets the user's state; the user closes it."""

    def __init__(self, hook: Hook) -> None:
        self.inner = hook
        self.phase = hook.phase
        self.on_metrics = hook.on_metrics
        self.state_dict = hook.state_dict
        self.load_state = hook.load_state
        self.flush = hook.flush

    @property
    def should_stop(self) -> bool:
        """Whether the hook wants the run to end."""
        return self.inner.should_stop

    def on_state(self, event: StateEvent) -> None:
        """Pass the event on."""
        self.inner.on_state(_for_user(event))

    def on_end(self, event: StateEvent) -> None:
        """Pass the last event on."""
        self.inner.on_end(_for_user(event))


def _for_user(event: StateEvent) -> StateEvent:
    return dataclasses.replace(event, read_state=lambda: event.state.user)

"""Hold the rules of a replicating strategy against the optimizers of a state."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from replicator.engine.step.optimizer_state import OptimizerState
from replicator.errors import ArgumentError
from replicator.strategies.strategy import Strategy


def check_rules(strategy: Strategy, optimizers: Sequence[OptimizerState]) -> None:
    """Refuse rules that no optimizer of a state would follow.

    Args:
      strategy: A strategy that replicates.
      optimizers: The optimizers of the state.

    Raises:
      ArgumentError: An optimizer was wrapped with other rules, or without; or a rule
        matches none of their parameters.

    >>> check_rules(replicator.strategies.data_parallel(), [])
    """
    paths: list[str] = []
    for each in optimizers:
        own = each.synchroniser
        paths += own.paths if own else ()
        rules = (
            (own.strategy.rules, own.strategy.devices_per_host) if own else ((), None)
        )
        if rules != (strategy.rules, strategy.devices_per_host):
            raise ArgumentError(
                "`strategy` must be that of the replicator in each optimizer, got "
                f"`{each.name}` wrapped with {'other rules' if own else 'no rules'}. "
                "Wrap it with `rep.wrap_optimizer`."
            )
    for rule in strategy.rules:
        if not any(fnmatchcase(path, rule.pattern) for path in paths):
            found = ", ".join(paths)[:120] or "a state without a wrapped optimizer"
            raise ArgumentError(
                "`rules` must each match a parameter that an optimizer updates, got "
                f"{rule.pattern!r}, which matches none of: {found}. Begin it with the "
                'name of `rep.wrap_optimizer(tx, name="params")`.'
            )

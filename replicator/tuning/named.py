"""Strategies by the text of a command line: `fsdp,hybrid(shard=8)`."""

import ast
from collections.abc import Callable, Sequence
from typing import NamedTuple

from replicator.errors import ArgumentError
from replicator.strategies import builders
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import Strategy

_BUILDERS: dict[str, Callable[..., Strategy]] = {
    "data_parallel": builders.data_parallel,
    "zero1": builders.zero1,
    "zero2": builders.zero2,
    "fsdp": builders.fsdp,
    "hybrid": builders.hybrid,
    "tensor_parallel": builders.tensor_parallel,
}


class NamedStrategy(NamedTuple):
    """A strategy, and the text that it is asked for by."""

    text: str
    strategy: Strategy


def named_strategies(text: str) -> list[NamedStrategy]:
    """Return the strategies of a list: names of builders, with arguments or without.

    Args:
      text: Names, separated by commas; arguments are literals of Python.

    Raises:
      ArgumentError: There is no such builder, or it does not take the arguments.

    >>> [each.text for each in named_strategies("fsdp, hybrid(shard=8)")]
    ['fsdp', 'hybrid(shard=8)']
    """
    try:
        parsed = ast.parse(f"[{text}]", mode="eval").body
    except SyntaxError:
        parsed = None
    if not isinstance(parsed, ast.List) or not parsed.elts:
        raise ArgumentError(
            f"`strategy` must be names of builders, got {text!r}. Write `fsdp,zero1` "
            "or `hybrid(shard=8)`."
        )
    return [_built(node) for node in parsed.elts]


def strategies_on(
    machine: Machine, strategies: Sequence[NamedStrategy]
) -> list[NamedStrategy]:
    """Return strategies with the devices of the machine's hosts, where they need them.

    Args:
      machine: The machine.
      strategies: The strategies.

    >>> [pods] = named_strategies("hybrid")
    >>> [found] = strategies_on(Machine.from_topology("h100:2x8"), [pods])
    >>> found.strategy.shard
    8
    """
    return [
        named._replace(strategy=named.strategy.for_hosts(machine.devices_per_host))
        for named in strategies
    ]


def _built(node: ast.expr) -> NamedStrategy:
    text = ast.unparse(node)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = call.func.id if isinstance(call.func, ast.Name) else text
    if name not in _BUILDERS:
        raise ArgumentError(
            f"`strategy` must be one of {', '.join(_BUILDERS)}, got {name!r}. Use one "
            "of these, or `auto`."
        )
    try:
        arguments = [ast.literal_eval(each) for each in call.args]
        named = {
            each.arg or "**": ast.literal_eval(each.value if each.arg else each)
            for each in call.keywords
        }
        return NamedStrategy(text, _BUILDERS[name](*arguments, **named))
    except (TypeError, ValueError) as failure:
        if isinstance(failure, ArgumentError):
            raise
        # For what is no literal Python's text has an address of its memory.
        is_none = isinstance(failure, ValueError)
        why = "arguments are literals, each by itself" if is_none else failure
        raise ArgumentError(
            f"`strategy` must give {name} what it takes, got {text!r}: {why}. See "
            f"`help(replicator.strategies.{name})`."
        ) from failure

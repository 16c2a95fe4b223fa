"""Read and write strategies as JSON and YAML; an unknown key is told with its line."""

import json
from dataclasses import fields
from typing import Any

import yaml

from replicator.errors import ArgumentError
from replicator.strategies.strategy import Rule, Strategy


def to_json(strategy: Strategy) -> str:
    """Write a strategy as JSON, which `from_json` reads back."""
    return json.dumps(strategy.as_json(), indent=2)


def to_yaml(strategy: Strategy) -> str:
    """Write a strategy as YAML, which `from_yaml` reads back."""
    return yaml.safe_dump(strategy.as_json(), sort_keys=False)


def from_yaml(text: str) -> Strategy:
    """Read a strategy; what is left out has its default.

    Args:
      text: As `to_yaml` writes it.

    Raises:
      ArgumentError: It is no YAML, a key is unknown (its line is told), or a field
        breaks its rule.

    >>> text = to_yaml(Strategy(name="mine", shard=8))
    >>> from_yaml(text).shard
    8
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        plain = yaml.safe_load(text)
    except yaml.YAMLError as failure:
        raise ArgumentError(
            f"`text` must be YAML, got what is not: {failure}. Mend that line."
        ) from failure
    _check_keys(root, Strategy)
    assert isinstance(plain, dict), "the check of its keys would have raised"
    for key, node in _items(root):
        if key == "rules" and isinstance(node, yaml.SequenceNode):
            for each in node.value:
                _check_keys(each, Rule)
    rules = [
        Rule(**{name: _tuples(value) for name, value in rule.items()})
        for rule in plain.pop("rules", ())
    ]
    of = {name: _tuples(value) for name, value in plain.items()}
    return Strategy(**of, rules=tuple(rules))


def from_json(text: str) -> Strategy:
    """Read a strategy; JSON is YAML, so errors tell lines here, too."""
    return from_yaml(text)


def _items(node: yaml.MappingNode) -> list[tuple[str, Any]]:
    return [(key.value, value) for key, value in node.value]


def _check_keys(node: Any, kind: type) -> None:
    known = [each.name for each in fields(kind)]
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1 if node is not None else 1
        raise ArgumentError(
            f"`text` must hold the fields of a {kind.__name__.lower()}, got something "
            f"else in line {line}. Write `{known[0]}: ...`."
        )
    for key, _ in node.value:
        if key.value not in known:
            raise ArgumentError(
                f"`text` must hold known keys only, got {key.value!r} in line "
                f"{key.start_mark.line + 1}. Use one of {', '.join(known)}."
            )
    if known[0] not in [key.value for key, _ in node.value]:
        raise ArgumentError(
            f"`text` must hold the key {known[0]!r}, got a {kind.__name__.lower()} "
            f"without it in line {node.start_mark.line + 1}. Add `{known[0]}: ...`."
        )


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

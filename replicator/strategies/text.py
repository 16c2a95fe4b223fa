"""Read and write strategies as JSON and YAML; errors name the line of a bad key."""

import json
from dataclasses import fields
from typing import Any, TypeVar

import yaml

from replicator.errors import ArgumentError, check_text
from replicator.strategies.rule import Rule
from replicator.strategies.strategy import Strategy

T = TypeVar("T")


def to_json(strategy: Strategy) -> str:
    """Write a strategy as JSON, which `from_json` reads back.

    >>> from_json(to_json(Strategy(name="mine", shard=8))).shard
    8
    """
    return json.dumps(strategy.as_json(), indent=2)


def to_yaml(strategy: Strategy) -> str:
    """Write a strategy as YAML, which `from_yaml` reads back.

    >>> to_yaml(Strategy(name="mine")).splitlines()[0]
    'name: mine'
    """
    return yaml.safe_dump(strategy.as_json(), sort_keys=False)


def from_yaml(text: str) -> Strategy:
    """Read a strategy; fields that are left out have their defaults.

    Args:
      text: Text as `to_yaml` writes it.

    Raises:
      ArgumentError: It is not YAML, a key is unknown (its line is named), or a field
        breaks its rule.

    >>> text = to_yaml(Strategy(name="mine", shard=8))
    >>> from_yaml(text).shard
    8
    """
    check_text("text", text)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        plain = yaml.safe_load(text)
    except yaml.YAMLError as failure:
        raise ArgumentError(
            f"`text` must be YAML, got text that is not: {failure}. Mend that line."
        ) from failure
    _check_keys(root, Strategy)
    assert isinstance(plain, dict), "the check of its keys would have raised"
    rules = plain.pop("rules", None) or []
    nodes = {key.value: node for key, node in root.value}
    if rules and not isinstance(rules, list):
        raise ArgumentError(
            "`text` must hold a list of rules, got something else in line "
            f"{_line(nodes['rules'])}. Write `- pattern: ...` below `rules:`."
        )
    made = []
    for rule, node in zip(rules, nodes["rules"].value if rules else [], strict=True):
        _check_keys(node, Rule)
        made.append(_made(Rule, rule, node))
    return _made(Strategy, plain | {"rules": made}, root)


def from_json(text: str) -> Strategy:
    """Read a strategy; JSON is YAML, so errors name lines here, too.

    >>> from_json('{"name": "mine", "shard": 8}').shard
    8
    """
    return from_yaml(text)


def _made(kind: type[T], plain: dict[str, Any], node: yaml.Node) -> T:
    try:
        return kind(**plain)
    except ArgumentError as failure:
        failure.add_note(f"That is in the {_name(kind)} of line {_line(node)}.")
        raise


def _name(kind: type) -> str:
    return kind.__name__.lower()


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _check_keys(node: Any, kind: type) -> None:
    known = [each.name for each in fields(kind)]
    if not isinstance(node, yaml.MappingNode):
        raise ArgumentError(
            f"`text` must hold the fields of a {_name(kind)}, got something else in "
            f"line {1 if node is None else _line(node)}. Write `{known[0]}: ...`."
        )
    given = [key.value for key, _ in node.value]
    for key, _ in node.value:
        if key.value not in known:
            raise ArgumentError(
                f"`text` must hold known keys only, got {key.value!r} in line "
                f"{_line(key)}. Use one of {', '.join(known)}."
            )
        if given.count(key.value) > 1:
            raise ArgumentError(
                f"`text` must hold each key once, got {key.value!r} again, first in "
                f"line {_line(key)}. Leave one out."
            )
    if known[0] not in given:
        raise ArgumentError(
            f"`text` must hold the key {known[0]!r}, got a {_name(kind)} without it in "
            f"line {_line(node)}. Add `{known[0]}: ...`."
        )

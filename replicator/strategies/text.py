"""Read and write strategies as JSON and YAML; errors name the line of a bad key."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import yaml

from replicator.errors import ArgumentError, check_text
from replicator.strategies.strategy import Rule, Strategy

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
            f"{line_of(nodes['rules'])}. Write `- pattern: ...` below `rules:`."
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
        failure.add_note(f"That is in the {_name(kind)} of line {line_of(node)}.")
        raise


def mapping_of(
    node: Any, known: Sequence[str] | None, what: str, needed: Sequence[str]
) -> dict[str, yaml.Node]:
    """Return the values of a mapping by key, or raise with the line of what is wrong.

    Args:
      node: Node of a composed document; None for an empty one.
      known: Keys that it may have; None for any.
      what: Name of the thing that it describes.
      needed: Keys that it must have.

    Raises:
      ArgumentError: It is not a mapping, a key is unknown, or twice there, or missing.
    """
    first = next(iter(known or ()), "name")
    if not isinstance(node, yaml.MappingNode):
        raise ArgumentError(
            f"`text` must hold the fields of a {what}, got something else in "
            f"line {1 if node is None else line_of(node)}. Write `{first}: ...`."
        )
    given: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        if known is not None and key.value not in known:
            raise ArgumentError(
                f"`text` must hold known keys only, got {key.value!r} in line "
                f"{line_of(key)}. Use one of {', '.join(known)}."
            )
        if key.value in given:
            raise ArgumentError(
                f"`text` must hold each key once, got {key.value!r} again, first in "
                f"line {line_of(given[key.value])}. Leave one out."
            )
        given[key.value] = key
    for name in needed:
        if name not in given:
            raise ArgumentError(
                f"`text` must hold the key {name!r}, got a {what} without it in "
                f"line {line_of(node)}. Add `{name}: ...`."
            )
    return {key.value: value for key, value in node.value}


def line_of(node: yaml.Node) -> int:
    """Return the line of a node, from 1."""
    return node.start_mark.line + 1


def _name(kind: type) -> str:
    return kind.__name__.lower()


def _check_keys(node: Any, kind: type) -> None:
    known = [each.name for each in fields(kind)]
    mapping_of(node, known, _name(kind), known[:1])

"""Flags of an experiment, made from the dataclass that is its configuration.

Each field is a flag of its type, with its default, and with its line under `Attributes`
in the docstring as help.
"""

import dataclasses
import inspect
import re
import typing
from typing import Any, TypeVar

from absl import flags

Config = TypeVar("Config")

_DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def define(config: type) -> None:
    """Define a flag for each field of a dataclass; call it once, as a script starts."""
    words = dict(re.findall(r"(\w+): (.+)", inspect.getdoc(config) or ""))
    kinds = typing.get_type_hints(config)
    for field in _fields(config):
        choices, about = typing.get_args(kinds[field.name]), words[field.name]
        if choices:  # of a Literal
            flags.DEFINE_enum(field.name, field.default, list(choices), about)
        else:
            _DEFINE[kinds[field.name]](field.name, field.default, about)


def read(config: type[Config]) -> Config:
    """Return the configuration that the command line asks for."""
    values = {each.name: flags.FLAGS[each.name].value for each in _fields(config)}
    return config(**values)


def _fields(config: Any) -> tuple[Any, ...]:
    return dataclasses.fields(config)

"""Flags of an experiment, made from the dataclass that is its configuration.

Each field is a flag of its type, with its default; its line under `Attributes` in the
docstring is the help. The type also limits the values: `steps: Count`.
A script ends with a call of `run`.
"""

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

from absl import app, flags, logging

from replicator.errors import ArgumentError, check_number, check_whole

flags.disclaim_key_flags()  # `--help` lists those of the script, which calls `define`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The rule that values of a flag must obey.

    Attributes:
      text: The rule, after "must be".
      holds: Whether a finite number is one.
    """

    text: str
    holds: Callable[[float], bool]


Count = Annotated[int, Rule(text="at least 1", holds=lambda value: value >= 1)]
Whole = Annotated[int, Rule(text="at least 0", holds=lambda value: value >= 0)]
Rate = Annotated[float, Rule(text="above 0 and finite", holds=lambda value: value > 0)]
Amount = Annotated[
    float, Rule(text="at least 0 and finite", holds=lambda value: value >= 0)
]
Decay = Annotated[
    float, Rule(text="at least 0 and below 1", holds=lambda value: 0 <= value < 1)
]
Discount = Annotated[
    float, Rule(text="from 0 to 1", holds=lambda value: 0 <= value <= 1)
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of settings: values that their types refuse raise an error.

    Raises:
      ArgumentError: A value breaks its rule; the message names the flag.
    """

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if typing.get_origin(kind) is Annotated:
                _check_number(field, value, *typing.get_args(kind))
            elif (named := typing.get_args(kind)) and value not in named:
                raise ArgumentError(
                    f"`--{field.name}` must be one of {', '.join(named)}, got {value}. "
                    f"Leave it out for {field.default}."
                )


def _check_number(field: Any, value: Any, kind: type, rule: Rule) -> None:
    (check_whole if kind is int else check_number)(f"--{field.name}", value)
    if not (math.isfinite(value) and rule.holds(value)):
        raise ArgumentError(
            f"`--{field.name}` must be {rule.text}, got {value}. Leave it out for "
            f"{field.default}."
        )


def check_shares(name: str, value: int, parts: int, kind: str) -> None:
    """Refuse a number that does not divide evenly.

    Args:
      name: Name of the flag.
      value: Number to divide.
      parts: Number of parts.
      kind: Name of the parts, for the message.

    Raises:
      ArgumentError: It does not.

    >>> check_shares("global_batch", 64, 8, "replicas")
    """
    if value % parts:
        raise ArgumentError(
            f"`--{name}` must divide evenly over {parts} {kind}, got {value}. Use "
            f"{max(1, value // parts) * parts}."
        )


def check_batch(config: Any, replicas: int) -> None:
    """Refuse a `global_batch` that does not divide over replicas × `accumulate`.

    Raises:
      ArgumentError: It does not.
    """
    parts = replicas * config.accumulate
    check_shares("global_batch", config.global_batch, parts, "microbatches of replicas")


def check_left_out(config: Any, names: Collection[str], *, scales: str) -> None:
    """Refuse flags that have no meaning at the scale of a run.

    Args:
      config: With `scale`.
      names: Of the flags, which must be as by default.
      scales: Where they have one.

    Raises:
      ArgumentError: One of them is set.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in names and value != field.default:
            raise ArgumentError(
                f"`--{field.name}` must come with `--scale={scales}`, got {value} with "
                f"{config.scale}. Leave it out."
            )


def check_environments(config: Any, replicas: int, *, batch: str) -> None:
    """Refuse flags of acting that do not fit each other, or are for programs only.

    Args:
      config: With `environments`, `scale`, `launch_type` and `actors`.
      replicas: Number of replicas of the learner.
      batch: The flag for the number of trajectories of an update.

    Raises:
      ArgumentError: They do not.
    """
    size = getattr(config, batch)
    if config.scale == "program":
        check_shares("environments", config.environments, config.actors, "actors")
    else:
        # What is made at once is cut into batches.
        each = f"trajectories of `--{batch}`"
        check_shares("environments", config.environments, size, each)
        check_left_out(config, ("launch_type", "actors"), scales="program")
    check_shares(batch, size, replicas, "replicas")


Config = TypeVar("Config", bound=Settings)

_DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def run(main: Callable[[Config], None], config: type[Config]) -> None:
    """Call `main` with the configuration that the command line asks for, and exit."""
    define(config)
    start(lambda: main(read(config)))


def start(main: Callable[[], None]) -> None:
    """Read the command line, refuse what is no flag, call `main`, and exit."""

    def call(argv: list[str]) -> None:
        if argv[1:]:
            raise app.UsageError(f"Flags begin with `--`, got {' '.join(argv[1:])}.")
        logging.set_verbosity(logging.WARNING)  # TFDS logs every file that it writes
        main()

    app.run(call)


def define(config: type[Settings]) -> None:
    """Define a flag for each field of a dataclass; call it once, as a script starts."""
    texts = {}
    for each in reversed(config.__mro__):  # a field is described where it is defined
        lines = re.findall(
            r"(\w+): (.+(?:\n {4}.+)*)", inspect.cleandoc(each.__doc__ or "")
        )
        texts |= {name: re.sub(r"\s+", " ", about) for name, about in lines}
    kinds = typing.get_type_hints(config)  # without the rules
    for field in dataclasses.fields(config):
        choices, about = typing.get_args(kinds[field.name]), texts[field.name]
        default: Any = field.default
        if choices:  # of a Literal
            flags.DEFINE_enum(field.name, default, list(choices), about)
        else:
            _DEFINE[kinds[field.name]](field.name, default, about)


def read(config: type[Config]) -> Config:
    """Return the configuration that the command line asks for.

    Raises:
      ArgumentError: A flag breaks its rule.
    """
    names = [field.name for field in dataclasses.fields(config)]
    return config(**{name: flags.FLAGS[name].value for name in names})

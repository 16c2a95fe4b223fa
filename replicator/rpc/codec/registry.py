"""Classes that may travel, by short name; names that are not here are refused.

A name on the wire is a key of this table and nothing else: no module is imported by it,
no attribute is looked up. Both ends register the same classes, usually by importing the
module that defines them.

Two libraries need not be registered: named tuples of optax and flax, flax structs and
`FrozenDict`. They travel as "module:class", and the receiver looks that up among the
modules that it has imported itself.

>>> @register
... @dataclasses.dataclass(frozen=True)
... class Observation:
...     pixels: bytes
"""

import dataclasses
import enum
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from replicator.errors import ArgumentError
from replicator.rpc.unsent_functions import NotSent, is_function

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_LIBRARIES = frozenset({"optax", "flax"})  # a process that imported them has the same
_FROZEN_DICT = "flax.core.frozen_dict:FrozenDict"
_Class = TypeVar("_Class", bound=type)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Entry of the table for a class.

    Attributes:
      name: Name by which it travels.
      cls: The class.
      kind: Kind of class, which decides on the parts to send: its fields, or the name
        of a member. Exceptions are not values: they travel as the answer to a call.
      fields: Names of the parts of an instance, in order.
      set_later: Fields that the constructor does not take.
      static: Fields that are not part of its pytree: there functions are not sent.
    """

    name: str
    cls: type
    kind: Literal["dataclass", "namedtuple", "mapping", "enum", "exception"]
    fields: tuple[str, ...] = ()
    set_later: frozenset[str] = frozenset()
    static: frozenset[str] = frozenset()

    def parts(self, value: Any) -> list[tuple[str, Any]]:
        """Return the parts of an instance to send, by field.

        >>> @dataclasses.dataclass
        ... class Point:
        ...     x: int
        >>> _ = (registry := Registry()).register(Point)
        >>> registry.entry_of(Point).parts(Point(3))
        [('x', 3)]
        """
        if self.kind == "mapping":
            return [("items", value.unfreeze())]
        found = [(field, getattr(value, field)) for field in self.fields]
        return [
            (field, NotSent(f"{self.cls.__name__}.{field}"))
            if field in self.static and is_function(part)
            else (field, part)
            for field, part in found
        ]


class Registry:
    """Classes by short name: named tuples, dataclasses, enums, exceptions."""

    def __init__(self) -> None:
        self._by_name: dict[str, Entry] = {}
        self._by_class: dict[type, Entry] = {}

    @overload
    def register(self, cls: _Class, name: str | None = None) -> _Class: ...
    @overload
    def register(
        self, cls: None = None, name: str | None = None
    ) -> Callable[[_Class], _Class]: ...
    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Let instances of a class travel; returns the class, so it decorates.

        Args:
          cls: A named tuple, dataclass, enum or exception.
          name: Name in messages; the class's own name by default.

        Returns:
          The class; without one, a decorator.

        Raises:
          ArgumentError: The class is of another kind or cannot be rebuilt from its
            fields, or another class has the name.

        >>> registry = Registry()
        >>> @registry.register(name="point")
        ... @dataclasses.dataclass
        ... class Point:
        ...     x: int
        >>> registry.entry_named("point").fields
        ('x',)
        """
        if cls is None:
            return lambda cls: self.register(cls, name)
        entry = _entry(cls, name)
        self._check_free(entry)
        self._by_name[entry.name] = entry
        self._by_class[cls] = entry
        return cls

    def entry_of(self, cls: type) -> Entry | None:
        """Return the entry of a class itself (not of its bases)."""
        return self._by_class.get(cls) or _library_entry(cls)

    def entry_named(self, name: str) -> Entry | None:
        """Return the entry under a name."""
        module, _, cls = name.partition(":")
        if not cls:
            return self._by_name.get(name)
        if module.partition(".")[0] not in _LIBRARIES:  # to look may load a lazy one
            return None
        # Defined there itself: no path of attributes, and no other module's class.
        found = vars(sys.modules.get(module, object)).get(cls)
        entry = _library_entry(found) if isinstance(found, type) else None
        return entry if entry is not None and entry.name == name else None

    def _check_free(self, entry: Entry) -> None:
        holder = self._by_name.get(entry.name)
        if holder is not None and _source(holder.cls) != _source(entry.cls):
            raise ArgumentError(
                f"`name` must be free, got {entry.name!r}, which is "
                f"{_source(holder.cls)}. Pass another `name` for {_source(entry.cls)}."
            )
        known = self._by_class.get(entry.cls)
        if known is not None and known.name != entry.name:
            raise ArgumentError(
                f"`name` must be one for each class, got {entry.name!r} for "
                f"{_source(entry.cls)}, which is {known.name!r}. Register it once."
            )


DEFAULT_REGISTRY = Registry()
"""What servers and clients use that are given no registry of their own."""

register = DEFAULT_REGISTRY.register
"""Let instances of a class travel, under its own name or `name`; decorates."""


def _source(cls: type) -> str:
    """Name a class so that a reloaded module's is the same."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _entry(cls: Any, name: str | None) -> Entry:
    if not isinstance(cls, type):
        raise ArgumentError(f"`cls` must be a class, got {cls!r}. Pass its type.")
    name = cls.__name__ if name is None else name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            "`name` must be letters, digits, `_`, `.` and `-`, at most 128, got "
            f"{name!r}. Pass a short `name`."
        )
    if issubclass(cls, enum.Enum):
        return Entry(name=name, cls=cls, kind="enum")
    if issubclass(cls, Exception):
        return Entry(name=name, cls=cls, kind="exception")
    if dataclasses.is_dataclass(cls):
        return _dataclass_entry(cls, name)
    if _is_named_tuple(cls):
        return Entry(name=name, cls=cls, kind="namedtuple", fields=cls._fields)
    raise ArgumentError(
        "`cls` must be a named tuple, dataclass, enum or exception, got "
        f"{_source(cls)}. Make it a dataclass."
    )


def _is_named_tuple(cls: Any) -> bool:
    is_named = isinstance(getattr(cls, "_fields", None), tuple)
    return issubclass(cls, tuple) and is_named and hasattr(cls, "_make")


@functools.lru_cache(maxsize=1024)
def _library_entry(cls: Any) -> Entry | None:
    """Return the entry of a class that need not be registered; None for others."""
    if cls.__module__.partition(".")[0] not in _LIBRARIES:
        return None
    name = f"{cls.__module__}:{cls.__qualname__}"
    if name == _FROZEN_DICT:
        return Entry(name=name, cls=cls, kind="mapping", fields=("items",))
    if _is_named_tuple(cls):
        return Entry(name=name, cls=cls, kind="namedtuple", fields=cls._fields)
    # A struct is data; other dataclasses there, as modules of networks, are not.
    is_struct = dataclasses.is_dataclass(cls) and "_flax_dataclass" in vars(cls)
    return _dataclass_entry(cls, name) if is_struct else None


def _dataclass_entry(cls: Any, name: str) -> Entry:
    fields = dataclasses.fields(cls)
    taken = {field.name for field in fields if field.init}
    _check_rebuilds(cls, taken)
    return Entry(
        name=name,
        cls=cls,
        kind="dataclass",
        fields=tuple(field.name for field in fields),
        set_later=frozenset(field.name for field in fields if not field.init),
        static=frozenset(
            field.name for field in fields if field.metadata.get("pytree_node") is False
        ),
    )


def _check_rebuilds(cls: type, taken: set[str]) -> None:
    """Refuse a constructor that wants more than the fields, or takes them not."""
    parameters = inspect.signature(cls).parameters.values()
    named = {
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for parameter in parameters:
        optional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        optional = optional or parameter.default is not parameter.empty
        if not optional and parameter.name not in taken:
            raise ArgumentError(
                f"`cls` must be made of its fields alone, got {_source(cls)}, which "
                f"also takes {parameter.name!r}. Give it a default, or make it a field."
            )
    if not takes_any and not taken <= named:
        raise ArgumentError(
            f"`cls` must take its fields by name, got {_source(cls)}, which does not "
            f"take {sorted(taken - named)[0]!r}. Let the dataclass write `__init__`."
        )

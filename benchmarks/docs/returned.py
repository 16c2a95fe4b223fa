"""List the classes that public calls return or take, and that have no public name."""

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

from replicator.inputs.adapters import Adapter
from replicator.monitoring.progress import ProgressNumbers

_FIELDS = (Adapter, ProgressNumbers)  # of options and of events


def returned(public: dict[str, object]) -> list[type]:
    """Return the classes in the annotations of functions and methods.

    Args:
      public: The public objects by their names; classes among these are left out.
    """
    known = {value for value in public.values() if inspect.isclass(value)}
    found = set(_FIELDS)
    for value in public.values():
        for call in _calls(value):
            for hint in typing.get_type_hints(call).values():
                found |= set(_classes(hint)) - known
    return sorted(found, key=lambda kind: kind.__name__.lower())


def _calls(value: object) -> Iterator[Callable[..., Any]]:
    if inspect.isfunction(value):
        yield value
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)  # of a class method
        if inspect.isfunction(member) and (name[0] != "_" or name == "__call__"):
            yield member


def _classes(hint: object) -> Iterator[type]:
    """Yield the classes of the library that an annotation holds."""
    if isinstance(hint, list):  # arguments of a `Callable`
        for each in hint:
            yield from _classes(each)
    elif parts := typing.get_args(hint):
        for each in parts:
            yield from _classes(each)
    elif inspect.isclass(hint) and hint.__module__.startswith("replicator."):
        yield hint

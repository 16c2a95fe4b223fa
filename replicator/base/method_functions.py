"""Methods as functions, for those who need one object, made with its defaults."""

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from replicator.base import tracebacks

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


def as_function(
    method: Callable[Concatenate[T, P], R], make: Callable[[], T]
) -> Callable[P, R]:
    """Return a method as a function of its other arguments, on a new object each time.

    >>> as_function(str.upper, lambda: "a")()
    'A'
    """

    @tracebacks.short_traceback
    @functools.wraps(method)
    def function(*args: P.args, **arguments: P.kwargs) -> R:
        return method(make(), *args, **arguments)

    of_method = inspect.signature(method)
    parameters = list(of_method.parameters.values())[1:]
    vars(function)["__signature__"] = of_method.replace(parameters=parameters)
    return function

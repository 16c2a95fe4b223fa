"""Every exception that `replicator` raises itself, in one tree.

    ReplicatorError
    ├── ArgumentError (ValueError)          an argument breaks its rule
    ├── BatchError (ValueError)             a batch does not fit step or replicas
    ├── StateError (ValueError)             a step returned another structure
    ├── ReplicationError (ValueError)       state may differ between replicas
    ├── PartitionError (ArithmeticError)    a partitioned step is not that of one device
    ├── TooLateError (RuntimeError)         JAX started before it was set up
    ├── InputTimeoutError (TimeoutError)    the input yielded nothing within its limit
    ├── CheckpointError (RuntimeError)      a checkpoint cannot be written or read
    │   └── BucketError                     a bucket refused us, or did not answer
    ├── CheckpointInUseError (RuntimeError) another run writes to the same directory
    ├── CheckpointMismatchError (ValueError) a checkpoint holds another state
    ├── DistributedError (RuntimeError)     processes cannot meet, or one has left
    │   └── DistributedTimeoutError (TimeoutError)  a process did not come in time
    ├── NonFiniteError (FloatingPointError) a number became NaN or infinite
    ├── SpikeError (ArithmeticError)        a number left the range it had
    ├── ReplicaMismatchError (ArithmeticError)  copies of a leaf are not equal
    ├── DeviceMemoryError (MemoryError)     a step needs more memory than there is
    ├── RpcError (RuntimeError)             a call to another process failed
    │   ├── EncodeError (TypeError)         a value cannot be sent
    │   ├── DecodeError (ValueError)        the received bytes are not a valid message
    │   ├── MessageTooLargeError (ValueError)  a message is past its limit
    │   ├── AuthenticationError (PermissionError)  a peer did not prove that it belongs
    │   ├── AddressInUseError (OSError)     another server listens there
    │   ├── ConnectionLostError (ConnectionError)  the other end is gone
    │   ├── CallTimeoutError (TimeoutError) no answer came within the deadline
    │   ├── CallCancelledError (CancelledError)  the caller gave the call up
    │   ├── ServerStoppedError              the server takes no more calls
    │   └── RemoteError                     the method raised, in the other process
    ├── ProgramError (ValueError)           a graph of nodes that cannot run
    ├── LaunchError (RuntimeError)          a program cannot be started
    ├── NodeFailedError (RuntimeError)      a node of a running program failed
    ├── RunTimeoutError (TimeoutError)      a program did not end in time
    ├── OpFailedError (RuntimeError)        an op of a dataflow failed
    │   └── IslandLostError                 its island, or what it made, is gone
    ├── CollectivesError (AssertionError)   a step sends other things than expected
    └── InvarianceError (AssertionError)    the answer depends on the number of replicas

    Preempted (SystemExit)      not an error: the run was asked to stop, and is saved

Each also inherits the builtin that it refines, so `except ValueError` works. A message
reads: "`argument` must <rule>, got <value>. <One remedy>."
"""

import concurrent.futures
import inspect
import numbers
from collections.abc import Callable
from typing import Any


class ReplicatorError(Exception):
    """Base of all errors that `replicator` raises itself."""


class ArgumentError(ReplicatorError, ValueError):
    """An argument breaks its rule."""


class BatchError(ReplicatorError, ValueError):
    """A batch does not fit the step, the replicas, or the batches before it."""


class StateError(ReplicatorError, ValueError):
    """A step returned a state whose structure, shapes or dtypes changed."""


class ReplicationError(ReplicatorError, ValueError):
    """A leaf of the state may differ between replicas (design law 2)."""


class PartitionError(ReplicatorError, ArithmeticError):
    """A partitioned step does not compute what one device does (design law 1)."""


class TooLateError(ReplicatorError, RuntimeError):
    """JAX already started with a setting that had to be chosen before."""


class InputTimeoutError(ReplicatorError, TimeoutError):
    """The input yielded no batch within its limit."""


class CheckpointError(ReplicatorError, RuntimeError):
    """A checkpoint, or the directory that holds them, cannot be written or read."""


class BucketError(CheckpointError):
    """A bucket is not there, refused us, or did not answer to the end."""


class CheckpointInUseError(ReplicatorError, RuntimeError):
    """Another run writes to the same directory, of checkpoints or of records."""


class CheckpointMismatchError(ReplicatorError, ValueError):
    """A checkpoint holds another state, or a format of a newer version."""


class _ErrorOfStep(ReplicatorError):
    def __init__(
        self, message: str, *, step: int | None = None, leaf: str | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.leaf = leaf


class NonFiniteError(_ErrorOfStep, FloatingPointError):
    """A batch or a metric holds NaN or infinity.

    Attributes:
      step: Step at which it was found; None for a batch that no step has used.
      leaf: Name of the metric that holds it.
    """


class SpikeError(_ErrorOfStep, ArithmeticError):
    """A metric left the range that it had before.

    Attributes:
      step: Step at which it was found.
      leaf: Name of the metric.
    """


class ReplicaMismatchError(_ErrorOfStep, ArithmeticError):
    """Devices hold different bits of a leaf that must be equal on all of them.

    Attributes:
      step: Step after which it was found.
      leaf: Path of the leaf in the state.
    """


class DeviceMemoryError(ReplicatorError, MemoryError):
    """A step needs more memory than a device has."""


class RpcError(ReplicatorError, RuntimeError):
    """A call to another process failed."""


class EncodeError(RpcError, TypeError):
    """A value, or a part of it that the message names, cannot be sent."""


class DecodeError(RpcError, ValueError):
    """The received bytes are not a valid message."""


class MessageTooLargeError(RpcError, ValueError):
    """A message is past its limit; nothing of it was sent."""


class AuthenticationError(RpcError, PermissionError):
    """A peer did not prove, in time, that it belongs to the program."""


class AddressInUseError(RpcError, OSError):
    """Another server listens at the address."""


class ConnectionLostError(RpcError, ConnectionError):
    """The other end of a connection is gone."""


class CallTimeoutError(RpcError, TimeoutError):
    """No answer came within the deadline of a call."""


class CallCancelledError(RpcError, concurrent.futures.CancelledError):
    """The caller gave the call up."""


class ServerStoppedError(RpcError):
    """The server takes no more calls."""


class RemoteError(RpcError):
    """A method raised in the other process.

    The exception is also of the type that was raised there, if that is a builtin or a
    registered one: `except ValueError` works across processes.

    Attributes:
      type_name: Name of the type that was raised.
      remote_traceback: Traceback in the other process, as text.
      server: Label of the server.
    """

    def __init__(
        self,
        message: str,
        *,
        type_name: str = "",
        remote_traceback: str = "",
        server: str = "",
    ) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback
        self.server = server


class ProgramError(ReplicatorError, ValueError):
    """A graph of nodes cannot run; nothing was started."""


class LaunchError(ReplicatorError, RuntimeError):
    """A program, or one of its workers, cannot be started."""


class NodeFailedError(ReplicatorError, RuntimeError):
    """A node of a running program failed.

    Attributes:
      node: Name of the worker.
    """

    def __init__(self, message: str, *, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class OpFailedError(ReplicatorError, RuntimeError):
    """An op of a dataflow failed: `op`, on `island`, called in the user's `line`."""

    op = island = line = ""


class IslandLostError(OpFailedError):
    """An op failed with its island, or what is asked for was lost with `island`."""


class RunTimeoutError(ReplicatorError, TimeoutError):
    """A program, or the nodes that were waited for, did not end in time."""


class DistributedError(ReplicatorError, RuntimeError):
    """The processes of a run cannot meet, or one of them has left."""


class DistributedTimeoutError(DistributedError, TimeoutError):
    """A process did not arrive in time where the others waited for it."""


class Preempted(SystemExit):
    """The run was asked to stop, and is saved: the program ends with `code`.

    Not a `ReplicatorError`: handlers of those go on, and this ends the program.
    `signal` is the name of the signal, `step` the last step, which is saved.
    """

    def __init__(self, code: int, *, signal: str, step: int) -> None:
        super().__init__(code)
        self.signal = signal
        self.step = step


def check_count(
    name: str, value: int, remedy: str = "Use 1.", *, least: int = 1
) -> None:
    """Refuse what is no whole number of at least `least`; the error names `remedy`."""
    check_whole(name, value)
    if value < least:
        raise ArgumentError(f"`{name}` must be at least {least}, got {value}. {remedy}")


def check_counts(owner: object, *names: str) -> None:
    """Refuse fields that are neither None nor counts; make integers Python's."""
    for name in names:
        if (value := getattr(owner, name)) is not None:
            check_count(name, value)
            object.__setattr__(owner, name, int(value))


def check_whole(name: str, value: object) -> None:
    """Refuse what is no whole number of Python or NumPy, by an `ArgumentError`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        # The environment and command lines bring strings with a number in them.
        meant = int(value) if isinstance(value, str) and value.isdecimal() else 1
        raise ArgumentError(
            f"`{name}` must be a whole number, got {value!r}. Use {meant}."
        )


def check_number(name: str, value: Any) -> None:
    """Refuse an argument that is neither a number nor an array of one."""
    is_one = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    if isinstance(value, bool) or not is_one:
        raise ArgumentError(
            f"`{name}` must be a number, got {value!r}. Pass an `int` or a `float`."
        )


def check_positive(name: str, value: float, remedy: str) -> None:
    """Refuse what is not a number above 0, as NaN is not; the error names `remedy`."""
    check_number(name, value)
    if not value > 0:
        raise ArgumentError(f"`{name}` must be above 0, got {value}. {remedy}")


def check_text(name: str, value: object) -> None:
    """Refuse an argument that is not a string by an `ArgumentError`."""
    if not isinstance(value, str):
        raise ArgumentError(f"`{name}` must be a string, got {value!r}. Pass a `str`.")


def check_word(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of `choices`, by an `ArgumentError`."""
    if value not in choices:
        raise ArgumentError(
            f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}. "
            "Use one of these."
        )


def check_not_async(name: str, function: Any) -> None:
    """Refuse an `async def` by an `ArgumentError`: it would never be awaited."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    called = inspect.getattr_static(type(function), "__call__", None)
    if any(is_kind(each) for is_kind in kinds for each in (function, called)):
        raise ArgumentError(
            f"`{name}` must be a plain function, got `async def` "
            f"{getattr(function, '__qualname__', function)}. Make it a `def` that runs "
            "what it awaits by `asyncio.run(...)`."
        )


def check_flags(**flags: object) -> None:
    """Refuse arguments that are neither True nor False, by an `ArgumentError`."""
    for name, value in flags.items():
        if value not in (True, False):
            raise ArgumentError(
                f"`{name}` must be True or False, got {value!r}. Pass one of these."
            )


def check_function(name: str, value: Any, *accepted: str) -> None:
    """Refuse an argument that cannot be called, or not with the arguments it will get.

    Args:
      name: Name of the argument.
      value: The argument.
      accepted: Possible parameter lists, such as "state, batch"; any by default.

    Raises:
      ArgumentError: It cannot be called like that.
    """
    if not callable(value):
        raise ArgumentError(
            f"`{name}` must be a function, got {type(value).__name__}. Pass the "
            "function itself."
        )
    if accepted and not any(takes(value, way.count(",") + 1) for way in accepted):
        raise ArgumentError(
            f"`{name}` must take {' or '.join(f'({way})' for way in accepted)}, got "
            f"({', '.join(inspect.signature(value).parameters)}). Write "
            f"`def {name}({accepted[0]})`."
        )


def takes(function: Callable[..., object], count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments.

    >>> takes(lambda state, batch: batch, 2)
    True
    """
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some C functions show no signature
        return True
    return True


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse what is neither None nor of the class `kind`, by an `ArgumentError`."""
    if value is not None and not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ArgumentError(
            f"`{name}` must be {article} `{kind.__name__}`, got {value!r}. Write "
            f"`{kind.__name__}(...)`."
        )


class CollectivesError(ReplicatorError, AssertionError):
    """A step has other collectives than its test expects."""


class InvarianceError(ReplicatorError, AssertionError):
    """A step gives another answer on another number of replicas (design law 1)."""

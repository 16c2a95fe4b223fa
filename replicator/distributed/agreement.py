"""Exchange a small value among all processes of a run, and agree: with a barrier.

Host-side only, over the coordination service's key-value store: nothing is compiled and
no device waits. Each process stores its value, waits at a barrier, and reads all. The
barrier fails in all processes alike, so they also agree that one is missing.

With one process each function answers at once.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from replicator.base.types import PyTree
from replicator.distributed.coordination import (
    CoordinationClient,
    ServiceError,
    coordination_client,
    process_count,
    process_index,
)
from replicator.distributed.hosts import describe_processes
from replicator.errors import (
    ArgumentError,
    DistributedError,
    DistributedTimeoutError,
    check_number,
    check_text,
)

Json: TypeAlias = (
    "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
)
"""Values that processes may exchange: those of JSON."""

DEFAULT_TIMEOUT_S = 600.0

_ROOT = "replicator/agreement/"
# The service checks once a second for barriers that timed out; our own bound ends the
# wait only if the service itself is gone.
_SERVICE_GRACE_S = 10.0

_calls: Counter[str] = Counter()
# Guards `_calls`; not held while a call waits. Two threads may exchange at a time,
# under names of their own: the loop's, and the one that saves.
_calls_lock = threading.Lock()


def exchange(
    name: str, value: Json, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[PyTree]:
    """Return the value of every process under `name`, in process order.

    All processes must call it with the same names in the same order.

    Args:
      name: Name of the exchange: letters, digits and `_ . / -`.
      value: Value of this process, small and of JSON's types; tuples become lists.
      timeout_s: Longest wait for the others.

    Returns:
      One value per process; `[value]` where there is one process.

    Raises:
      ArgumentError: `name` or `value` breaks its rule.
      DistributedTimeoutError: A process did not come in time; the error names it.
      DistributedError: The coordination service failed otherwise.

    >>> exchange("newest-step", 40)
    [40]
    """
    encoded = _encode(name, value)
    check_number("timeout_s", timeout_s)
    client = coordination_client()
    if client is None:
        return [json.loads(encoded)]
    with _calls_lock:
        _calls[name] += 1
        call = _calls[name]
    return _exchange(client, name, call, encoded, timeout_s)


def any_process(name: str, flag: bool, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """Return whether `flag` is true in any process; the same answer in all.

    Args:
      name: Name of the exchange, as in `exchange`.
      flag: Flag of this process.
      timeout_s: How long to wait for the others.

    Raises:
      DistributedTimeoutError: A process did not come in time; the error names it.
      DistributedError: The coordination service failed otherwise.

    >>> any_process("out-of-data", False)  # True on all if it is True on one
    False
    """
    return any(exchange(name, bool(flag), timeout_s=timeout_s))


def barrier(name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Wait until every process has called it.

    Args:
      name: Name of the barrier, as in `exchange`.
      timeout_s: How long to wait for the others.

    Raises:
      DistributedTimeoutError: A process did not come in time; the error names it.
      DistributedError: The coordination service failed otherwise.

    >>> barrier("data-is-unpacked")
    """
    exchange(name, None, timeout_s=timeout_s)


def first_odd(values: Sequence[Json]) -> tuple[int, int] | None:
    """Return a process whose value differs from most, and one of those.

    Args:
      values: Value of each process.

    >>> first_odd([3, 3, 4])
    (2, 0)
    """
    common = max(values, key=values.count)
    odd = [process for process, value in enumerate(values) if value != common]
    return (odd[0], values.index(common)) if odd else None


def _encode(name: str, value: Json) -> str:
    check_text("name", name)
    if not re.fullmatch(r"[A-Za-z0-9_./-]+", name):
        raise ArgumentError(
            f"`name` must be letters, digits and `_ . / -`, got {name!r}. Use "
            "`newest-step`."
        )
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"`value` must be of JSON's types, got {value!r} for `{name}`. Convert it "
            "to numbers, strings, lists and dicts."
        ) from error


def _exchange(
    client: CoordinationClient, name: str, call: int, encoded: str, timeout_s: float
) -> list[PyTree]:
    own = process_index()
    # "#" is in no name: a name's keys are never below another name's.
    directory = f"{_ROOT}{name}#{call}/"
    try:
        client.key_value_set(f"{directory}{own}", encoded)
        _wait_for_all(client, f"{_ROOT}{name}", timeout_s)
        values = _read(client, directory)
        if call > 1:
            # All have entered this call, so all have read the values of the last one.
            client.key_value_delete(f"{_ROOT}{name}#{call - 1}/{own}")
    except (ServiceError, TimeoutError) as error:
        raise _explain(client, name, directory, timeout_s, error) from error
    return [json.loads(values[process]) for process in range(process_count())]


def _wait_for_all(
    client: CoordinationClient, barrier_id: str, timeout_s: float
) -> None:
    """Wait at a barrier in a thread: the caller still handles signals."""
    failures: list[Exception] = []
    done = threading.Event()

    def wait() -> None:
        try:
            client.wait_at_barrier(barrier_id, max(1, round(timeout_s * 1000)))
        except ServiceError as error:
            failures.append(error)
        finally:
            done.set()

    # Ends with the barrier; a daemon, as a service that is gone never ends it.
    threading.Thread(target=wait, name="replicator-agreement", daemon=True).start()
    if not done.wait(timeout_s + _SERVICE_GRACE_S):
        raise TimeoutError("the coordination service does not answer")
    if failures:
        raise failures[0]


def _read(client: CoordinationClient, directory: str) -> dict[int, str]:
    """Return the values of one call, by process."""
    pairs = client.key_value_dir_get(directory)
    return {int(key.rpartition("/")[2]): value for key, value in pairs}


def _explain(
    client: CoordinationClient,
    name: str,
    directory: str,
    timeout_s: float,
    error: Exception,
) -> DistributedError:
    """Return an error that names missing processes, and the call where they wait."""
    if isinstance(error, TimeoutError):
        return DistributedTimeoutError(
            f"`{name}` must be agreed on by all processes, but process 0, which "
            f"serves it, did not answer for {timeout_s:g} s. See why it stands."
        )
    try:
        arrived = _read(client, directory)
        missing = [p for p in range(process_count()) if p not in arrived]
        elsewhere = _waiting_elsewhere(client, directory, missing)
        names = describe_processes(missing)
    except ServiceError:
        missing, elsewhere, names = [], "", ""
    if "DEADLINE_EXCEEDED" not in str(error):
        return DistributedError(
            f"`{name}` must be agreed on by all processes, but one has died or left: "
            f"{str(error).splitlines()[0]}"
        )
    if not missing:
        return DistributedTimeoutError(
            f"`{name}` must be reached by all processes within {timeout_s:g} s, but "
            f"process {process_index()} came when the others had given up. See what "
            "it did before."
        )
    return DistributedTimeoutError(
        f"`{name}` must be reached by all processes within {timeout_s:g} s, but "
        f"{names} did not come.{elsewhere} See what they do instead."
    )


def _waiting_elsewhere(
    client: CoordinationClient, directory: str, missing: list[int]
) -> str:
    """Name the other call at which a missing process waits, the usual bug."""
    came: dict[str, set[int]] = {}
    for key, _ in client.key_value_dir_get(_ROOT):
        call, _, process = key.rpartition("/")
        came.setdefault(call + "/", set()).add(int(process))
    for call, processes in came.items():
        here = processes & set(missing)
        if call != directory and here and len(processes) < process_count():
            name = call.removeprefix(_ROOT).rpartition("#")[0]
            return f" Process {min(here)} waits at `{name}`."
    return ""

"""Attacks of a process of the program, by the arguments of every method of the library.

Each kind of value is put in the place of each argument of each method of a service: the
server must answer soon, take little memory, and serve others meanwhile and afterwards.
"""

import contextlib
import functools
import itertools
import json
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rpc_attack.attack import (
    LONG_S,
    hold,
    memory_bytes,
    processor_s,
    within,
)
from benchmarks.rpc_attack.offered import BATCH, CALLS, ROWS
from benchmarks.rpc_attack.services import (
    QUICK_S,
    Call,
    Offered,
    say,
    use_rendezvous,
)
from replicator.launchpad_bridge.trajectories.table import Cut
from replicator.rpc.client.client import statistics
from replicator.rpc.protocols import MessageKind

_CROWD = 1_100
_STUCK_S = 8 * LONG_S
_FAR = 1 << 30
_OWN = [(name, {"a": 1}) for name in ("~hello", "~methods", "~statistics")]
_SERVICES = {**CALLS, "courier": _OWN}


# What is put in the place of arguments.


def _ranges() -> list[Any]:
    many = range(20_000_000)
    return [many, [many], {"a": many}, (many, many)]


def _counts() -> list[Any]:
    return [
        *([0.0] * 70_000, ["a"] * 70_000, {f"{n}": 0 for n in range(20_000)}),
        *(10**400, 1 << 70, float("nan"), -1.0, float("inf")),
    ]


def _empty_rows() -> list[Any]:
    shapes = [(1_000_000_000, 0), (0, 10**15), (2, 10**12, 0)]
    arrays = [np.zeros(shape, kind) for shape in shapes for kind in (bool, np.float32)]
    # Of no bytes, too: NumPy's copies have a byte, or four, of each.
    kinds = [np.dtype(kind) for kind in ("S0", "U0", "V0")]
    arrays += [np.ndarray((2, 1 << 28), kind, buffer=b"") for kind in kinds]
    return [*arrays, *({"reward": array} for array in arrays)]


def _deep_trees() -> list[Any]:
    leaf, tree = np.zeros((2, 3), np.float32), {}
    deep: Any = leaf
    for _ in range(50):
        deep = {"a": deep, "b": [leaf]}
    for _ in range(50):
        tree = {"a": tree, "b": ()}
    return [deep, tree, [()] * 50_000, {f"{n}": leaf for n in range(5_000)}]


def _long_names() -> list[Any]:
    leaf = np.zeros((2, 3), np.float32)
    name = "x" * 4_000_000
    return [
        *(name, name.encode(), bytes(16 << 20), {name: leaf}),
        {name[:200_000]: [leaf] * 2_000},
        [f"{name[:1_000]}{n}" for n in range(4_000)],
    ]


_VALUES: dict[str, Callable[[], list[Any]]] = {
    "ranges": _ranges,
    "counts": _counts,
    "empty_rows": _empty_rows,
    "deep_trees": _deep_trees,
    "long_names": _long_names,
}


def _put(offered: Offered, *, kind: str, service: str) -> None:
    """Put values of a kind in the place of each argument of each method."""
    with offered.grows_little(), offered.asking(service) as ask:
        for value in _VALUES[kind]():
            for method, good in _SERVICES[service]:
                for name in [*good, "no_argument"]:
                    found = ask((method, good | {name: value}))
                    is_refused = found != MessageKind.REPLY or kind != "ranges"
                    hold(is_refused or service == "courier", f"`{name}` is a range")
                ask((method, {}), [value])
        if kind == "long_names" and service in ("queue", "turns", "replay", "learner"):
            for number in range(_CROWD):
                wrong = {"actor": f"{number}" * 50_000, "version": -1}
                ask(("insert", {"trajectories": ROWS} | wrong))


# Waiting.

_FAR_TURN = dict(CALLS["turns"])["insert"] | {"number": _FAR, "version": _FAR}
_CROWDS: dict[str, Call] = {
    "turns": ("insert", _FAR_TURN),
    "learner": ("get_variables", {"version": _FAR, "timeout_s": 1e6}),
    "inference": ("act", dict(CALLS["inference"])["act"]),
    "variables": ("get", {"version": _FAR, "timeout_s": 1e6}),
    "cacher": ("get", {"version": _FAR, "timeout_s": 1e6}),
    "registry": ("find", {"planned": "unix:nobody", "timeout_s": 1e6}),
}


@contextlib.contextmanager
def _crowding(offered: Offered, service: str, call: Call, number: int = _CROWD):
    """Have so many calls of one client wait."""
    method, kwargs = call
    with contextlib.closing(offered.member(service)) as member:
        for call_id in range(number):
            member.send(
                MessageKind.CALL,
                call_id,
                [method, None, kwargs, None],
                timeout_s=LONG_S,
            )
        time.sleep(number / _CROWD)  # until all have their places
        yield


def _crowd(offered: Offered, *, service: str) -> None:
    """Let calls of one client wait for what does not come."""
    with offered.grows_little(), _crowding(offered, service, _CROWDS[service]):
        offered.check()
    with offered.client(service) as client:
        gone = within(LONG_S, lambda: statistics(client).running == 0)
        is_bounded = service in ("cacher", "registry")  # by a minute
        hold(gone or is_bounded, "calls of who is gone wait on")


def _crowd_of_inserts(offered: Offered) -> None:
    """Let inserts wait for room: the learner, who makes it, must get in."""
    insert = ("insert", {"trajectories": ROWS, "actor": "a", "version": 0})
    with _crowding(offered, "queue", insert):
        _takes_soon(offered, _CROWD // 10)


def _crowd_of_clients(offered: Offered) -> None:
    """The same of twelve clients at once."""
    insert = ("insert", {"trajectories": ROWS, "actor": "a", "version": 0})
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(_crowding(offered, "queue", insert, 200))
        _takes_soon(offered, 1)


def _takes_soon(offered: Offered, number: int) -> None:
    """Be the learner, and take so many batches.

    How soon is counted in processor time of the server: it serves the crowd first if it
    takes much, and others may use this machine as well.
    """
    pid = offered.process.pid
    with offered.client("queue", timeout_s=_STUCK_S) as queue:
        for _ in range(number):
            before_s = processor_s(pid)
            found = queue.take(BATCH, timeout_s=_STUCK_S)
            took_s = processor_s(pid) - before_s
            told = f"it waited for {took_s:.1f} s of the server's processor"
            hold(found is not None and took_s < QUICK_S, told)


# Of another group.

_STRANGERS: dict[str, list[Call]] = {
    "turns": [
        ("turn", {"actor": "stranger"}),
        ("insert", {"trajectories": ROWS, "actor": "a", "version": 0, "number": 0}),
        ("begin", {"cut": Cut(batch=0, snapshots={"stranger": None})}),
        ("begin", {"cut": Cut(batch=0, snapshots={}, order={"lag": 9})}),
        ("begin", {"cut": Cut(batch=_FAR, snapshots=range(20_000_000))}),  # type: ignore[arg-type]
        ("begin", {"cut": Cut(batch=0, snapshots={}, order=range(20_000_000))}),  # type: ignore[arg-type]
        ("begin", {"cut": Cut(batch=1j, snapshots={"actor/0": 5})}),  # type: ignore[arg-type,dict-item]
    ],
    "learner": [
        ("share", {"process": 1, "number": 0, "timeout_s": 1e6}),
        ("share", {"process": _FAR, "number": 0, "timeout_s": 1e6}),
        ("run", {}),
        ("insert", {"trajectories": ROWS, "actor": "a", "version": _FAR << 1}),
    ],
    "inference": [("run", {}), ("refresh", {})],
    "variables": [
        ("publish", {"version": 9, "values": {}}),
        ("wait_for", {"version": _FAR, "timeout_s": 1e6}),
        ("get", {"names": ["strange"], "timeout_s": 0.0}),
    ],
    "actor": [("run", {})],
}


def _strangers(offered: Offered, *, service: str) -> None:
    """Call what is for others, or as somebody of another group."""
    with offered.grows_little(), offered.asking(service) as ask:
        for call in _STRANGERS[service]:
            kind = ask(call)
            hold(
                kind != MessageKind.REPLY,
                f"`{call[0]}` took {[*call[1].items()]!r:.100}",
            )


def _rendezvous(offered: Offered) -> None:
    """Greet process 0 of a group with what no process of it says."""
    port = offered.place("rendezvous")
    good = {"process_id": 1, "num_processes": 2, "host": "x", "patience_s": 1.0}
    good |= {"clock_s": 1.0, "has_tls": False}
    bad = [1e999, float("nan"), -1, 10**300, "x" * 900, [[]], None, {"a": 1}, True]
    with offered.grows_little():
        for name, value in itertools.product(good, bad):
            with contextlib.suppress(OSError):
                say(port, json.dumps(good | {name: value}).encode() + b"\n", 0.05)
        for line in (b"[" * 1000 + b"\n", b"x" * (1 << 20), b"{}\n", b"\n" * 999):
            with contextlib.suppress(OSError):
                say(port, line, 0.05)
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    place = ("127.0.0.1", port)
                    stack.enter_context(socket.create_connection(place, LONG_S))
            use_rendezvous(offered)


def _no_memory(offered: Offered) -> None:
    """Be the first to insert, what there is no memory for: others must be able to."""
    offered.renew()
    wide = {"reward": np.zeros((1, 1 << 23), np.float32)}  # 32 MiB in each of 32 rows
    pid = offered.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_AS)
    held = memory_bytes(pid, "VmSize")
    resource.prlimit(pid, resource.RLIMIT_AS, (held + (512 << 20), limits[1]))
    try:
        call = ("insert", {"trajectories": wide, "actor": "a", "version": 0})
        with offered.asking("queue") as ask:
            hold(ask(call) != MessageKind.REPLY, "there was memory for it")
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, limits)


def _snapshots(offered: Offered) -> None:
    """Have a table keep a large snapshot with each turn."""
    offered.renew()
    good = dict(CALLS["turns"])["insert"]
    with offered.asking("turns") as ask:
        for number in range(4):
            said = {"version": number // 2, "number": number}
            found = ask(("insert", good | said | {"snapshot": bytes(40 << 20)}))
            hold(found != MessageKind.REPLY, f"turn {number} is kept")


def _forms(offered: Offered) -> None:
    """Have a policy compiled for as many shapes as there are."""
    act, found = dict(CALLS["inference"])["act"], None
    offered.check()  # what others ask for is compiled by then, and stays so
    with offered.grows_little(), offered.asking("inference") as ask:
        for size in range(3, 100):
            first, place = np.ones(size, bool), np.ones((size, 3), np.float32)
            found = ask(
                ("act", act | {"first": first, "observation": {"place": place}})
            )
        hold(found != MessageKind.REPLY, "all are compiled")


def _sets_of_names(offered: Offered) -> None:
    """Ask a cacher for more than it may keep, each time with other arguments."""
    with offered.grows_little(), offered.asking("cacher") as ask:
        for number in range(40):
            ask(("get", {"names": ["x" * 4_000_000, f"{number}"]}))


Attack = Callable[[Offered], None]


def _attacks() -> dict[str, Attack]:
    found: dict[str, Attack] = {"no_memory_for_rows": _no_memory}
    for kind, service in itertools.product(_VALUES, _SERVICES):
        put = functools.partial(_put, kind=kind, service=service)
        found[f"{kind}_for_{service}"] = put
    for service in _CROWDS:
        crowd = functools.partial(_crowd, service=service)
        found[f"waiting_crowd_at_{service}"] = crowd
    for service in _STRANGERS:
        strangers = functools.partial(_strangers, service=service)
        found[f"strangers_at_{service}"] = strangers
    found["waiting_inserts"] = _crowd_of_inserts
    found["waiting_inserts_of_clients"] = _crowd_of_clients
    found["rendezvous_of_others"] = _rendezvous
    found["snapshots_for_turns"] = _snapshots
    found["many_forms_for_inference"] = _forms
    found["many_calls_of_a_cacher"] = _sets_of_names
    return found


ATTACKS: dict[str, Attack] = _attacks()

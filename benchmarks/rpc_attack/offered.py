"""Serve every object of the library that a network can call: `... .offered`.

One program, in this process, whose one node has a learner that runs, tables, the
central inference, variables, a cacher before these, a registry of addresses, an actor,
a keeper of copies, and a rendezvous that begins anew. The line that it writes says
where, as JSON; it ends with its input. `CALLS` is what may be asked of each.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicator.launchpad_bridge as lp
from replicator.base.host.fake_devices import fake_devices
from replicator.checkpoint.copies.keeper import VARIABLE, serve_keeper
from replicator.controller.islands.in_process import described
from replicator.controller.islands.server import IslandService
from replicator.distributed.clusters import Cluster
from replicator.distributed.meeting.server import serve as serve_rendezvous
from replicator.distributed.processes.ports import free_port
from replicator.errors import DistributedError
from replicator.launchpad_bridge.acting import InferenceServer
from replicator.launchpad_bridge.addresses import address_books
from replicator.launchpad_bridge.learner.learner import ReplicatedLearner
from replicator.launchpad_bridge.learner.options import LearnerOptions, params_of
from replicator.launchpad_bridge.learner.published import PublishedVariables
from replicator.launchpad_bridge.nodes.cacher_node import Cacher, CacherNode
from replicator.rpc.client.client import Client
from replicator.rpc.server.server import Server
from replicator.training.options import RunOptions

ROWS = {"reward": np.ones((2, 3), np.float32)}
BATCH = 4
_INSERT: dict[str, Any] = {"trajectories": ROWS, "actor": "actor/0", "version": 0}
_TAKE: dict[str, Any] = {
    "count": BATCH,
    "oldest": None,
    "newest": None,
    "timeout_s": 0.0,
}
_ACT: dict[str, Any] = {
    "observation": {"place": np.ones((2, 3), np.float32)},
    "first": np.ones(2, bool),
    "core": (),
    "key": np.zeros(2, np.uint32),
    "place": np.zeros(2, np.int32),
}
_GET: dict[str, Any] = {"names": ["params"], "newer_than": 0, "timeout_s": 0.0}
_GET_VERSION: dict[str, Any] = {"version": 0, "timeout_s": 0.0}
_TABLE = [("take", _TAKE), ("begin", {"cut": None}), ("statistics", {})]
_COPY: dict[str, Any] = {"line": "b", "process": 0, "step": 1}
_OF: dict[str, Any] = {"session": "a"}
_JOIN: dict[str, Any] = _OF | {"name": "island0", "peers": {}, "lost_after_s": 9.0}
_DELIVERED: dict[str, Any] = _OF | {"run": 0, "value": 0, "sender": 0}
_DELIVERED |= {"shards": [[], []], "error": None}
_INSERT_ALL = _INSERT | {"number": 0, "snapshot": b"", "episodes": [1.0]}

CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "queue": [("insert", _INSERT_ALL), ("turn", {"actor": "actor/0"}), *_TABLE],
    "turns": [("insert", _INSERT_ALL), ("turn", {"actor": "actor/0"}), *_TABLE],
    "replay": [
        ("insert", _INSERT_ALL | {"priorities": [1.0, 2.0]}),
        ("turn", {"actor": "actor/0"}),
        ("update_priorities", {"keys": np.zeros(2, np.int64), "values": [1.0, 2.0]}),
        ("save", {}),
        *_TABLE,
    ],
    "learner": [
        ("insert", _INSERT_ALL),
        ("turn", {"actor": "actor/0"}),
        ("get_variables", _GET),
        ("get_variables", _GET_VERSION),
        ("statistics", {}),
        ("save", {"timeout_s": 0.0}),
        ("share", {"process": 1, "number": 0, "timeout_s": 0.0}),
    ],
    "inference": [("act", _ACT), ("get_version", {}), ("statistics", {})],
    "variables": [("get", _GET), ("get", _GET_VERSION)],
    "cacher": [("get", _GET)],
    "registry": [
        ("publish", {"planned": "unix:a", "address": "unix:b"}),
        ("find", {"planned": "unix:a", "timeout_s": 0.0}),
    ],
    "actor": [("statistics", {})],
    "keeper": [
        ("take_over", {"run": "a", "before": "", "line": "b"}),
        ("begin", _COPY | {"num_bytes": 8, "last": -1}),
        ("add", _COPY | {"data": [np.zeros(8, np.uint8)]}),
        ("complete", _COPY | {"tree": {"about": {}, "pieces": []}}),
        ("held", {"line": "b"}),
        ("drop", {"line": "b", "above": 0}),
    ],
    "island": [
        ("describe", {}),
        ("join", _JOIN),
        ("load", _OF | {"number": 0, "about": {}, "program": b""}),
        ("take", _OF | {"number": 0, "items": []}),
        ("deliver", _DELIVERED),
        ("reports", _OF | {"wait_s": 0.0}),
        ("read", _OF | {"keys": []}),
        ("leave", {"session": "another"}),
    ],
    "pieces": [
        ("offer_pieces", {"name": "b/0/1"}),
        ("read_pieces", {"name": "b/0/1", "parts": [[0, 0, 8]]}),
    ],
}
"""Calls of each service, with a good value for every argument."""


def step_fn(state: Any, rows: Any) -> Any:
    """Learn nothing, from what actors insert."""
    loss = jnp.mean(rows["reward"])
    return {"params": state["params"]}, {"loss": loss}


def init_fn(key: Any) -> Any:
    """Return parameters."""
    return {"params": {"w": jax.random.normal(key, (3, 2))}}


def policy(variables: Any, observation: Any, first: Any, core: Any, key: Any) -> Any:
    """Draw an action."""
    logits = observation["place"] @ variables["params"]["w"]
    return jax.random.categorical(key, logits), {"logits": logits}, core


class _Registry:
    """The program's registry, in an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._held = address_books.AddressRegistry()

    def publish(self, planned: str, address: str) -> None:
        self._run(self._held.publish(planned, address))

    def find(self, planned: str, timeout_s: float) -> str | None:
        return self._run(self._held.find(planned, timeout_s))

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()


def _learner() -> ReplicatedLearner:
    options = LearnerOptions(
        step_fn=step_fn,
        batch_size=BATCH,
        replicas=1,
        processes=1,
        variables=params_of,
        max_policy_lag=None,
        fixed_lag=None,
        strategy=None,
        run=RunOptions(init_fn=init_fn, steps=None),
    )
    return ReplicatedLearner(options, table=lp.TrajectoryQueue(8 * BATCH))


def _turns() -> lp.TrajectoryTurns:
    actors = ["actor/0", "actor/1"]
    turns = lp.TrajectoryTurns(actors, batch_size=BATCH, rows_per_turn=2, lag=1)
    turns.begin(None)
    return turns


def _published() -> PublishedVariables:
    published = PublishedVariables()
    published.publish(1, {"params": {"w": np.ones((3, 2), np.float32)}})
    return published


def _actor(learner: Any) -> Any:
    environment: Any = types.SimpleNamespace(size=1)  # it is not run
    return lp.Actor(
        lambda index: environment,
        policy,
        lambda n: (),
        learner,
        index=0,
        unroll_length=3,
    )


def _island() -> IslandService:
    island = IslandService([described(jax.devices()[0], 1)])
    island.join(_JOIN["session"], _JOIN["name"], _JOIN["peers"], 3600.0)
    return island


def _meet(port: int) -> None:
    """Be process 0 of a group of two, over and over."""
    cluster = Cluster(
        kind="arguments",
        coordinator=f"127.0.0.1:{port}",
        num_processes=2,
        process_id=0,
    )
    while True:
        with contextlib.suppress(DistributedError):
            serve_rendezvous(cluster, address="127.0.0.1", timeout_s=3600)


def _serve(stack: contextlib.ExitStack, name: str, served: Any) -> str:
    """Serve an object as a `CourierNode` does, at a socket of its own."""
    size = getattr(type(served), "thread_pool_size", 16)
    if not isinstance(served, Cacher):
        server = Server(served, name=name, address="unix:", pool_size=size)
    else:
        server = Server(name=name, address="unix:", pool_size=size)
        for method in CacherNode.methods(None, served):  # type: ignore[arg-type]
            server.bind(method.name, method.function)
    stack.enter_context(server)
    return server.address


def offer() -> None:
    """Serve all, and learn, until the input ends."""
    learner, port = _learner(), free_port()
    inference = InferenceServer(policy, learner, batch_size=4)
    objects: dict[str, Any] = {
        "queue": lp.TrajectoryQueue(8 * BATCH),
        "turns": _turns(),
        "replay": lp.ReplayTable(8 * BATCH, sampler=lp.prioritised()),
        "learner": learner,
        "inference": inference,
        "variables": _published(),
        "registry": address_books.OfferedRegistry(_Registry()),
        "actor": _actor(learner),
        "island": _island(),
    }
    stop = lp.context.get_context().stop_program
    with contextlib.ExitStack() as stack:
        places = {name: _serve(stack, name, each) for name, each in objects.items()}
        cacher = Cacher(stack.enter_context(Client(places["variables"])), 3600, 7200)
        places["cacher"] = _serve(stack, "cacher", cacher)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        variables = stack.enter_context(serve_keeper(folder, most_bytes=1 << 20))
        places["keeper"] = places["pieces"] = variables[VARIABLE]
        for run in (learner.run, inference.run):
            threading.Thread(target=run, daemon=True).start()
        threading.Thread(target=_meet, args=[port], daemon=True).start()
        learner.get_variables()
        print(json.dumps(places | {"rendezvous": port}), flush=True)
        sys.stdin.read()
        stop()


def main() -> None:
    fake_devices(1)
    program = lp.Program("offered")
    program.add_node(lp.PyNode(offer), label="offer")
    with lp.launch(program, "threads") as run:
        run.wait()


if __name__ == "__main__":
    main()

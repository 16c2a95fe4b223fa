"""A small program that learns from actors, and is going to lose one of its processes.

Two actors guess drawn bits in counters, a table holds what they did, a learner of one
process or of two learns from it. Actors that take turns have no inference node, and
their table is a node of its own or in the learner; the others have both as nodes. A
replay table gets priorities back; without turns it is a node, and gives samples for two
updates at once.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
import replicator.launchpad_bridge as lp
from replicator.base.host.json_lines import append_line
from replicator.base.types import Key, PyTree
from replicator.hooks import Hook, MetricsEvent, StateEvent
from replicator.launchpad_bridge.acting.environments import Step, first_step
from replicator.launchpad_bridge.acting.snapshots import pack, unpack

STEPS, INTERVAL = 120, 10
"""Updates of a run, and from save to save."""
BATCH, UNROLL = 8, 4
NEW_ROWS, MIN_SIZE = 4, 4 * BATCH
"""Rows that come into a replay table of turns before each batch, and the first one."""
TABLE_FOLDER = "replay"
"""Where a replay table's rows, or its journal, lie."""
_ACTORS, _ENVIRONMENTS, _WIDTH, _LAG = 2, 2, 5, 1
_PRIORITY_LAG = 3
_SAVE_S = 0.5  # from save to save of a table without turns
_PACE_S = 0.02  # so that a moment between two updates can be met
_AGAIN = lp.Restart(attempts=3, backoff_s=0.1)
_TX = replicator.wrap_optimizer(optax.sgd(0.05, momentum=0.9))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Which program it is.

    Attributes:
      turns: Whether actors take turns, so that its bits are always the same.
      replays: Whether the table is a replay table.
      processes: Of the learner.
      own_table: Whether the table is a node of its own.
    """

    turns: bool
    processes: int
    own_table: bool
    replays: bool = False

    @property
    def table_label(self) -> str:
        """Name of the worker of a table that is a node."""
        return "replay" if self.replays else "queue"


class Counters:
    """Counters that begin anew after drawn numbers of steps; with snapshots."""

    size = _ENVIRONMENTS
    can_snapshot = True

    def reset(self, seed: int) -> Step:
        """Begin all of them."""
        self._draws = np.arange(self.size, dtype=np.uint32) + np.uint32(seed)
        self._count = np.zeros(self.size, np.int32)
        self._length = 2 + self._draw(8)
        self._step = first_step(self._place(), self.size)
        return self._step

    def step(self, actions: PyTree) -> Step:
        """Count on; the reward is 1 where the action is a drawn bit."""
        begins, draws, bits = self._step.last, self._draw(8), self._draw(2)
        self._count = np.where(begins, 0, self._count + 1).astype(np.int32)
        self._length = np.where(begins, 2 + draws, self._length)
        last = self._count == self._length
        self._step = Step(
            self._place(),
            (~begins & (actions == bits)).astype(np.float32),
            (~begins & ~last).astype(np.float32),
            begins,
            last,
        )
        return self._step

    def snapshot(self) -> bytes:
        """Return all that what follows depends on."""
        return pack([self._draws, self._count, self._length, list(self._step)])

    def restore(self, snapshot: bytes) -> Step:
        """Go back there."""
        self._draws, self._count, self._length, step = unpack(snapshot)
        self._step = Step(*step)
        return self._step

    def _draw(self, below: int) -> np.ndarray:
        self._draws = self._draws * np.uint32(1664525) + np.uint32(1013904223)
        return (self._draws >> np.uint32(16)) % np.uint32(below)

    def _place(self) -> np.ndarray:
        return np.eye(_WIDTH, dtype=np.float32)[self._count % _WIDTH]


def make_counters(index: int) -> Counters:
    """Make the environments of an actor."""
    del index
    return Counters()


def policy(
    variables: PyTree, observation: PyTree, first: Any, core: PyTree, key: Key
) -> tuple[PyTree, PyTree, PyTree]:
    """Draw from the logits of what is seen."""
    del first
    logits = observation @ variables["params"]["w"]
    action = jax.random.categorical(key, logits).astype(jnp.int32)
    return action, {"logits": logits}, core


def initial_core(size: int) -> tuple[()]:
    """Return that the policy remembers nothing."""
    del size
    return ()


def init_fn(key: Key) -> PyTree:
    """Return a state that counts its updates."""
    params = {"w": 0.1 * jax.random.normal(key, (_WIDTH, 2))}
    return {"params": params, "opt": _TX.init(params), "updates": jnp.int32(0)}


def loss_fn(params: PyTree, rows: PyTree) -> jax.Array:
    """Return the policy gradient's loss, against a baseline of a half."""
    logits = rows["seen"] @ params["w"]
    taken = jax.nn.one_hot(rows["action"], 2) * jax.nn.log_softmax(logits)
    return -jnp.mean(taken.sum(-1) * (rows["reward"] - 0.5))


def step_fn(state: PyTree, rows: PyTree) -> tuple[PyTree, PyTree]:
    """Move the parameters by each half of the times, in a scan, as PPO does."""

    def move(train: PyTree, half: PyTree) -> tuple[PyTree, jax.Array]:
        params, opt = train
        loss, grads = jax.value_and_grad(loss_fn)(params, half)
        updates, opt = _TX.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    rows = {
        "seen": rows["observation"][:, :-1],
        "action": rows["action"],
        "reward": rows["reward"],
    }
    halves = jax.tree.map(lambda leaf: jnp.stack(jnp.split(leaf, 2, axis=1)), rows)
    train = state["params"], state["opt"]
    (params, opt), losses = jax.lax.scan(move, train, halves)
    state = {"params": params, "opt": opt, "updates": state["updates"] + 1}
    return state, {"loss": losses.mean()}


def replay_step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Move the parameters by a sample; rows with reward get a larger priority."""
    state, metrics = step_fn(state, batch["trajectories"])
    priority = 0.1 + batch["trajectories"]["reward"].mean(1)
    return state, {**metrics, "priority": replicator.Concat(priority)}


def variables_of(state: PyTree) -> dict[str, PyTree]:
    """Return what actors get, and the count."""
    return {"params": state["params"], "updates": state["updates"]}


class NoteUpdates(Hook):
    """Writes a line for each update that is done, and for its policy lag.

    A line is written by one call, so a kill leaves whole lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_state(self, event: StateEvent) -> None:
        """Note an update once it is done; make room for a moment before the next."""
        jax.block_until_ready(event.state)
        self._write(what="update", step=event.step)
        time.sleep(_PACE_S)

    def on_metrics(self, event: MetricsEvent) -> None:
        """Note how many updates its trajectories had missed."""
        lag = float(event.metrics["policy_lag"])
        self._write(what="lag", step=event.step, lag=lag)

    def _write(self, **fields: Any) -> None:
        if jax.process_index():
            return
        attempt = lp.context.get_context().attempt
        line = {**fields, "attempt": attempt, "time_s": time.monotonic()}
        with open(self._path, "a+b", buffering=0) as file:
            append_line(file, line)


def build(shape: Shape, folder: Path) -> tuple[lp.Program, Any]:
    """Return a program, and the handle of its table if that is a node.

    Args:
      shape: Which.
      folder: Where `updates` are noted, and `checkpoints` and the table's lie.
    """
    program = lp.Program("doomed-learner")
    table_class, arguments, options = _table(shape, folder)
    table_handle = None
    if shape.own_table:
        with program.group(shape.table_label, restart=_AGAIN):
            table = table_handle = program.add_node(
                lp.CourierNode(table_class, *arguments, **options)
            )
    else:
        table = lp.Deferred(table_class, *arguments, **options)
    how = {"priority_lag": _PRIORITY_LAG} if shape.turns else {"samples_per_call": 2}
    returned = {"priorities": "priority", **how}
    learner_node = lp.ReplicatedLearnerNode(
        replay_step_fn if shape.replays else step_fn,
        init_fn,
        steps=STEPS,
        batch_size=BATCH,
        processes=shape.processes,
        variables=variables_of,
        table=table,
        fixed_lag=_LAG if shape.turns else None,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=INTERVAL,
        hooks=[NoteUpdates(folder / "updates")],
        display=False,
        **(returned if shape.replays else {}),
    )
    devices = {"JAX_NUM_CPU_DEVICES": str(2 // shape.processes)}
    resources = lp.Resources(env={"JAX_PLATFORMS": "cpu", **devices})
    with program.group("learner", resources=resources, restart=_AGAIN):
        learner = program.add_node(learner_node)
    _add_actors(program, shape, learner, table_handle)
    return program, table_handle


def _table(shape: Shape, folder: Path) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the class of the table, and its arguments."""
    if shape.turns and shape.replays:
        return (
            lp.ReplayTurns,
            ([f"actor/{index}" for index in range(_ACTORS)],),
            {
                "batch_size": BATCH,
                "new_rows_per_batch": NEW_ROWS,
                "rows_per_turn": _ENVIRONMENTS,
                "lag": _LAG,
                "capacity": 32 * BATCH,
                "min_size": MIN_SIZE,
                "sampler": lp.prioritised(0.6),
                "priority_lag": _PRIORITY_LAG,
                "checkpoint_dir": folder / TABLE_FOLDER,
            },
        )
    if shape.turns:
        actors = [f"actor/{index}" for index in range(_ACTORS)]
        order = {"batch_size": BATCH, "rows_per_turn": _ENVIRONMENTS, "lag": _LAG}
        return lp.TrajectoryTurns, (actors,), order
    if shape.replays:
        limiter = lp.RateLimiter(min_size=4 * BATCH, samples_per_insert=4, error=64)
        options = {
            "sampler": lp.prioritised(0.6),
            "limiter": limiter,
            "checkpoint_dir": folder / TABLE_FOLDER,
            "checkpoint_every_s": _SAVE_S,
        }
        return lp.ReplayTable, (32 * BATCH,), options
    return lp.TrajectoryQueue, (4 * BATCH,), {}


def _add_actors(program: lp.Program, shape: Shape, learner: Any, table: Any) -> None:
    inference = None
    if not shape.turns:
        node = lp.CourierNode(lp.InferenceServer, policy, learner, batch_size=_ACTORS)
        with program.group("inference", restart=_AGAIN):
            inference = program.add_node(node)
    with program.group("actor", restart=_AGAIN):
        for index in range(_ACTORS):
            node = lp.PyClassNode(
                lp.Actor,
                *(make_counters, policy, initial_core, learner),
                index=index,
                unroll_length=UNROLL,
                table=table,
                inference=inference,
                is_deterministic=shape.turns,
            )
            program.add_node(node)

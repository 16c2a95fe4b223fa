"""Bad input: each row is refused with its full message.

`docs/reference/errors.md` is this table. After a change here, `python -m
tests.test_errors` writes the document anew.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import os
import pathlib
import re
import tempfile
import traceback
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import replicator
import replicator.launchpad_bridge as lp
from benchmarks.runs.faulty_buckets import ENVIRONMENT, FaultyProxy
from replicator import controller, rpc, strategies, testing
from replicator.base.host.strict_json import strict_json
from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.checkpoint.buckets.bucket import Bucket
from replicator.checkpoint.buckets.url import parse_url
from replicator.checkpoint.snapshot import start_copy
from replicator.cli import launch as launch_command
from replicator.cli.look.plan import topologies_of
from replicator.cli.main import make_parser
from replicator.distributed.remote.hosts import Hosts
from replicator.distributed.remote.machine_file import read_hosts
from replicator.distributed.remote.remote_host import RemoteHost
from replicator.errors import (
    ArgumentError,
    BatchError,
    BucketError,
    CheckpointError,
    CheckpointMismatchError,
    CollectivesError,
    DeviceMemoryError,
    DistributedError,
    InvarianceError,
    IslandLostError,
    LaunchError,
    NodeFailedError,
    NonFiniteError,
    OpFailedError,
    PartitionError,
    ProgramError,
    ReplicaMismatchError,
    ReplicationError,
    RunTimeoutError,
    StateError,
    TooLateError,
    check_count,
)
from replicator.hooks import Callback, Hook, StateCallback, every
from replicator.launchpad_bridge.learner.lifted_step import lifted
from replicator.launchpad_bridge.learner.trajectory_batches import TrajectoryBatches
from replicator.launchpad_bridge.trajectories.table import (
    Cut,
    TableRestartedError,
    TrajectoryError,
)
from replicator.nnx import BatchNorm, params_of, value_and_grad
from replicator.options import Retention, Spikes
from replicator.strategies import Machine, Rule
from replicator.strategies.choose import Candidate, Search
from replicator.testing.faults import Injector, parse
from replicator.training.nonfinite.policy import BadNumber, RecoveryPolicy
from replicator.training.nonfinite.rollback import Recovery
from replicator.training.postmortem.bundle import read_bundle
from replicator.tuning.choosing.refusals import nothing_fits, too_many
from replicator.tuning.named import named_strategies
from replicator.tuning.problem import ProblemFile, at_small_sizes, problem_from
from replicator.writers import Multi
from tests.cut_wrongly import BATCH, centred, step_from
from tests.cut_wrongly import init_fn as init_cut
from tests.steps import (
    adam,
    apply,
    errors,
    gan_trainer,
    mlp_loss,
    norm_trainer,
    regression_batch,
    replicas,
    trainer,
    weighted_trainer,
)

FOLDERS = tempfile.TemporaryDirectory(prefix="errors-")
DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
LIBRARY = pathlib.Path(replicator.__file__).parent
# Headings of the document, by the folder of the library that raises.
PLACES = {
    "inputs": "The dataset and its batches",
    "collectives": "The step",
    "engine": "The step",
    "nnx": "Modules of flax",
    "strategies": "Strategies",
    "replicator.py": "Devices, and the arguments of a Replicator",
    "training": "A run",
    "hooks": "Hooks and writers",
    "writers": "Hooks and writers",
    "monitoring": "Records",
    "checkpoint": "Checkpoints",
    "controller": "Dataflows over islands",
    "distributed": "Several processes",
    "launchpad_bridge": "Programs of nodes",
    "rpc": "Calls between processes",
    "compat": "Code of the days of pmap",
    "testing": "Tests of a step",
    "tuning": "Plans and choices",
    "cli": "The command",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One bad input: what it is, what is done, and the error in full."""

    name: str
    provoke: Callable[[], object]
    kind: type[Exception]
    message: str


def sgd(rep):
    return rep.wrap_optimizer(optax.sgd(0.1))


def run(batches, *, make=trainer, steps=3, **arguments):
    """Train on eight replicas with `rep.run`."""
    rep = replicas(8)
    init_fn, step_fn = make(sgd(rep))
    return rep.run(
        step_fn, batches, init_fn=init_fn, steps=steps, display=False, **arguments
    )


def in_session(use, **options):
    """Open a session of one number, without a step or a dataset, and use it."""
    init_fn = options.pop("init_fn", lambda key: jnp.ones(()))
    options = {"init_fn": init_fn, "steps": 2, "display": False} | options
    with replicas(2).session(**options) as session:
        use(session)


def counting(session):
    """Compile a step that adds one to the number of `in_session`."""
    return session.compile(lambda state, batch: (state + 1, {"x": state}))


def turns_of(**options):
    """Make turns of two batches, each of which moves the state on."""

    def use(session):
        step, batches = counting(session), session.batches()
        for batch in batches:
            step(batch)
            session.after(step(next(batches)))

    in_session(use, **options)


def compiled_trainer(optimizer):
    """Train by a step that was compiled before."""
    init_fn, step_fn = trainer(optimizer)
    return init_fn, replicas(8).compile(step_fn)


def forgetful_trainer(kept):
    """Train, and return a part of the state as it came."""

    def make(_):
        optimizer = replicas(8).wrap_optimizer(adam())
        init_fn, step_fn = trainer(optimizer)

        def forgets(state, batch):
            after, metrics = step_fn(state, batch)
            return after | {kept: state[kept]}, metrics

        return init_fn, forgets

    return make


def lossy_trainer(optimizer):
    """Update by the loss."""
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        loss, _ = jax.value_and_grad(mlp_loss)(state["params"], batch)
        optimizer.update(loss, state["opt"], state["params"])
        return state, {}

    return init_fn, step_fn


LATE = []


def read_late(session):
    """Read the state that a hook has kept while the next turn is made."""
    step = counting(session)
    session.after(step(regression_batch()))
    step(regression_batch())
    return LATE[0].state


def ended_on_bad():
    """Leave a loop, that could go back, on a metric that is NaN."""

    def step_fn(state, batch):
        return state + 1, {"x": state * jnp.nan}

    in_session(
        lambda session: session.step(next(session.batches())),
        step_fn=step_fn,
        dataset=[regression_batch()],
        on_nonfinite="rollback",
        checkpoint_dir=folder(),
    )


FLIPPED = BadNumber(
    kind="mismatch",
    step=40,
    leaf="user/params/w",
    found="other bits on replica 3 (device 3, process 0, host tpu-7)",
)


def ended_on_flipped():
    """Leave a loop, that could go back, on a state with a flipped bit."""
    fault = parse("flip a bit in the state on replica 1 of 2 at step 1")
    in_session(
        lambda session: session.step(next(session.batches())),
        step_fn=lambda state, batch: (state + 1, {}),
        dataset=[regression_batch()],
        init_fn=lambda key: jnp.zeros(3),
        hooks=[Injector(fault)],
        check_replicas_every=100,
        on_mismatch="rollback",
        checkpoint_dir=folder(),
    )


def elsewhere(session):
    """Use a session in a thread that did not open it."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(lambda: session.after({})).result()


def compiled(make=trainer, *, batch=None, **options):
    """Call a compiled step once on eight replicas."""
    rep = replicas(8)
    init_fn, step_fn = make(sgd(rep))
    return rep.compile(step_fn, **options)(
        rep.init(init_fn), batch or regression_batch()
    )


def decayed(state, batch):
    with jax.numpy_dtype_promotion("standard"):
        return state | {"a": state["a"] * state["decay"]}, {}


def step_on(step_fn, state, batch=None):
    """Call `step_fn` once on eight replicas."""
    return replicas(8).compile(step_fn)(
        jax.tree.map(jnp.asarray, state), regression_batch() if batch is None else batch
    )


def changed(**leaves):
    """Return a good batch, then one in which some leaves are others."""
    return [regression_batch(), {**regression_batch(), **leaves}]


def reshuffled():
    """Go on with batches in another order than the run began with."""
    folder = tempfile.mkdtemp(dir=FOLDERS.name)
    for steps in (1, 2):
        batches = [regression_batch(seed=seed) for seed in (steps, 3 - steps)]
        run(iter(batches), steps=steps, checkpoint_dir=folder)


def of_another_size():
    """Go on with larger batches than the run began with."""
    folder = tempfile.mkdtemp(dir=FOLDERS.name)
    for steps in (1, 2):
        batches = [regression_batch(8 * steps, seed=seed) for seed in (1, 2)]
        run(batches, steps=steps, checkpoint_dir=folder)


def without(name):
    batch = regression_batch()
    del batch[name]
    return [regression_batch(), batch]


def with_nan():
    batch = regression_batch()
    batch["x"][5, 2] = np.nan
    return [batch]


def any_batch(optimizer):
    """Return a step that takes a batch of any structure."""
    init_fn, _ = trainer(optimizer)
    return init_fn, lambda state, batch: (
        state,
        {"x": jax.tree.leaves(batch)[0].mean()},
    )


def unwrapped(optimizer):
    return trainer(optax.sgd(0.1))


def reporting(own):
    """Return a trainer that reports `own(batch)`."""

    def make(optimizer):
        init_fn, step_fn = trainer(optimizer)
        return init_fn, lambda state, batch: (
            step_fn(state, batch)[0],
            {"own": own(batch)},
        )

    return make


def alone(optimizer):
    """Reduce in a branch that a replica takes by its own batch."""
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        def mean(leaf):
            return lax.pmean(leaf, "replica")

        b1 = lax.cond(
            batch["y"].sum() > 0, mean, lambda leaf: leaf, state["params"]["b1"]
        )
        return {**state, "params": {**state["params"], "b1": b1}}, {}

    return init_fn, step_fn


def summed_already(optimizer):
    """Return a `LocalSum` that is the sum of all replicas."""
    init_fn, _ = trainer(optimizer)

    def loss_fn(params, batch):
        total = lax.psum(errors(params, batch).sum(), "replica")
        return replicator.LocalSum(total, count=len(batch["y"]))

    def step_fn(state, batch):
        loss, grads = replicator.value_and_grad(loss_fn)(state["params"], batch)
        return apply(optimizer, state, grads, count=loss.weight), {}

    return init_fn, step_fn


def counting_all(optimizer):
    """Return a `LocalSum` whose count is that of all replicas."""
    init_fn, _ = trainer(optimizer)

    def loss_fn(params, batch):
        count = lax.psum((batch["y"] > 0).sum(), "replica")
        return replicator.LocalSum(errors(params, batch).sum(), count)

    def step_fn(state, batch):
        loss, grads = replicator.value_and_grad(loss_fn)(state["params"], batch)
        return apply(optimizer, state, grads, count=loss.weight), {}

    return init_fn, step_fn


def times_the_loss_of_all(optimizer):
    """Multiply each replica's own loss by the loss of all."""

    def loss_fn(params, batch):
        def local_sum(params):
            found = errors(params, batch)
            return replicator.LocalSum(found.sum(), len(found))

        return mlp_loss(params, batch) * replicator.global_loss(local_sum)(params)

    return trainer(optimizer, loss_fn)


def summing_gradients(optimizer):
    """Add gradients up over replicas, as code of the days of pmap may."""
    init_fn, _ = trainer(optimizer)

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        grads = lax.psum(grads, "replica")
        return apply(optimizer, state, grads), {}

    return init_fn, step_fn


def two_counts():
    """Give `update` a count beside gradients that bring theirs."""
    optimizer = replicas(1).wrap_optimizer(optax.sgd(0.1))
    total = replicator.LocalSum
    take = replicator.value_and_grad(lambda w: total(w, 1) + total(w, 2))
    _, grads = take(1.0)
    optimizer.update(grads, optimizer.init(jnp.ones(())), count=3)


def weighing_a_norm(optimizer):
    """Weigh gradients of a mean whose loss has a norm over all replicas."""
    init_fn, _ = trainer(optimizer)

    def loss_fn(params, batch):
        found = errors(params, batch)
        return (found / lax.pmean(found.mean(), "replica")).mean()

    def step_fn(state, batch):
        grads = jax.grad(loss_fn)(state["params"], batch)
        own = (batch["y"] > 0).sum().astype(jnp.float32)
        return apply(optimizer, state, grads, weight=own), {}

    return init_fn, step_fn


def swapped(optimizer):
    """Return a trainer that hands the optimizer its state first, then gradients."""
    init_fn, _ = trainer(optimizer)

    def step(state, batch):
        grads = jax.tree.map(jnp.ones_like, state["params"])
        optimizer.update(state["opt"], grads, state["params"])

    return init_fn, step


def dividing(optimizer):
    init_fn, step_fn = trainer(optimizer)

    def step(state, batch):
        after, metrics = step_fn(state, batch)
        return after, {"loss": metrics["loss"] / 0.0}

    return init_fn, step


def launched_alone():
    """Be one of two processes of `replicator launch`, and do not join."""
    told = {"REPLICATOR_NUM_PROCESSES": "2", "REPLICATOR_PROGRESS_FILE": "progress"}
    with pytest.MonkeyPatch.context() as patch:
        for name, word in told.items():
            patch.setenv(name, word)
        replicator.Replicator()


def machine_with(environment):
    """Return a machine's file with an environment of its only node."""
    path = folder() / "cluster.yml"
    ssh = {"all": {"python_venv": environment}}
    nodes = [{"address": "node1", "ssh_config": "all"}]
    path.write_text(json.dumps({"nodes": nodes, "ssh": ssh}))
    return str(path)


def launch_with(*words):
    """Run `replicator launch` in this process."""
    arguments = make_parser(["launch"]).parse_args(["launch", *words, "train.py"])
    launch_command.main(arguments)


def newer_checkpoints():
    """Return a directory with a checkpoint of a format to come."""
    directory = folder()
    with CheckpointStore(directory) as store:
        store.save(Snapshot(step=1, arrays={"w": np.ones(1)}))
    path = directory / f"{1:012d}" / "manifest.json"
    body = json.loads(path.read_text())["manifest"] | {"format": 3}
    signed = {"manifest": body, "crc32": zlib.crc32(strict_json(body).encode())}
    path.write_text(json.dumps(signed))
    return directory


def ask_bucket(status):
    """Ask for a bucket at a server that answers with a status, without credentials."""
    server = FaultyProxy(0)  # with no other server behind it
    server.disturb = lambda method, path: status
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(server):
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        Bucket(parse_url("checkpoint_dir", "s3://models/run")).require()


def folder(*names):
    """Make a directory with empty files in it, which goes away with this process."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="bad-", dir=FOLDERS.name))
    for name in names:
        (path / name).touch()
    return path


def of_another_model():
    """Return a directory with a checkpoint of something else in it."""
    directory = folder()
    with CheckpointStore(directory) as store:
        store.save(Snapshot(step=1, arrays={"w": np.zeros(3)}))
    return directory


class Remembering(Hook):
    """A hook with something to be saved."""

    def __init__(self, seen):
        self.seen = seen

    def __repr__(self):
        return "Remembering"

    def state_dict(self):
        return {"seen": self.seen}


def reduce(**arguments):
    """Call `all_reduce` in a step on eight replicas."""
    return step_on(
        lambda state, batch: (replicator.all_reduce(state, **arguments), {}), {"a": 1.0}
    )


def chained_gan():
    rep = replicas(8)
    parts = [
        rep.wrap_optimizer(optax.sgd(0.1), name=name)
        for name in ("generator", "critic")
    ]
    init_fn, step_fn = gan_trainer(*parts, simultaneous=False)
    return rep.compile(step_fn, accumulate=2)(rep.init(init_fn), regression_batch())


def history_by_step():
    rep = replicas(8)
    init_fn, step_fn = trainer(sgd(rep))

    def noting(state, batch):
        after, metrics = step_fn(state, batch)
        loss = lax.pmean(metrics["loss"], "replica")
        history = state["history"].at[state["step"]].set(loss)
        return after | {"history": history, "step": state["step"] + 1}, metrics

    first = rep.init(lambda key: init_fn(key) | {"history": jnp.zeros(9), "step": 0})
    return rep.compile(noting, accumulate=2)(first, regression_batch())


def ordered_norm():
    rep = replicas(8, reduction="ordered")
    init_fn, step_fn = norm_trainer(sgd(rep), lambda x: lax.pmean(x, "replica"))
    image = {"image": np.ones((8, 4, 4, 1), np.float32), "label": np.zeros(8, np.int32)}
    return rep.compile(step_fn)(rep.init(init_fn), image)


def cut_wrongly():
    rep = replicas(8, strategy=strategies.fsdp(whole_below_bytes=0))
    step = rep.compile(step_from(centred), check_first_updates=True)
    step(rep.init(init_cut), BATCH)


def synchronised(pattern="*", reduction="fast", devices_per_host=None, **words):
    rules = [strategies.Rule(pattern=pattern, **words)]
    strategy = strategies.data_parallel(rules, devices_per_host=devices_per_host)
    return replicas(8, strategy=strategy, reduction=reduction)


def compressed(form, **params):
    tx = synchronised(compress=form).wrap_optimizer(optax.sgd(1.0))
    return tx.init(params)


def other_tree(tx):
    return tx.update({"v": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))


def step_with_rules(wrapper=None, **words):
    rep = synchronised(compress="int8", **words)
    init_fn, step_fn = trainer((wrapper or rep).wrap_optimizer(optax.sgd(0.1)))
    rep.inspect(step_fn, init_fn, regression_batch())


def summed_loss():
    def loss_fn(params, batch):
        return ((batch["x"] @ params - batch["y"]) ** 2).sum()

    init_fn, step_fn = trainer(
        replicator.wrap_optimizer(optax.sgd(0.01)), loss_fn, lambda key: jnp.ones(4)
    )
    replicator.testing.assert_replica_invariant(
        step_fn,
        init_fn,
        regression_batch(),
        replicas=(1, 2),
        accumulate=(1,),
        at_steps=(0,),
    )


def donated_state():
    rep = replicas(8)
    init_fn, step_fn = trainer(sgd(rep))
    step, state = rep.compile(step_fn), rep.init(init_fn)
    step(state, regression_batch())
    return step(state, regression_batch())


def plain_step(state, batch):
    return state, {}


def keyed_step(key, step_fn=lambda state, batch, key: (state, {})):
    return replicas(8).compile(step_fn)({"a": 1.0}, regression_batch(), key)


def one_key_for_two_steps(key):
    step = replicas(8).compile(lambda state, batch, key: (state, {}), steps_per_call=2)
    return step({"a": 1.0}, {"x": np.ones((2, 8))}, key)


def squares(state, batch):
    return {"x": state["a"] * batch["y"] ** 2}


def evaluated(eval_fn, state=None):
    return replicas(8).evaluate(
        eval_fn, [regression_batch()], state=state or {"a": 1.0}
    )


def without_jit(call):
    with jax.disable_jit():
        call()


def scanning(optimizer):
    """Return a trainer that makes two updates in a `lax.scan`."""
    init_fn, step_fn = trainer(optimizer)

    def step(state, batch):
        return lax.scan(lambda state, _: step_fn(state, batch), state, None, length=2)

    return init_fn, step


def partly_accumulating():
    """Feed gradients of fewer parameters to an optimizer that accumulates."""
    optimizer = replicator.wrap_optimizer(optax.sgd(0.1), accumulate=2)
    state = optimizer.init({"w": jnp.ones(4), "slow": jnp.ones(4)})
    optimizer.update({"w": jnp.ones(4)}, state)


def counting_gradients(optimizer):
    """Return a trainer whose parameters hold integers."""

    def init_fn(key):
        params = {"w": jnp.ones(4), "n": jnp.zeros(3, jnp.int32)}
        return {"params": params, "opt": optimizer.init(params)}

    def step(state, batch):
        loss = lambda params: (batch["x"] @ params["w"]).mean()  # noqa: E731
        grads = jax.grad(loss, allow_int=True)(state["params"])
        return state | {"opt": optimizer.update(grads, state["opt"])[1]}, {}

    return init_fn, step


def norm_twice(optimizer):
    """Return a trainer that calls a norm for examples, and for their opposites."""

    def init_fn(key):
        norm = BatchNorm(4, rngs=nnx.Rngs(key))
        return {"norm": norm, "opt": optimizer.init(params_of(norm))}

    def step(state, batch):
        loss = lambda norm: (norm(batch["x"]) * norm(-batch["x"])).mean()  # noqa: E731
        (_, norm), grads = value_and_grad(loss)(state["norm"])
        _, opt = optimizer.update(grads, state["opt"], params_of(norm))
        return {"norm": norm, "opt": opt}, {}

    return init_fn, step


def by_example(optimizer):
    """Return a trainer that hands over the gradient of each example."""

    def init_fn(key):
        params = {"w": jnp.ones(4)}
        return {"params": params, "opt": optimizer.init(params)}

    def step(state, batch):
        loss = lambda params, x: x @ params["w"]  # noqa: E731
        grads = jax.vmap(jax.grad(loss), (None, 0))(state["params"], batch["x"])
        return apply(optimizer, state, grads), {}

    return init_fn, step


def own_leaf_without_axis():
    own = {"own": replicator.PerReplica(jnp.zeros(()))}
    return replicas(8).compile(lambda state, batch: (state, {}))(
        own, regression_batch()
    )


async def fetch():
    return 1


def program_of_groups():
    """Two groups of processes under one label."""
    program = lp.Program("training")
    for _ in range(2):
        program.add_node(lp.JaxProcesses(print, processes=2), label="learner")
    return program


def replay_table(**options):
    return lp.ReplayTable(64, **options)


def replay_turns(**options):
    sizes = {"batch_size": 4, "new_rows_per_batch": 2, "rows_per_turn": 1, "lag": 1}
    sizes |= {"capacity": 64, "checkpoint_dir": folder(), "seed": 0}
    return lp.ReplayTurns(["actor/0"], **sizes | options)


def begun_turns(order=None, **options):
    """A table of turns at its first batch, or one that goes on from batch 3."""
    table = replay_turns(**options)
    table.begin(order and Cut(batch=3, snapshots={"actor/0": None}, order=order))
    return table


def begun_order(**changes):
    """Settings of `replay_turns`, and another run's id."""
    return {**replay_turns()._order.to_json(), "journal": "0", **changes}


def one_replay_batch():
    """A replay table of turns with one batch given out."""
    table = begun_turns()
    for number in range(2):
        rows = {"reward": np.zeros((1, 3), np.float32)}
        table.insert(rows, actor="actor/0", version=0, number=number)
    table.take(4, timeout_s=60)
    return table


def learnt_by_priority(metrics):
    """Make an update of a learner whose priorities are the metric `error`."""
    functions = lifted(
        lambda key: {"a": jnp.ones(())},
        lambda state, rows: (state, metrics),
        lambda state: state,
        earlier=0,
        priorities="error",
    )
    version = np.zeros(16, np.int32)
    batch = {"trajectories": regression_batch(), "version": version}
    return run([batch], make=lambda optimizer: functions[:2], steps=1)


def priorities_of_a_queue():
    """Take a batch whose priorities would go back to a table that has no keys."""
    queue = lp.TrajectoryQueue(capacity=4)
    insert_rows(queue, 1)
    batches = TrajectoryBatches(
        queue,
        1,
        is_stopping=lambda: False,
        reached=lambda version, timeout_s: True,
        note_keys=print,
    )
    return next(batches)


def saved_rows(damaged=False):
    directory = folder()
    table = replay_table(checkpoint_dir=directory)
    insert_rows(table, 2)
    table.save()
    table._saves.close()
    if damaged:
        manifest = pathlib.Path(directory) / "table"
        manifest.write_bytes(manifest.read_bytes()[:-1] + b"!")
    return directory


def insert_rows(table, count, **options):
    reward = np.zeros((count, 3), np.float32)
    table.insert({"reward": reward}, actor="actor/0", version=0, **options)


def program_of(function, *args, name="training"):
    """Return a program of one node, its learner."""
    program = lp.Program(name)
    program.add_node(lp.PyNode(function, *args), label="learner")
    return program


def launched_twice():
    program = program_of(lp.wait_for_stop)
    with lp.launch(program):
        lp.launch(program)


def waited_for(*args, **options):
    """Wait for a program that ends only when it is asked to."""
    with lp.launch(program_of(lp.wait_for_stop)) as run:
        run.wait(*args, **options)


def partitioned(strategy, step_fn=None, *, init_fn=None):
    """Make one update under a strategy that partitions."""
    rep = replicas(8, strategy=strategy)
    plain_init, plain_step = trainer(optax.sgd(0.1))
    state = rep.init(init_fn or plain_init)
    return rep.compile(step_fn or plain_step)(state, regression_batch())


def inspected():
    """Inspect a step that adds up one number."""
    return replicas(8).inspect(
        lambda state, batch: (replicator.all_reduce(state), {}),
        {"n": np.float32(1)},
        regression_batch(),
    )


def chosen(**options):
    init_fn, step_fn = trainer(adam())
    replicator.choose(step_fn, init_fn, regression_batch(), **options)


def run_to_choose(**options):
    rep = replicas(8, strategy="auto")
    init_fn, step_fn = trainer(adam())
    data = [regression_batch()]
    rep.run(step_fn, data, init_fn=init_fn, display=False, **options)


def session_to_choose():
    rep = replicas(8, strategy="auto")
    rep.session(init_fn=lambda key: jnp.zeros(3))


def searched(memory_bytes=None, is_over=False, **fields):
    """Raise the error of a search that found nothing."""
    failed = Candidate(name="fsdp", strategy=FSDP, **fields)
    found = Search(candidates=(failed,), memory_bytes=memory_bytes, is_over=is_over)
    raise nothing_fits(found, lambda *_: "")


def too_much(asked, seconds, limit_s):
    raise too_many(asked, seconds, limit_s)


OPENED = []


def islands():
    OPENED.append(controller.local(islands=1, devices=2))
    return OPENED[-1]


@pytest.fixture(autouse=True)
def islands_are_closed():
    yield
    while OPENED:
        OPENED.pop().close()


def an_op(f=lambda x: x * 2, *specs, **options):
    pw = islands()
    return pw.fn(f, pw.slice(2), *specs, **options)


def dataflow(flow, **options):
    """Call a dataflow of one op, which it is given."""
    pw = islands()
    op = pw.fn(lambda x: x * 2, pw.slice(2), **options)
    return pw.program(lambda x: flow(op, x))(np.ones(2, np.float32))


PAIR = jax.ShapeDtypeStruct((2,), np.float32)


def host_op(result=PAIR):
    pw = islands()
    return pw.host(np.square, pw.slice(2), result)


def host_dataflow(transform, shape=(2,)):
    op = host_op()
    return OPENED[-1].program(transform(op))(np.ones(shape, np.float32))


LARGE = np.zeros(101 << 20, np.int8)


def closing_over_101_mib():
    pw = islands()
    op = pw.fn(lambda x: x + jnp.asarray(LARGE)[0], pw.slice(2))

    def flow(x):
        return op(x)

    return pw.program(flow)(np.ones(2, np.int8))


def traced_for_another_shape():
    pw = islands()
    op = pw.fn(lambda x: x * 2, pw.slice(2))
    return pw.program(op).dataflow(np.ones(2))(np.ones(3))


def one_future_twice():
    pw = islands()
    op = pw.fn(lambda x: x * 2, pw.slice(2), donate=(0,))
    future = op(np.ones(2))
    return pw.program(lambda x, y: (op(x), y * 2))(future, future)


def called_when_closed():
    with islands() as pw:
        op = pw.fn(lambda x: x * 2, pw.slice(2))
    return op(np.ones(2))


def pipeline(count=2, slices=2, microbatches=2, schedule="gpipe", **options):
    """Make a pipeline, and its first update of 4 examples."""
    pw = islands()
    stages = options.pop("stages", [lambda params, x: x * params["w"]] * count)
    loss = options.pop("loss", lambda y, _: y.mean())
    params = options.pop("params", [{"w": np.ones(1, np.float32)}] * count)
    x = options.pop("x", np.ones(4, np.float32))
    targets = options.pop("targets", None)
    axes, devices = options.pop("axes", None), options.pop("devices", 1)
    on = [pw.slice(devices, axes=axes) for _ in range(slices)]
    pipe = pw.pipeline(stages, loss, on, microbatches, schedule, **options)
    return pipe(pipe.init(params), x, targets)


def of_whole_numbers(params, x):
    return jnp.int32(x)


def in_another_order(change):
    """Return a schedule whose lists of ops are changed."""

    def schedule(stages, slices, microbatches):
        return change([list(ops) for ops in controller.gpipe(stages, slices, 2)])

    return schedule


def a_client_that_left(use):
    """Use a future and a function of a client after it left."""
    with islands().client("alice") as client:
        op = client.fn(lambda x: x * 2, client.slice(1))
        future = op(np.ones(2))
    return use(op, future)


def two_clients_of_one_name():
    pw = islands()
    kept = pw.client("alice")
    return pw.client(kept.name)


def a_closed_slice():
    pw = islands()
    on = pw.slice(1)
    op = pw.fn(lambda x: x * 2, on)
    on.close()
    return op(np.ones(2))


def larger_than_its_slice():
    pw = islands()
    double = pw.fn(lambda x: x * 2, pw.slice(1, memory_bytes=1024))
    return double(np.ones(1000, np.float32))


def closed_while_it_waits_for_memory():
    with islands() as pw:
        on = pw.slice(1, memory_bytes=1024)
        kept = pw.put(np.ones(200, np.float32), on)
        kept.result()
        waits = pw.put(np.ones(200, np.float32), on)
    return waits.result()


def called_back_where_it_is_connected_to():
    def op(x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((2,), x.dtype), x)

    with (
        controller.IslandServer("unix:", devices=jax.devices()[:1]) as server,
        controller.connect([server.address], lost_after_s=300) as pw,
    ):
        program = pw.program(pw.fn(op, pw.slice(1)))
        return program.dataflow(jax.ShapeDtypeStruct((2,), np.float32))


def checked_where_it_is_connected_to():
    with (
        controller.IslandServer("unix:", devices=jax.devices()[:1]) as server,
        controller.connect([server.address], lost_after_s=300) as pw,
    ):
        on = pw.slice(1)
        step = replicator.Replicator(devices=on.devices).compile(
            lambda state, batch: (state, {}), checks=frozenset()
        )
        return pw.fn(step, on)({"w": np.ones(2)}, {"x": np.ones(2)})


def read_when_closed():
    with (
        controller.IslandServer("unix:", devices=jax.devices()[:1]) as server,
        controller.connect([server.address], lost_after_s=300) as pw,
    ):
        future = pw.put(np.ones(2, np.float32), pw.slice(1))
    return future.result()


def connected_to_one_of_two():
    with _described(1, "a") as server:
        return controller.connect([server.address])


def connected_to_two_groups_as_one():
    with _described(0, "a") as first, _described(1, "b") as second:
        return controller.connect([[first.address, second.address]])


def _described(number, group):
    about = [jax.__version__, "cpu", number, [["cpu", 1, 0], ["cpu", 1, 1]], group]
    return rpc.Server().bind("describe", lambda: about)


def on_a_lost_island(use):
    """Use an op, its slice and a future of an island that was stopped."""
    with (
        controller.IslandServer("unix:", devices=jax.devices()[:1]) as server,
        controller.connect([server.address], lost_after_s=300) as pw,
    ):
        ones = np.ones(2, np.float32)
        op = pw.fn(lambda x: x * 2, pw.slice(1))
        future = op(ones)
        future.result()
        lost = pw.put(ones, op.slice)
        server.__exit__()
        with contextlib.suppress(IslandLostError):
            while True:
                op(ones).result()
        return use(pw, op, lost)


def sent_to_an_island(send):
    """Call a method of an island, of whom "a" is the controller."""
    island = controller.IslandServer("unix:", devices=jax.devices()[:1])._service
    island.join("a", "island0", {}, 300.0)
    try:
        return send(island)
    finally:
        island.leave("a")


FSDP = strategies.fsdp(whole_below_bytes=0)
OTHER_MODEL = strategies.variables_of({"params": {"kernel": np.zeros(8, np.float32)}})

ELSEWHERE = jax.device_put(
    np.ones(8, np.float32), NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
)

ROWS = [
    Row(
        "A global batch that does not divide over the replicas",
        lambda: compiled(batch=regression_batch(12)),
        BatchError,
        "`global_batch` must divide evenly over 8 replicas, got 12. Use 8 or 16.",
    ),
    Row(
        "The same, in a run",
        lambda: run([regression_batch(12)]),
        BatchError,
        "`global_batch` must divide evenly over 8 replicas, got 12 (batch 0). "
        "Use 8 or 16.",
    ),
    Row(
        "A global batch that does not divide into microbatches",
        lambda: compiled(batch=regression_batch(24), accumulate=2),
        BatchError,
        "`global_batch` must divide evenly over 8 replicas and 2 microbatches, got 24. "
        "Use 16 or 32.",
    ),
    Row(
        "Leaves of different lengths in a batch",
        lambda: compiled(batch={**regression_batch(), "y": np.ones(8, np.float32)}),
        BatchError,
        "`batch` must hold arrays that agree in their batch axis, axis 0, got "
        "`x` float32[16,4], `y` float32[8]. Give each leaf one row per example.",
    ),
    Row(
        "A shape that changes between batches",
        lambda: run(changed(x=np.ones((16, 5), np.float32))),
        BatchError,
        "`dataset` must yield `x` as float32[*,4] like its first batch, got "
        "float32[*,5] (batch 1). Cast, crop or pad it in the input.",
    ),
    Row(
        "A dtype that changes between batches",
        lambda: run(changed(y=np.ones(16, np.int32))),
        BatchError,
        "`dataset` must yield `y` as float32[*] like its first batch, got "
        "int32[*] (batch 1). Cast, crop or pad it in the input.",
    ),
    Row(
        "A structure that changes between batches",
        lambda: run(
            [regression_batch() | {"x": kind([np.ones(16)])} for kind in (list, tuple)],
            make=any_batch,
        ),
        BatchError,
        "`dataset` must yield the containers of its first batch every time, got "
        "PyTreeDef({'x': (*,), 'y': *}) instead of PyTreeDef({'x': [*], 'y': *}) "
        "(batch 1). Make all batches alike.",
    ),
    Row(
        "A missing key",
        lambda: run(without("y")),
        BatchError,
        "`dataset` must yield the leaves of its first batch every time, got no `y` "
        "(batch 1). Make all batches alike.",
    ),
    Row(
        "An extra key",
        lambda: run(changed(z=np.ones(16, np.float32))),
        BatchError,
        "`dataset` must yield the leaves of its first batch every time, got a new `z` "
        "(batch 1). Make all batches alike.",
    ),
    Row(
        "A batch that grows",
        lambda: run([regression_batch(8), regression_batch(16)]),
        BatchError,
        "`dataset` must yield at most the 8 examples of its first batch every time, "
        "got "
        "16 (batch 1). Let only the last batch of an epoch have another size, a "
        "smaller "
        "one.",
    ),
    Row(
        "NaN in a batch",
        lambda: run(with_nan()),
        NonFiniteError,
        "`dataset` must yield no NaN, got one in `x`, example 5 (batch 0). Clean that "
        "example, or pass `inputs=InputOptions(allow_nan=True)`.",
    ),
    Row(
        "NaN or infinity in a metric",
        lambda: run([regression_batch()], make=dividing),
        NonFiniteError,
        "`loss` must be finite, got inf at step 1. Look at the batch and the learning "
        'rate, or pass `on_nonfinite="ignore"`.',
    ),
    Row(
        "An object array",
        lambda: run([{"x": np.asarray([None, "a"] * 8, dtype=object)}]),
        BatchError,
        "`dataset` must yield arrays of numbers, got object[*] for `x` (batch 0). "
        "Encode it as a numeric array, or leave it out.",
    ),
    Row(
        "An object array, without a run",
        lambda: compiled(batch={"x": np.asarray([None, "a"] * 8, dtype=object)}),
        BatchError,
        "`batch` must hold arrays of numbers, got object[16] for `x`. "
        "Encode it as a numeric array, or leave it out.",
    ),
    Row(
        "A scalar in a batch",
        lambda: run([{**regression_batch(), "rate": np.float32(0.1)}]),
        BatchError,
        "`dataset` must yield leaves with a leading batch axis, got the scalar `rate` "
        "(batch 0). Repeat it for each example, or leave it out.",
    ),
    Row(
        "An empty dataset",
        lambda: run([]),
        BatchError,
        "`dataset` must yield at least one batch, got none. Look at its source, its "
        "filters and its batch size.",
    ),
    Row(
        "An empty batch",
        lambda: run([regression_batch(0)]),
        BatchError,
        "`dataset` must yield at least one example per batch, got 0 (batch 0). "
        "Leave empty batches out.",
    ),
    Row(
        "An empty batch, without a run",
        lambda: compiled(batch=regression_batch(0)),
        BatchError,
        "`global_batch` must divide evenly over 8 replicas, got 0. Use 8.",
    ),
    Row(
        "A dataset that ends early",
        lambda: run(iter([regression_batch()] * 2)),
        ArgumentError,
        "`dataset` must last for 3 steps, got its end after step 2. Repeat it, or pass "
        "`steps=None` to run until it ends.",
    ),
    Row(
        "One batch instead of a dataset",
        lambda: run(regression_batch()),
        ArgumentError,
        "`dataset` must yield batches, got one `dict`. Put it in a list to read it as "
        "one batch again and again.",
    ),
    Row(
        "An uneven last batch whose mask the step does not read",
        lambda: run([regression_batch(), regression_batch(10)]),
        BatchError,
        '`step_fn` must read `batch["mask"]` where a batch is padded, got 10 examples '
        "at batch 1 and gradients of `params/b1` computed without it. Weight the loss "
        "by it, or drop the remainder: `InputOptions(remainder='drop')`.",
    ),
    Row(
        "A shuffle without a seed in a run that goes on",
        reshuffled,
        BatchError,
        "`dataset` must yield again what the run read before, got another batch 0 of "
        "pass 0. Seed its shuffle in `input_fn(context)`, or take other examples: "
        '`inputs=InputOptions(reread="warn")`.',
    ),
    Row(
        "A step that returns another state structure",
        lambda: step_on(
            lambda state, batch: ({"a": state["a"]}, {}), {"a": 1.0, "b": 1.0}
        ),
        StateError,
        "`step_fn` must return a state of the structure, shapes and dtypes that it was "
        "given, got another: `b` is missing. Return every leaf as it came, updated.",
    ),
    Row(
        "A step that changes a shape of its state",
        lambda: step_on(lambda state, batch: ({"a": state["a"][None]}, {}), {"a": 1.0}),
        StateError,
        "`step_fn` must return a state of the structure, shapes and dtypes that it was "
        "given, got another: `a` is float32[1] instead of float32[]. Return every leaf "
        "as it came, updated.",
    ),
    Row(
        "A step that changes a dtype of its state",
        lambda: step_on(
            lambda state, batch: ({"a": state["a"].astype(jnp.bfloat16)}, {}),
            {"a": 1.0},
        ),
        StateError,
        "`step_fn` must return a state of the structure, shapes and dtypes that it was "
        "given, got another: `a` is bfloat16[] instead of float32[]. Return every leaf "
        "as it came, updated.",
    ),
    Row(
        "A number of Python in a first state beside half precision",
        lambda: step_on(decayed, {"a": jnp.ones(4, jnp.bfloat16), "decay": 0.99}),
        StateError,
        "`step_fn` must return a state of the structure, shapes and dtypes that it was "
        "given, got another: `a` is float32[4] instead of bfloat16[4]. `decay` is "
        "float32, as a number of Python is once it is state. Give it the dtype of its "
        "operands: `jnp.asarray(value, w.dtype)`.",
    ),
    Row(
        "A step that returns no metrics",
        lambda: step_on(lambda state, batch: state, {"a": 1.0}),
        StateError,
        "`step_fn` must return (state, metrics), got dict. Return an empty dict if "
        "there "
        "are no metrics.",
    ),
    Row(
        "Gradients that are not reduced",
        lambda: compiled(unwrapped),
        ReplicationError,
        "`params/b1` may differ between replicas: it was computed from the batch at "
        "train.py:12 in apply (`add`) and not reduced. So may 2 more. Reduce gradients "
        "with `rep.wrap_optimizer`, other values with `replicator.all_reduce`; declare "
        "a leaf that should differ with `PerReplica`, or assert what the proof cannot "
        "see with `replicator.assume_replicated`.",
    ),
    Row(
        "Gradients that are not reduced, in a run",
        lambda: run([regression_batch()], make=unwrapped),
        ReplicationError,
        "`params/b1` may differ between replicas: it was computed from the batch "
        "at "
        "train.py:12 in apply (`add`) and not reduced. So may 2 more. Reduce gradients "
        "with `rep.wrap_optimizer`, other values with `replicator.all_reduce`; declare "
        "a leaf that should differ with `PerReplica`, or assert what the proof cannot "
        "see with `replicator.assume_replicated`.",
    ),
    Row(
        "A collective that some replicas skip",
        lambda: compiled(alone),
        ReplicationError,
        "`psum` at train.py:12 in mean must be reached by all replicas, got a branch "
        "that may differ between them (it depends on the batch). Reduce the "
        "condition with `replicator.all_reduce` first.",
    ),
    Row(
        "A sum for a loss that is reduced already",
        lambda: compiled(summed_already),
        ReplicationError,
        "`loss_fn` must return the sum over this replica's own examples, got one that "
        "`psum` at train.py:12 in loss_fn reduced over replicas already. Return the "
        "local sum: the optimizer reduces.",
    ),
    Row(
        "A count of all examples behind a sum of one replica's",
        lambda: compiled(counting_all),
        ReplicationError,
        "`loss_fn` must return the count of this replica's own examples, got one that "
        "`psum` at train.py:12 in loss_fn reduced over replicas already. Return the "
        "local count: the optimizer reduces.",
    ),
    Row(
        "A loss of all replicas that is multiplied by one's own",
        lambda: compiled(times_the_loss_of_all),
        ReplicationError,
        "`global_loss` must be differentiated as a whole that is equal on all "
        "replicas, got parameters, or a loss around it, that may differ: they depend "
        "on the batch. Move all of the loss into the function that `global_loss` is "
        "given.",
    ),
    Row(
        "Gradients that are summed over replicas, not averaged",
        lambda: compiled(summing_gradients),
        ReplicationError,
        "`grads` must be a mean over replicas, got a sum: `psum` at train.py:12 in "
        "step_fn, with no division by the number of replicas or by a count of all "
        "examples. Pass the result of `jax.grad` to the wrapped optimizer, or write "
        "`lax.pmean(grads, 'replica')` or `lax.psum(grads, 'replica') / "
        "replicator.num_replicas()`.",
    ),
    Row(
        "A count beside gradients of several sums",
        two_counts,
        ArgumentError,
        "`count` must be left out with the gradients of several sums, got a weight or "
        "a count. Each of them brings its own.",
    ),
    Row(
        "A weight of each replica's own where gradients pass between them",
        lambda: compiled(weighing_a_norm),
        ReplicationError,
        "`weight` must be equal on all replicas where gradients pass between them, got "
        "one that may differ and gradients that `psum` at train.py:12 in loss_fn "
        "brings from other replicas. Take the gradient of a `LocalSum` by "
        "`replicator.value_and_grad`, and pass `update(..., count=n)`.",
    ),
    Row(
        "A `PerReplica` leaf without its replica axis",
        own_leaf_without_axis,
        ArgumentError,
        "`state` must hold a leading axis of 8 replicas at `own`, a `PerReplica` leaf, "
        "got float32[]. Give each replica its row, or make the state with "
        "`rep.init(init_fn)`.",
    ),
    Row(
        "A function in a state that is put",
        lambda: replicas(8).put({"tx": optax.sgd}),
        ArgumentError,
        "`state` must hold arrays and numbers, got a `function` at `tx`. Keep it out "
        "of the state.",
    ),
    Row(
        "No first state for a run",
        lambda: replicas(8).run(plain_step, [regression_batch()], steps=1),
        ArgumentError,
        "`init_fn` must be given, or `init_state`, got neither. Pass the function that "
        "returns the first state, which `step_fn` gets and returns:\n"
        "    def init_fn(key):\n"
        '        return {"params": init_params(key), "opt": optimizer.init(...)}',
    ),
    Row(
        "An endless dataset for one pass",
        lambda: run(itertools.cycle([regression_batch()]), steps=None),
        ArgumentError,
        "`dataset` must end where no `steps` are given, got `itertools.cycle`, which "
        "is endless. Pass `steps`, or one pass of the data.",
    ),
    Row(
        "Rows of different lengths",
        lambda: run([regression_batch() | {"ids": [[1, 2, 3], [4, 5]] * 8}]),
        BatchError,
        "`dataset` must hold lists of equal lengths, got 2 and 3 numbers for `ids` "
        "(batch 0). Pad them, or cut them, to one length.",
    ),
    Row(
        "Ids beyond 32 bits in a loop of one's own",
        lambda: step_on(
            plain_step, {"a": 1.0}, regression_batch() | {"id": np.arange(16) + 2**40}
        ),
        BatchError,
        "`batch` must hold `id` within the range of int32, got values from "
        "1099511627776 to 1099511627791. Set `jax_enable_x64`, or use smaller ids.",
    ),
    Row(
        "A compiled step in the place of a step",
        lambda: run([regression_batch()], make=compiled_trainer),
        ArgumentError,
        "`step_fn` must be the step of one replica, got one that is compiled. Pass the "
        "function itself.",
    ),
    Row(
        "Parameters that are returned without their update",
        lambda: run([regression_batch()], make=forgetful_trainer("params")),
        StateError,
        "`step_fn` must return `params/b1` with its update, got it as it came. Return "
        "`optax.apply_updates(params, updates)` in its place.",
    ),
    Row(
        "An optimizer's state that is returned as it was",
        lambda: run([regression_batch()], make=forgetful_trainer("opt")),
        StateError,
        "`step_fn` must return the new state of its optimizer, got `opt` as it came. "
        "Return `opt` of `updates, opt = optimizer.update(...)` there.",
    ),
    Row(
        "The loss in the place of its gradients",
        lambda: run([regression_batch()], make=lossy_trainer),
        ArgumentError,
        "`grads` must be a tree like the parameters, got float32[]. Pass the result of "
        "`jax.grad`, or the second one of `jax.value_and_grad`.",
    ),
    Row(
        "Two first states for a run",
        lambda: run([regression_batch()], init_state={"a": 1.0}),
        ArgumentError,
        "One of `init_fn` and `init_state` must be given, got both. Pass `init_fn`, "
        "or a state to go on from.",
    ),
    Row(
        "The number of a step in a loop of one's own",
        lambda: step_on(
            lambda state, batch: (state, {"n": replicator.step_number()}), {"a": 1.0}
        ),
        ArgumentError,
        "`step_number` must be called in a step of `rep.run`, got a call outside of "
        "one. In a loop of your own keep an int32 counter in the state, and add 1 in "
        "the step: it moves once per update.",
    ),
    Row(
        "A state that was donated to an earlier call",
        donated_state,
        ArgumentError,
        "`state` must be the one that the last call returned, got one that was "
        "donated (`params/b1`). Write `state, metrics = step(state, batch)`.",
    ),
    Row(
        "An unknown `op`",
        lambda: reduce(op="average"),
        ArgumentError,
        "`op` must be one of 'sum', 'mean', 'max', 'min', 'product', got 'average'. "
        "Use one of these.",
    ),
    Row(
        "An unknown `reduction` of `all_reduce`",
        lambda: reduce(reduction="exact"),
        ArgumentError,
        "`reduction` must be one of 'fast', 'ordered', got 'exact'. Use one of these.",
    ),
    Row(
        "An unknown `reduction` of a `Replicator`",
        lambda: replicas(8, reduction="exact"),
        ArgumentError,
        "`reduction` must be one of 'fast', 'ordered', got 'exact'. Use one of these.",
    ),
    Row(
        "A dead axis",
        lambda: reduce(axis_name="model"),
        ArgumentError,
        "`axis_name` must name a live axis, got the dead axis 'model' (bound by "
        "`shard_map` here: 'replica'). Pass the `axis_name` of the mesh that runs "
        "this.",
    ),
    Row(
        "A device count that does not exist",
        lambda: replicas(9),
        ArgumentError,
        "`num_replicas` must be between 1 and the 8 devices that JAX sees, got 9. For "
        "a "
        "try on one machine call `replicator.fake_devices(9)` before anything else.",
    ),
    Row(
        "No devices at all",
        lambda: replicas(0),
        ArgumentError,
        "`num_replicas` must be between 1 and the 8 devices that JAX sees, got 0. For "
        "a "
        "try on one machine call `replicator.fake_devices(1)` before anything else.",
    ),
    Row(
        "`fake_devices` too late",
        lambda: (jax.devices(), replicator.fake_devices(4)),
        TooLateError,
        "`fake_devices` must be called before JAX starts, got 4 when JAX already runs "
        "8 "
        "cpu device(s). Call it (or set REPLICATOR_FAKE_DEVICES=4) before the first "
        "array or `jax.devices()`; in a notebook, restart the kernel.",
    ),
    Row(
        "No fake devices",
        lambda: replicator.fake_devices(0),
        ArgumentError,
        "`count` must be at least 1, got 0. Use 8 to try data parallelism.",
    ),
    Row(
        "A step that wants a key and gets none",
        lambda: step_on(lambda state, batch, key: (state, {}), {"a": 1.0}),
        ArgumentError,
        "`key` must be given to a step whose `step_fn` takes one, got None. "
        "Call `step(state, batch, key)`.",
    ),
    Row(
        "One key for many steps",
        lambda: one_key_for_two_steps(jax.random.key(0)),
        ArgumentError,
        "`key` must hold 2 keys with `steps_per_call=2`, got key<fry>[]. Pass "
        "`jax.random.split(key, 2)`.",
    ),
    Row(
        "One key of the old kind for many steps",
        lambda: one_key_for_two_steps(jax.random.PRNGKey(0)),
        ArgumentError,
        "`key` must hold 2 keys with `steps_per_call=2`, got uint32[2]. Pass "
        "`jax.random.split(key, 2)`.",
    ),
    Row(
        "Many keys for one step",
        lambda: keyed_step(jax.random.split(jax.random.key(0), 2)),
        ArgumentError,
        "`key` must be one key, got key<fry>[2]. Pass one of them, and draw more in "
        "the step with `jax.random.split`.",
    ),
    Row(
        "Numbers for a key",
        lambda: keyed_step(jnp.ones(2)),
        ArgumentError,
        "`key` must be a random key, got float32[2]. Pass `jax.random.key(0)`.",
    ),
    Row(
        "A random key among the metrics",
        lambda: keyed_step(
            jax.random.key(0), lambda state, batch, key: (state, {"k": key})
        ),
        ArgumentError,
        "`step_fn` must return metrics of numbers, got key<fry>[] for `k`. Leave it "
        "out, or report `jax.random.key_data(key)` as `PerReplica`.",
    ),
    Row(
        "Random keys among the metrics of an evaluation",
        lambda: evaluated(
            lambda state, batch: {"k": jax.random.split(jax.random.key(0), 64)}
        ),
        ArgumentError,
        "`eval_fn` must return metrics of numbers, got key<fry>[64] for `k`. Leave it "
        "out, or report `jax.random.key_data(key)` as `PerReplica`.",
    ),
    Row(
        "Steps that are no multiple of `steps_per_call`",
        lambda: run([regression_batch()], steps=5, steps_per_call=2),
        ArgumentError,
        "`steps` must be a multiple of `steps_per_call`, got 5 for 2. Use 4 or 6.",
    ),
    Row(
        "Accumulation without a wrapped optimizer",
        lambda: compiled(unwrapped, accumulate=2),
        ArgumentError,
        "`accumulate` must be 1 for a step whose state holds no wrapped optimizer, got "
        "more. Wrap it with `rep.wrap_optimizer`.",
    ),
    Row(
        "Accumulation where a counter may count updates or microbatches",
        history_by_step,
        ArgumentError,
        "`accumulate` must be 1 where `step` of the returned state moves once per "
        "update and `history`, which reads it, with each microbatch, got more. Gate "
        "one: `jnp.where(replicator.is_last_microbatch(), new, old)`.",
    ),
    Row(
        "Accumulation where one update depends on another",
        chained_gan,
        ArgumentError,
        "`accumulate` must be 1 where gradients depend on an update in the same step, "
        "got those for `generator` after the update of `critic`. Take both gradients "
        "before the first update, or compile two steps.",
    ),
    Row(
        "A collective of the step's own under ordered reduction",
        ordered_norm,
        ArgumentError,
        "`reduction` must be 'fast' for a step with collectives of its own, got "
        "'ordered' and `psum` at train.py:12 in <lambda>. Drop the collective, or the "
        "promise of equal bits.",
    ),
    Row(
        "A step whose answer depends on the number of replicas",
        summed_loss,
        InvarianceError,
        "gradient of `params` must be the same on one replica and on 2 at 1 "
        "microbatches, got a difference of 5.0e-01 of its norm at step 0 (1.1e-05 "
        "is allowed). Look for sums over examples, `replica_id`, per-replica norm, or "
        "a "
        "loss that is not a mean.",
    ),
    Row(
        "A step that the compiler cuts wrongly",
        cut_wrongly,
        PartitionError,
        "`strategy` must give the answer of one device, got `seen` off by 6.8e-01 of "
        "its norm (1.1e-05 is allowed), under fsdp on 8 devices: the step was cut "
        "wrongly. Use another one; `replicator.testing.assert_replica_invariant("
        "step_fn, init_fn, batch, strategy=...)` checks one.",
    ),
    Row(
        "A checkpoint of another model",
        lambda: run([regression_batch()], checkpoint_dir=of_another_model()),
        CheckpointMismatchError,
        "The state must be that of the model that was saved at step 1, got another: "
        "`step` was not saved; `key` was not saved; `user/params/b1` was not saved; 4 "
        "more. Begin anew in another directory, or restore a part with "
        "`CheckpointStore.restore(..., only=...)`.",
    ),
    Row(
        "A directory of something else",
        lambda: run([regression_batch()], checkpoint_dir=folder("thesis.tex")),
        CheckpointError,
        "A directory of checkpoints must hold nothing else, got runs/a with "
        "`thesis.tex` in it. Save to a directory of its own.",
    ),
    Row(
        "A file for a directory",
        lambda: run([regression_batch()], checkpoint_dir=folder("file") / "file"),
        CheckpointError,
        "A directory of checkpoints must be writable, got `runs/a/file`: [Errno 17] "
        "File exists: 'runs/a/file'. Choose another, or change its permissions.",
    ),
    Row(
        "Checkpoints that are not there",
        lambda: CheckpointStore(folder() / "none").restore(),
        CheckpointError,
        "`directory` must be one that checkpoints were saved to, got runs/a/none, "
        "which is not a directory. Check the path.",
    ),
    Row(
        "Checkpoints that a newer version saved",
        lambda: CheckpointStore(newer_checkpoints()).restore(),
        CheckpointMismatchError,
        "The checkpoint of step 1 must have a format up to 2, got 3, of a newer "
        "replicator. Upgrade `jax-replicator`; nothing was changed.",
    ),
    Row(
        "Leaves whose names meet in a checkpoint",
        lambda: run(
            [regression_batch()],
            make=lambda _: (
                lambda key: collections.OrderedDict({1: key, "1": key}),
                lambda state, batch: (state, {}),
            ),
            checkpoint_dir=folder(),
        ),
        ArgumentError,
        "`arrays` must have one leaf at each path, got two at `user/1`. "
        "Give one of them another name.",
    ),
    Row(
        "A launched process that joined no group",
        launched_alone,
        DistributedError,
        "The group must be joined by each process that is named to be of it, "
        "got one of 2 that is alone. Call `replicator.distributed.initialize()` at "
        "the top of the script.",
    ),
    Row(
        "To evaluate, and not what",
        lambda: run([regression_batch()], eval_every=2),
        ArgumentError,
        "`eval_fn`, `eval_dataset` and `eval_every` must be given together, got no "
        "`eval_fn`. Pass it, or leave all out.",
    ),
    Row(
        "To go back, with nothing saved",
        lambda: run([regression_batch()], on_nonfinite="rollback"),
        ArgumentError,
        "`checkpoint_dir` must be given to go back to a checkpoint, got None. Pass it, "
        'or choose `on_nonfinite="skip"`.',
    ),
    Row(
        "To go back in what can be read once",
        lambda: run(
            iter([regression_batch()]),
            on_nonfinite="rollback",
            checkpoint_dir=folder(),
        ),
        ArgumentError,
        "`dataset` must be one that can be read again with `on_nonfinite='rollback'`, "
        "got `list_iterator`. Pass a list, a grain dataset or "
        "`input_fn(context)`.",
    ),
    Row(
        "An unknown way to treat NaN",
        lambda: run([regression_batch()], on_nonfinite="stop"),
        ArgumentError,
        "`on_nonfinite` must be one of 'raise', 'ignore', 'skip', 'rollback', got "
        "'stop'. Use one of these.",
    ),
    Row(
        "To go back from copies that differ, with nothing saved",
        lambda: run(
            [regression_batch()], check_replicas_every=1, on_mismatch="rollback"
        ),
        ArgumentError,
        "`checkpoint_dir` must be given to go back to a checkpoint, got None. Pass it, "
        'or choose `on_mismatch="raise"`.',
    ),
    Row(
        "To go back from copies that nothing compares",
        lambda: run([regression_batch()], on_mismatch="rollback"),
        ArgumentError,
        '`check_replicas_every` must be given with `on_mismatch="rollback"`, got None. '
        "Pass it, or leave `on_mismatch` out.",
    ),
    Row(
        "An unknown way to treat copies that differ",
        lambda: run([regression_batch()], on_mismatch="mend"),
        ArgumentError,
        "`on_mismatch` must be one of 'raise', 'rollback', got 'mend'. Use one of "
        "these.",
    ),
    Row(
        "Copies to compare where there are none",
        lambda: in_session(print, check_replicas_every=2),
        ArgumentError,
        "`check_replicas_every` must have arrays to compare, of which two devices hold "
        "copies, got none on 2 devices. Leave it out, or take a strategy that keeps "
        "copies.",
    ),
    Row(
        "A bit that flipped in one copy of a leaf",
        lambda: Recovery(RecoveryPolicy()).handle(FLIPPED),
        ReplicaMismatchError,
        "`user/params/w` must be equal on all devices that hold it, got other bits on "
        "replica 3 (device 3, process 0, host tpu-7) at step 40. Start again without "
        "that device: a saved run goes on from its last checkpoint.",
    ),
    Row(
        "A loop that was left where it had to go back from a flipped bit",
        lambda: ended_on_flipped(),
        ReplicaMismatchError,
        "`state` must be equal on all devices until the loop ends, got other bits at "
        "step 1. Start it again: it goes on from the last checkpoint, if there is one.",
    ),
    Row(
        "Spikes of what is not reported",
        lambda: run([regression_batch()], spikes=Spikes(metric="lost")),
        ArgumentError,
        "`metric` must be one that the step reports, got 'lost' and 'gradient_norm', "
        "'loss'. Use one of these.",
    ),
    Row(
        "The best checkpoints by a number that is nowhere",
        lambda: run(
            [regression_batch()],
            checkpoint_dir=folder(),
            retention=Retention(keep_best=1, metric="lost"),
        ),
        ArgumentError,
        "`metric` must be a number of the step or of the evaluation to rank by, got "
        "'lost' and 'gradient_norm', 'loss'. Use one of these.",
    ),
    Row(
        "A number for a `Retention`",
        lambda: run([regression_batch()], checkpoint_dir=folder(), retention=3),
        ArgumentError,
        "`retention` must be a `Retention`, got 3. Write `Retention(...)`.",
    ),
    Row(
        "A string instead of a `Follow`",
        lambda: run([regression_batch()], follow="loss"),
        ArgumentError,
        "`follow` must be a `Follow`, got 'loss'. Write `Follow(...)`.",
    ),
    Row(
        "A session that is not open",
        lambda: replicas(2).session(init_state=1.0, steps=1).steps_done,
        ArgumentError,
        "`session` must be open, got one that is not. Write `with rep.session(...) as "
        "session:`.",
    ),
    Row(
        "The result of a session before its end",
        lambda: in_session(lambda session: session.result),
        ArgumentError,
        "`session.result` must be read after the session, got one that has not ended. "
        "Leave its `with` block first.",
    ),
    Row(
        "A session without a step that is to make one",
        lambda: in_session(lambda session: session.step(regression_batch())),
        ArgumentError,
        "`step_fn` must be given for `session.step()`, got None. Pass it to "
        "`session`, or hand what your own steps return to `session.after()`.",
    ),
    Row(
        "An own step in a session that makes the steps",
        lambda: in_session(lambda session: session.after({}), step_fn=plain_step),
        ArgumentError,
        "`step_fn` must be left out for `session.after()`, got one. Call "
        "`session.step(batch)`, or leave it out.",
    ),
    Row(
        "Batches of a session without a dataset",
        lambda: in_session(lambda session: next(session.batches())),
        ArgumentError,
        "`dataset` must be given for `session.batches()`, got None. Pass it to "
        "`session`, or loop over `session.steps()`.",
    ),
    Row(
        "What needs the session's own step",
        lambda: in_session(print, on_nonfinite="skip"),
        ArgumentError,
        '`step_fn` must be given with `on_nonfinite="skip"`, got None. Leave '
        '`on_nonfinite="skip"` out, or let the session make the steps.',
    ),
    Row(
        "A session that is to go back without a dataset",
        lambda: in_session(print, on_nonfinite="rollback", checkpoint_dir=folder()),
        ArgumentError,
        "`step_fn` and `dataset` must be given to go back to a checkpoint, got None. "
        "Pass both, or leave `on_nonfinite` out.",
    ),
    Row(
        "A session that is to go back from spikes, without a step",
        lambda: in_session(
            print,
            spikes=Spikes(metric="loss", action="rollback"),
            checkpoint_dir=folder(),
        ),
        ArgumentError,
        "`step_fn` and `dataset` must be given to go back to a checkpoint, got None. "
        "Pass both, or leave `spikes` out.",
    ),
    Row(
        "Spikes that are to lead back, without checkpoints",
        lambda: in_session(print, spikes=Spikes(metric="loss", action="rollback")),
        ArgumentError,
        "`checkpoint_dir` must be given to go back to a checkpoint, got None. Pass it, "
        'or choose `Spikes(action="log")`.',
    ),
    Row(
        "A dataset that ends between two steps of an update",
        lambda: turns_of(dataset=[regression_batch()] * 3, steps=None),
        ArgumentError,
        "`dataset` must last until step 2 is done, got its end. Repeat it, or pass "
        "`steps`.",
    ),
    Row(
        "An update without `session.after()`",
        lambda: in_session(lambda session: counting(session)(regression_batch())),
        ArgumentError,
        "`session.after()` must be called for each update, got a step after step 0 "
        "without it. Call `session.after(metrics)` where an update is made.",
    ),
    Row(
        "A step behind the last",
        lambda: in_session(lambda session: [session.after({}) for _ in range(3)]),
        BatchError,
        "`steps` must leave a step to be made, got 2 that are all done. End the loop "
        "where `session.batches()` or `session.steps()` end.",
    ),
    Row(
        "Another state after an own step",
        lambda: in_session(
            lambda session: session.after({}, state={"w": jnp.ones(7)}),
            init_fn=lambda key: {"w": jnp.ones(())},
        ),
        StateError,
        "`state` must be of the structure, shapes and dtypes of the first state, got "
        "another: `w` is float32[7] instead of float32[]. Hand over every leaf, "
        "updated.",
    ),
    Row(
        "The state of an event in the midst of the next turn",
        lambda: in_session(
            read_late, hooks=[StateCallback(LATE.append, every(n_steps=1))]
        ),
        ArgumentError,
        "`event.state` must be read before the step after it, got step 2 begun for the "
        "state after step 1. Read it in `on_state`, and keep a copy.",
    ),
    Row(
        "A bad number that is found when the loop has ended",
        lambda: ended_on_bad(),
        NonFiniteError,
        "`metrics` must be finite until the loop ends, got a bad number at step 1. "
        "Look at its batch: there is no checkpoint from before it.",
    ),
    Row(
        "A session that is opened twice",
        lambda: in_session(lambda session: session.__enter__()),
        ArgumentError,
        "`session` must be closed to be opened, got an open one. Make another.",
    ),
    Row(
        "A session in another thread",
        lambda: in_session(elsewhere),
        ArgumentError,
        "`session` must be used in the thread that opened it, got another. Open it in "
        "this one.",
    ),
    Row(
        "Microbatches for a dataset that is not there",
        lambda: in_session(print, step_fn=plain_step, auto_microbatch=True),
        ArgumentError,
        "`dataset` must be given with `auto_microbatch`, got None. Pass it, or choose "
        "`accumulate`.",
    ),
    Row(
        "A string instead of the node of a program",
        lambda: in_session(print, node="learner"),
        ArgumentError,
        "`node` must be the node that the run is in, got 'learner'. Pass "
        "`lp.context.get_context()`.",
    ),
    Row(
        "A string instead of a seed",
        lambda: run([regression_batch()], seed="one"),
        ArgumentError,
        "`seed` must be a whole number of 64 bits, got 'one'. Use 0.",
    ),
    Row(
        "No step",
        lambda: replicas(8).compile(None),
        ArgumentError,
        "`step_fn` must be a function, got NoneType. Pass the function itself.",
    ),
    Row(
        "No step for a run",
        lambda: replicas(8).run(None, [regression_batch()], steps=3),
        ArgumentError,
        "`step_fn` must be a function, got NoneType. Pass the function itself.",
    ),
    Row(
        "No dataset for a run",
        lambda: run(None),
        ArgumentError,
        "`dataset` must be an iterable of batches or a callable, got NoneType. Pass "
        "the batches; use `rep.session` to take them from a queue.",
    ),
    Row(
        "A dataset for a function to evaluate",
        lambda: replicas(8).evaluate([regression_batch()], None, state={}),
        ArgumentError,
        "`eval_fn` must be a function, got list. Pass the function itself.",
    ),
    Row(
        "A function that makes an optimizer for the optimizer",
        lambda: replicas(8).wrap_optimizer(optax.adam),
        ArgumentError,
        "`tx` must be an optax transformation, got adam. Pass the result of its "
        "function: `optax.adam(1e-3)`.",
    ),
    Row(
        "A number for a loss scale",
        lambda: replicas(8).wrap_optimizer(optax.sgd(0.1), loss_scale=2.0),
        ArgumentError,
        "`loss_scale` must be a `DynamicLossScale`, got 2.0. Write "
        "`DynamicLossScale(...)`.",
    ),
    Row(
        "A schedule of half steps",
        lambda: every(n_steps=2.5),
        ArgumentError,
        "`n_steps` must be a whole number, got 2.5. Use 1.",
    ),
    Row(
        "Half a checkpoint to keep",
        lambda: Retention(keep_last=2.5),
        ArgumentError,
        "`keep_last` must be a whole number, got 2.5. Use 1.",
    ),
    Row(
        "A metric to rank by that is no name",
        lambda: Retention(keep_best=1, metric=3),
        ArgumentError,
        "`metric` must be a string, got 3. Pass a `str`.",
    ),
    Row(
        "A store in a number",
        lambda: CheckpointStore(3),
        ArgumentError,
        "`directory` must be a path, got 3. Pass a `str` or a `Path`.",
    ),
    Row(
        "A snapshot of no step",
        lambda: start_copy(Snapshot(step="3", arrays={"w": np.zeros(3)})),
        ArgumentError,
        "`step` must be a whole number, got '3'. Use 3.",
    ),
    Row(
        "No time for a step",
        lambda: run([regression_batch()], step_timeout=0),
        ArgumentError,
        "`step_timeout` must be above 0, got 0. Leave it out for ten times the "
        "median, or use `float('inf')`.",
    ),
    Row(
        "A trace of step 0",
        lambda: run([regression_batch()], profile=range(3), directory=folder()),
        ArgumentError,
        "`profile` must be a range of steps from 1 on, got range(0, 3). Write "
        "`range(100, 110)` for ten steps.",
    ),
    Row(
        "A trace of no steps",
        lambda: run([regression_batch()], profile=range(5, 5), directory=folder()),
        ArgumentError,
        "`profile` must be a range of steps from 1 on, got range(5, 5). Write "
        "`range(100, 110)` for ten steps.",
    ),
    Row(
        "A trace and no place for it",
        lambda: run([regression_batch()], profile=range(1, 3)),
        ArgumentError,
        "`directory` must be given to profile steps, got None. Pass it: traces go to "
        "`profile/` in it.",
    ),
    Row(
        "Half a step",
        lambda: run([regression_batch()], steps=2.5),
        ArgumentError,
        "`steps` must be a whole number, got 2.5. Pass an `int`, or `steps=None` to "
        "run until the input ends.",
    ),
    Row(
        "A function for a hook",
        lambda: run([regression_batch()], hooks=[len]),
        ArgumentError,
        "`hooks` must hold hooks only, got <built-in function len>. Subclass "
        "`replicator.hooks.Hook`, or wrap a function: `Callback(fn, "
        "every(n_steps=1))`.",
    ),
    Row(
        "A class for a hook",
        lambda: run([regression_batch()], hooks=[Hook]),
        ArgumentError,
        "`hooks` must hold hooks only, got the class `Hook`. Make one: `Hook(...)`.",
    ),
    Row(
        "One hook instead of a list",
        lambda: run([regression_batch()], hooks=Remembering([])),
        ArgumentError,
        "`hooks` must be a list of hooks, got Remembering. Put it in a list.",
    ),
    Row(
        "A hook whose state cannot be saved",
        lambda: run(
            [regression_batch()],
            hooks=[Remembering(np.zeros(2))],
            checkpoint_dir=folder(),
        ),
        ArgumentError,
        "`Remembering.state_dict` must return plain JSON, got another value: Object of "
        "type ndarray is not JSON serializable. Return finite numbers, strings, lists "
        "and dicts of them.",
    ),
    Row(
        "Two choices of microbatches",
        lambda: run([regression_batch()], auto_microbatch=True, accumulate=2),
        ArgumentError,
        "`accumulate` must be left out with `auto_microbatch`, got 2. Leave one of "
        "them out.",
    ),
    Row(
        "A string instead of a limit",
        lambda: replicator.options.Limits(step_s="3"),
        ArgumentError,
        "`step_s` must be a number, got '3'. Pass an `int` or a `float`.",
    ),
    Row(
        "A string instead of a time",
        lambda: run([regression_batch()], step_timeout="3"),
        ArgumentError,
        "`step_timeout` must be a number, got '3'. Pass an `int` or a `float`.",
    ),
    Row(
        "A string instead of patience",
        lambda: replicator.options.Follow(metric="loss", patience="3"),
        ArgumentError,
        "`patience` must be a whole number, got '3'. Use 3.",
    ),
    Row(
        "Nothing to follow",
        lambda: replicator.options.Follow(metric=None),
        ArgumentError,
        "`metric` must be a string, got None. Pass a `str`.",
    ),
    Row(
        "A string instead of a factor",
        lambda: replicator.options.Spikes(factor="3"),
        ArgumentError,
        "`factor` must be a number, got '3'. Pass an `int` or a `float`.",
    ),
    Row(
        "An unknown way to treat a spike",
        lambda: replicator.options.Spikes(action="stop"),
        ArgumentError,
        "`action` must be one of 'log', 'raise', 'rollback', got 'stop'. Use one of "
        "these.",
    ),
    Row(
        "A string instead of a decay",
        lambda: replicator.ema("0.9"),
        ArgumentError,
        "`decay` must be a number, got '0.9'. Pass an `int` or a `float`.",
    ),
    Row(
        "A string instead of a number of devices",
        lambda: replicator.fake_devices("8"),
        ArgumentError,
        "`count` must be a whole number, got '8'. Use 8.",
    ),
    Row(
        "An `init_fn` without `return`",
        lambda: replicas(8).init(lambda key: None),
        ArgumentError,
        "`init_fn` must return the state, got None. End it with `return`.",
    ),
    Row(
        "A metric of a step under a name of the run's own",
        lambda: in_session(lambda session: session.after({"eval/loss": 1.0})),
        ArgumentError,
        "`metrics` must leave names under `eval/` to the run, got `eval/loss`. Rename "
        "it.",
    ),
    Row(
        "A number for devices",
        lambda: replicator.Replicator(devices=4),
        ArgumentError,
        "`devices` must be a list of JAX's devices, got 4. Pass those that you mean: "
        "`jax.devices()[:4]`.",
    ),
    Row(
        "One device for two replicas",
        lambda: replicator.Replicator(devices=[jax.devices()[0]] * 2),
        ArgumentError,
        "`devices` must name each device once, got cpu:0 twice. Leave one out: a "
        "device runs one replica.",
    ),
    Row(
        "A number for a directory",
        lambda: run([regression_batch()], checkpoint_dir=3),
        ArgumentError,
        "`checkpoint_dir` must be a path, got 3. Pass a `str` or a `Path`.",
    ),
    Row(
        "Microbatches that the run is not told of",
        lambda: run([regression_batch()], inputs=replicator.InputOptions(accumulate=2)),
        ArgumentError,
        "`inputs` must leave `accumulate` to the run, got 2. Pass `accumulate=2` to "
        "`run` itself.",
    ),
    Row(
        "A bucket for a directory",
        lambda: run([regression_batch()], checkpoint_dir="az://bucket/a"),
        ArgumentError,
        "`checkpoint_dir` must be a path of a file system, got 'az://bucket/a'. Mount "
        "the bucket (on all hosts, with atomic renames), and name its folder.",
    ),
    Row(
        "A URL without a bucket",
        lambda: run([regression_batch()], checkpoint_dir="gs:///a"),
        ArgumentError,
        "`checkpoint_dir` must be a path, gs://bucket/path or s3://bucket/path, got "
        "'gs:///a'. Name the bucket and plain folders in it, no keys or options.",
    ),
    Row(
        "Records among checkpoints",
        lambda: run(
            [regression_batch()],
            directory="gs://models/run",
            checkpoint_dir="gs://models/run",
        ),
        ArgumentError,
        "`directory` must lie outside of `checkpoint_dir`, got gs://models/run and "
        "gs://models/run. Save to a folder in it: gs://models/run/checkpoints.",
    ),
    Row(
        "A bucket that is not there",
        lambda: ask_bucket("404"),
        BucketError,
        "`s3://models/run` must be in a bucket that is there, got none of that name "
        "(list of `s3://models/run`). Make it, or correct the URL.",
    ),
    Row(
        "A bucket without credentials",
        lambda: ask_bucket("403"),
        BucketError,
        "`s3://models/run` must be open to this process, got list of "
        "`s3://models/run` refused (`AWS_ACCESS_KEY_ID` is not set): "
        "PERMISSION_DENIED: AccessDenied: Access Denied. Give it credentials that may "
        "read, list, write and delete there.",
    ),
    Row(
        "A state larger than the disk",
        lambda: run(
            [regression_batch()],
            make=lambda _: (
                lambda key: jnp.zeros(1 << 50, jnp.int8),
                lambda state, batch: (state, {}),
            ),
            checkpoint_dir=folder(),
        ),
        ArgumentError,
        "`checkpoint_dir` must be on a disk with room for the state, got runs/a on one "
        "of 100 GiB for a state of 1.02e+03 TiB. Save to a larger one, or to a bucket.",
    ),
    Row(
        "A number for a choice of yes or no",
        lambda: run([regression_batch()], auto_microbatch=4),
        ArgumentError,
        "`auto_microbatch` must be True or False, got 4. Pass one of these.",
    ),
    Row(
        "A limit of memory that nothing would obey",
        lambda: run([regression_batch()], memory_limit_bytes=2**30),
        ArgumentError,
        "`memory_limit_bytes` must come with `auto_microbatch`, got 1073741824 "
        "without. Pass `auto_microbatch=True`, or leave it out.",
    ),
    Row(
        "Which checkpoints stay, and no place for them",
        lambda: run([regression_batch()], retention=Retention(keep_last=1)),
        ArgumentError,
        "`checkpoint_dir` must be given with `retention`, got None. Pass it, or leave "
        "`retention` out.",
    ),
    Row(
        "Copies in memory, without a launcher that holds them",
        lambda: run([regression_batch()], checkpoint_dir=folder(), memory_copy_every=5),
        ArgumentError,
        "`memory_copy_every` must be in a run under `replicator launch`, whose memory "
        "holds the copies, got none (REPLICATOR_KEEPER is not set). Start the script "
        "by `replicator launch`, or leave it out.",
    ),
    Row(
        "A copy of the state on a disk",
        lambda: run([regression_batch()], checkpoint_copy="disk"),
        ArgumentError,
        "`checkpoint_copy` must be one of 'device', 'host', got 'disk'. Use one of "
        "these.",
    ),
    Row(
        "Larger batches in a run that goes on",
        of_another_size,
        BatchError,
        "`dataset` must yield batches of 8 examples, with which the run was saved, got "
        "16. Go on with those, which any number of devices may share, or begin anew in "
        "another `checkpoint_dir`.",
    ),
    Row(
        "A form of batches that was not stated",
        lambda: run(
            [regression_batch()],
            inputs=replicator.InputOptions(shapes=[{"x": (3,)}, {"x": (5,)}]),
        ),
        BatchError,
        "`dataset` must yield one of the 2 forms that `inputs.shapes` states, got `x` "
        "float32[*,4], `y` float32[*] (batch 0). Crop or pad it, or state its form.",
    ),
    Row(
        "Evaluation sets without a name",
        lambda: run(
            [regression_batch()],
            eval_fn=lambda state, batch: {},
            eval_dataset={"a/b": [regression_batch()]},
            eval_every=2,
        ),
        ArgumentError,
        "`eval_dataset` must name each of several datasets by a string without `/`, "
        "got "
        '[\'a/b\']. Write `{"val": ..., "test": ...}`.',
    ),
    Row(
        "An evaluation on what can be read once",
        lambda: run(
            [regression_batch()],
            eval_fn=lambda state, batch: {},
            eval_dataset=iter([regression_batch()]),
            eval_every=2,
        ),
        ArgumentError,
        "`eval_dataset` must be one that can be read again, got `list_iterator`. Pass "
        "a list, a grain dataset or `input_fn(context)`.",
    ),
    Row(
        "Rows of a training step that are not one for each example",
        lambda: step_on(
            lambda state, batch: (
                state,
                {"worst": replicator.Concat(jax.lax.top_k(batch["y"], 1)[0])},
            ),
            {"w": 1.0},
        ),
        ArgumentError,
        "`step_fn` must report one row per example for `worst`, a `Concat`, got "
        "float32[1] for 2 examples. Declare it as "
        "`Mean`, `Sum`, `Max` or `Min`.",
    ),
    Row(
        "Each replica's own rows along another axis, in microbatches",
        lambda: compiled(
            reporting(lambda batch: replicator.PerReplica(batch["x"].T)), accumulate=2
        ),
        ArgumentError,
        "`step_fn` must report `own`, a `PerReplica`, in one shape or with one row per "
        "example, got float32[4,1] of a microbatch and float32[4,2] of the whole "
        "batch. Put the axis of examples first.",
    ),
    Row(
        "A loss of each example for a mean",
        lambda: step_on(lambda state, batch: (state, {"loss": batch["y"]}), {"a": 1.0}),
        ArgumentError,
        "`step_fn` must reduce `loss` over its examples, got float32[2] for 2 of them: "
        "rows of other examples would be merged with these. Report their mean, or all "
        "rows: `Concat(rows)`.",
    ),
    Row(
        "Rows of an evaluation that are not one for each example",
        lambda: replicas(8).evaluate(
            lambda state, batch: {"worst": replicator.Concat(batch["y"].max())},
            [regression_batch()],
            state={},
        ),
        ArgumentError,
        "`eval_fn` must return one row per example for `worst`, a `Concat`, got "
        "float32[]. Leave examples in the first axis, or declare it otherwise.",
    ),
    Row(
        "A prediction for the whole batch",
        lambda: replicas(8).predict(
            lambda state, batch: {"mean": batch["y"].mean()}, [regression_batch()], {}
        ),
        ArgumentError,
        "`predict_fn` must return one row per example, got float32[] for `mean`. Leave "
        "examples in the first axis; for sums and means use `evaluate`.",
    ),
    Row(
        "A prediction that calls collectives",
        lambda: replicas(8).predict(
            lambda state, batch: replicator.all_reduce(batch["y"], op="sum"),
            [regression_batch()],
            {},
        ),
        ArgumentError,
        "`predict_fn` must not call collectives, got `psum` at train.py:12 in "
        "<lambda>. Return the results of one replica: the blocks of all are put "
        "together.",
    ),
    Row(
        "A batch for a function to predict",
        lambda: replicas(8).predict(regression_batch(), [regression_batch()], {}),
        ArgumentError,
        "`predict_fn` must be a function, got dict. Pass the function itself.",
    ),
    Row(
        "A step without a batch",
        lambda: replicas(8).compile(lambda state: (state, {})),
        ArgumentError,
        "`step_fn` must take (state, batch) or (state, batch, key), got (state). Write "
        "`def step_fn(state, batch)`.",
    ),
    Row(
        "An `init_fn` without a key",
        lambda: replicas(8).init(lambda: {}),
        ArgumentError,
        "`init_fn` must take (key), got (). Write `def init_fn(key)`.",
    ),
    Row(
        "A function in the state",
        lambda: replicas(8).init(lambda key: {"opt": optax.sgd(0.1)}),
        ArgumentError,
        "`init_fn` must return arrays and numbers, got a `function` at `opt/init`. "
        "Keep it out of the state.",
    ),
    Row(
        "A string among the metrics",
        lambda: step_on(lambda state, batch: (state, {"name": "a"}), {"a": 1.0}),
        StateError,
        "`step_fn` must return arrays and numbers, got a `str` at `name` in its "
        "metrics. Leave it out.",
    ),
    Row(
        "A seed for a key",
        lambda: replicas(8).compile(lambda state, batch, key: (state, {}))(
            {"a": 1.0}, regression_batch(), 3
        ),
        ArgumentError,
        "`key` must be a random key, got 3. Pass `jax.random.key(3)`.",
    ),
    Row(
        "`True` for checks",
        lambda: replicas(8).compile(lambda state, batch: (state, {}), checks=True),
        ArgumentError,
        "`checks` must be a set of `checkify` errors, got True. Pass "
        "`checkify.user_checks`.",
    ),
    Row(
        "A whole state for that of an optimizer",
        lambda: replicator.scale_loss(1.0, {"params": 1.0}),
        ArgumentError,
        "`state` must be a wrapped optimizer's, got dict. Pass the result of the "
        "wrapped one's `init`.",
    ),
    Row(
        "A compiled step under `jit`",
        lambda: jax.jit(replicas(8).compile(lambda state, batch: (state, {})))(
            {"a": 1.0}, regression_batch()
        ),
        ArgumentError,
        "`step` must be called outside of `jit`, `grad`, `vmap` and the like, got a "
        "call that JAX traces. Call it directly: it compiles by itself.",
    ),
    Row(
        "A state made under `jit`",
        lambda: jax.jit(lambda: replicas(8).init(lambda key: {"a": 1.0}))(),
        ArgumentError,
        "`rep.init` must be called outside of `jit`, `grad`, `vmap` and the like, got "
        "a call that JAX traces. Call it directly: it compiles by itself.",
    ),
    Row(
        "An evaluation under `grad`",
        lambda: jax.grad(lambda a: evaluated(squares, state={"a": a})["x"])(1.0),
        ArgumentError,
        "`evaluate` must be called outside of `jit`, `grad`, `vmap` and the like, got "
        "a call that JAX traces. Call it directly: it compiles by itself.",
    ),
    Row(
        "A compiled step without `jit`",
        lambda: without_jit(lambda: step_on(plain_step, {"a": 1.0})),
        ArgumentError,
        "`jax.disable_jit` must be off where `step` is called, got it on. To see "
        "values inside a step, compile it with `debug=True`.",
    ),
    Row(
        "A state made without `jit`",
        lambda: without_jit(lambda: replicas(8).init(lambda key: {"a": 1.0})),
        ArgumentError,
        "`jax.disable_jit` must be off where `rep.init` is called, got it on. To see "
        "values inside a step, compile it with `debug=True`.",
    ),
    Row(
        "An evaluation without `jit`",
        lambda: without_jit(lambda: evaluated(squares)),
        ArgumentError,
        "`jax.disable_jit` must be off where `evaluate` is called, got it on. To see "
        "values inside a step, compile it with `debug=True`.",
    ),
    Row(
        "An update in a loop under accumulation",
        lambda: compiled(scanning, accumulate=2),
        ArgumentError,
        "`accumulate` must be 1 for a step that calls `update` of an optimizer under "
        "`lax.cond`, or in `lax.scan`, `while_loop` or `fori_loop`, got more. Call it "
        "once, outside, and choose between its result and the old state with "
        "`jnp.where`.",
    ),
    Row(
        "A norm that is called twice under accumulation",
        lambda: compiled(norm_twice, accumulate=2),
        ArgumentError,
        "`accumulate` must be 1 where a batch norm moves its running statistics twice "
        "in a step, got more (at train.py:12 in <lambda>). Call it once on all "
        "examples together, or the second time on a copy: `nnx.clone(model)`.",
    ),
    Row(
        "Gradients of integers under accumulation",
        lambda: compiled(counting_gradients, accumulate=2),
        ArgumentError,
        "`grads` must hold floating-point leaves, got float0[3] (leaf `n`). Keep "
        "integers out of the parameters.",
    ),
    Row(
        "Gradients of single examples",
        lambda: compiled(by_example),
        ArgumentError,
        "`grads` must have the shapes of the parameters, got float32[2,4] for [4] "
        "(leaf `w`): they are averaged before the optimizer sees them. Clip those of "
        "single examples in the step and pass their sum with `count=n`, or hand "
        "`replicator.all_gather(grads, tiled=True)` to an optimizer outside of the "
        "wrap.",
    ),
    Row(
        "Gradients of other parameters in a loop that accumulates",
        partly_accumulating,
        ArgumentError,
        "`grads` must have the structure of the parameters that `init` was given with "
        "`wrap_optimizer(accumulate=k)`, got another: `slow` is missing. Pass "
        "`accumulate=k` to `rep.compile` instead.",
    ),
    Row(
        "A state and gradients in the wrong order",
        lambda: compiled(swapped),
        ArgumentError,
        "`state` must be a wrapped optimizer's, got dict. Pass the result of the "
        "wrapped one's `init`.",
    ),
    Row(
        "A number for a schedule",
        lambda: Callback(print, 10),
        ArgumentError,
        "`when` must be a schedule, got 10. Write `every(n_steps=10)`.",
    ),
    Row(
        "A directory for a writer",
        lambda: Multi("runs/a"),
        ArgumentError,
        "`writers` must be a writer, got 'runs/a'. Make one: `JSONL(path)`.",
    ),
    Row(
        "A number of a process from the environment",
        lambda: replicator.distributed.initialize("10.0.0.1:8482", 2, "0"),
        ArgumentError,
        "`process_id` must be a whole number, got '0'. Use 0.",
    ),
    Row(
        "A number for a list of numbers of replicas",
        lambda: replicator.testing.assert_replica_invariant(
            lambda state, batch: (state, {}), lambda key: {}, {}, replicas=2
        ),
        ArgumentError,
        "`replicas` must be a list of numbers, got 2. Write `replicas=(2,)`.",
    ),
    Row(
        "Half a group of processes",
        lambda: replicator.distributed.initialize("10.0.0.1:8482"),
        ArgumentError,
        "`coordinator`, `num_processes` and `process_id` must be given together, got "
        "('10.0.0.1:8482', None, None). Give all three, or those that the environment "
        "does not name.",
    ),
    Row(
        "A number of processes alone in the environment",
        lambda: replicator.distributed.detect({"WORLD_SIZE": "4"}),
        ArgumentError,
        "`RANK`, `MASTER_ADDR` must be set beside `WORLD_SIZE` (torchrun), got "
        "nothing. Set all of them in each process, or none.",
    ),
    Row(
        "A host whose name is an option",
        lambda: RemoteHost(address="-oProxyCommand=x"),
        ArgumentError,
        "`address` must hold letters, digits and `._:@[]-` only and not begin with "
        "`-`, got '-oProxyCommand=x'. Give it another name in `~/.ssh/config`.",
    ),
    Row(
        "A port of ssh that is none",
        lambda: RemoteHost(address="node1", port=0),
        ArgumentError,
        "`port` must be 1 to 65535, got 0. Use 22, or leave it out.",
    ),
    Row(
        "A variable that no environment can hold",
        lambda: RemoteHost(address="node1", environment={"A=B": "1"}),
        ArgumentError,
        "`environment` must be of names without `=`, got 'A=B'. Write `NAME: value`.",
    ),
    Row(
        "A command in place of ssh, with no place for the host",
        lambda: Hosts([RemoteHost(address="node1")], via="ssh gate", lost_after_s=300),
        ArgumentError,
        "`via` must be a command in which `{host}` stands for the host, got "
        "'ssh gate'. Use for example `ssh -J gate {host}`.",
    ),
    Row(
        "A command in place of ssh that is not there",
        lambda: Hosts([RemoteHost(address="node1")], via="sssh {host}", lost_after_s=9),
        ArgumentError,
        "`via` must be a program of this host, got 'sssh', which is not in PATH. "
        "Install it.",
    ),
    Row(
        "A file of a machine that is not there",
        lambda: read_hosts("cluster.yml"),
        ArgumentError,
        "`machine` must be a file of nodes, got 'cluster.yml': No such file or "
        "directory. Give its path.",
    ),
    Row(
        "An environment of a host that a shell would have to make",
        lambda: read_hosts(machine_with("conda activate x")),
        ArgumentError,
        "`python_venv` must be the folder of an environment, or `source "
        "FOLDER/bin/activate`, got 'conda activate x'. No shell runs it: name the "
        "folder.",
    ),
    Row(
        "Copies in memory on hosts of a file",
        lambda: launch_with("--machine", "cluster.yml", "--copy-bytes", "8"),
        ArgumentError,
        "`copy_bytes` must not be given with `machine`, got 8. Leave it out: it is for "
        "processes of this host.",
    ),
    Row(
        "A command in place of ssh, and no machine",
        lambda: launch_with("--processes", "2", "--via", "ssh {host}"),
        ArgumentError,
        "`via` must come with `machine`, got 'ssh {host}' alone. Add `--machine "
        "cluster.yml`.",
    ),
    Row(
        "Two launchers that disagree",
        lambda: replicator.distributed.detect(
            {
                **{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"},
                **{"PMI_RANK": "3", "PMI_SIZE": "4"},
            }
        ),
        ArgumentError,
        "`RANK`, `WORLD_SIZE` (torchrun) and `PMI_RANK`, `PMI_SIZE` (pmi) must name "
        "one place in one group, got process 1 of 2 and process 3 of 4. Unset those of "
        "the one that did not start this process.",
    ),
    Row(
        "Several hosts of a launcher that is not known",
        lambda: replicator.distributed.detect({"SM_HOSTS": '["algo-1", "algo-2"]'}),
        ArgumentError,
        "`SM_HOSTS` must not count several processes where no launcher that is known "
        'numbers them, got \'["algo-1", "algo-2"]\'. Call `initialize` with all three '
        "arguments, or set REPLICATOR_NUM_PROCESSES=1 to train alone.",
    ),
    Row(
        "A launcher that names no address",
        lambda: replicator.distributed.detect({"PMI_RANK": "3", "PMI_SIZE": "4"}),
        ArgumentError,
        "`coordinator` must be given where the launcher (pmi) names no host, got "
        "process 3 of 4 from `PMI_RANK`, `PMI_SIZE`. Call "
        '`initialize(coordinator="HOST:8482")` with the host of process 0.',
    ),
    Row(
        "A number in the environment beyond that of processes",
        lambda: replicator.distributed.detect({"PMI_RANK": "4", "PMI_SIZE": "4"}),
        ArgumentError,
        "`PMI_RANK` and `PMI_SIZE` must be the number of a process and of all, got 4 "
        "of 4. Number processes from 0.",
    ),
    Row(
        "A process beyond the group",
        lambda: replicator.distributed.initialize("10.0.0.1:8482", 2, 5),
        ArgumentError,
        "`process_id` must be 0 to 1, got 5 (from arguments). Number processes from 0.",
    ),
    Row(
        "A bundle that is none",
        lambda: read_bundle(folder()),
        ArgumentError,
        "`directory` must be a post-mortem bundle, got runs/a without `about.json`. "
        "Look into `postmortem/` of the run's directory.",
    ),
    Row(
        "Resources for a group that a program has not",
        lambda: lp.launch(program_of(int), resources={"actor": lp.Resources(cpus=1)}),
        ProgramError,
        "`resources` must name groups of 'training' (learner), got actor. Use these.",
    ),
    Row(
        "A second node under the label of a group of processes",
        lambda: lp.launch(program_of_groups()),
        ProgramError,
        "`JaxProcesses` must have a label of their own, got 'learner' of 'training' "
        "with 2 nodes. Add each under another label.",
    ),
    Row(
        "A node of an `async def`",
        lambda: lp.PyNode(fetch),
        ArgumentError,
        "`function` must be a plain function, got `async def` fetch. Make it a `def` "
        "that runs what it awaits by `asyncio.run(...)`.",
    ),
    Row(
        "A group of processes in a colocation",
        lambda: lp.MultiThreadingColocation([lp.JaxProcesses(print, processes=2)]),
        ProgramError,
        "`node` must be one worker, got <JaxProcesses print> in a "
        "MultiThreadingColocation. Add it to the program itself.",
    ),
    Row(
        "An island in the threads of a colocation",
        lambda: lp.MultiThreadingColocation([lp.IslandNode(devices=2)]),
        ProgramError,
        "`node` must be one that runs in a thread, got <IslandNode devices=2> in a "
        "MultiThreadingColocation. Add it to the program itself.",
    ),
    Row(
        "A seed for the order of processes",
        lambda: lp.launch(
            lp.make_program(lp.JaxProcesses(print, processes=2)), lp.TestMode(seed=7)
        ),
        ArgumentError,
        "`seed` must order nodes that are threads, got 7 and processes: node0/0, "
        "node0/1. Leave `seed` out.",
    ),
    Row(
        "A program that runs already",
        launched_twice,
        ProgramError,
        "`program` must not be running, got 'training', which is. Wait for its run, "
        "or make the program again.",
    ),
    Row(
        "Answers of a cacher that would be too old",
        lambda: lp.CacherNode(lp.CourierNode(object).create_handle(), 4000, 2000),
        ProgramError,
        "`refresh_interval_ms` must be more than 0 and at most `stale_after_ms`, got "
        "4000 and 2000. Use 2000 and 4000.",
    ),
    Row(
        "A discount of n steps that is none",
        lambda: lp.n_step(5, discount=1.5),
        ArgumentError,
        "`discount` must be from 0 to 1, got 1.5. Use 0.99.",
    ),
    Row(
        "Sequences that share all their steps",
        lambda: lp.sequences(length=80, overlap=80),
        ArgumentError,
        "`overlap` must be below `length`, got 80 of 80. Use 40.",
    ),
    Row(
        "Items of an actor that nothing makes",
        lambda: lp.Actor(None, None, None, None, index=0, unroll_length=1, items=5),
        ArgumentError,
        "`items` must make items of unrolls, got 5. Pass `lp.n_step(5, "
        "discount=0.99)` or `lp.sequences(length=80)`.",
    ),
    Row(
        "Priorities of a learner that no metric has",
        lambda: learnt_by_priority({}),
        ArgumentError,
        "`priorities` must name a metric with one number per example, 2 here, got none "
        "for 'error'. Return `{\"error\": replicator.Concat(values)}`.",
    ),
    Row(
        "Priorities of a learner that go back to a queue",
        priorities_of_a_queue,
        ArgumentError,
        "`priorities` must go back to a replay table, got one whose samples have no "
        "keys. Use `lp.ReplayTable`, or leave `priorities` out.",
    ),
    Row(
        "A learner in turns whose priorities have no place",
        lambda: lp.ReplicatedLearnerNode(
            lambda state, batch: (state, {}),
            lambda key: {},
            steps=1,
            batch_size=8,
            fixed_lag=1,
            priorities="td_error",
        ),
        ArgumentError,
        "`priority_lag` must be given with `priorities` and `fixed_lag`, and only "
        "then, got None. Pass that of the table to both, or leave it out.",
    ),
    Row(
        "A learner with priorities for a table that gives each row out once",
        lambda: lp.ReplicatedLearnerNode(
            lambda state, batch: (state, {}),
            lambda key: {},
            steps=1,
            batch_size=8,
            priorities="td_error",
        ),
        ArgumentError,
        "`priorities` must be left out with a table that has no `update_priorities`, "
        "got 'td_error' and a TrajectoryQueue. Use an `lp.ReplayTable`.",
    ),
    Row(
        "A stop where no program runs",
        lp.stop,
        LaunchError,
        "`lp.stop()` must be called while a program runs in this process, got none. "
        "Call it in a node, or `run.stop()` on what `lp.launch` returned.",
    ),
    Row(
        "A wait for a group that a program has not",
        lambda: waited_for(labels=["actor"]),
        LaunchError,
        "`labels` must be a list of groups (learner), got ['actor']. Use labels of "
        "'training'.",
    ),
    Row(
        "A program that does not end in time",
        lambda: waited_for(0.01),
        RunTimeoutError,
        "`training` must end within 0.01 s, got learner still running. Give it longer, "
        "or `run.stop()`.",
    ),
    Row(
        "A node that fails, here by an argument",
        lambda: lp.launch(program_of(check_count, "batch_size", 0)).wait(60),
        NodeFailedError,
        "`learner` raised ArgumentError: `batch_size` must be at least 1, got 0. Use "
        "1.\nOne of the workers exited. It is a node of the program 'training'.",
    ),
    Row(
        "A strategy's rule that matches no parameter",
        lambda: partitioned(strategies.tensor_parallel({"*/kernel": ("model",)})),
        ArgumentError,
        "`rules` must each match a parameter, got '*/kernel', which matches none "
        'of: params/b1, params/w1, params/w2. Write for example "params/*/kernel".',
    ),
    Row(
        "A partition that does not divide, and may not stay whole",
        lambda: partitioned(strategies.tensor_parallel({"params/w1": ("model",)})),
        ArgumentError,
        "`params/w1` must divide over {'model': 8}, got the shape [4, 8] for the "
        "partition ('model',). Change its rule, let it stay whole, "
        '`uneven="whole"`, or pad it: `uneven="pad"`.',
    ),
    Row(
        "A strategy that is not decided yet",
        lambda: replicas(8, strategy="auto").init(lambda key: key),
        ArgumentError,
        '`strategy` must be decided for this, got "auto" before a run began. Use '
        "`replicator.choose(step_fn, init_fn, batch).replicator`.",
    ),
    Row(
        "A strategy to choose, and an order of sums",
        lambda: replicas(8, strategy="auto", reduction="ordered"),
        ArgumentError,
        '`reduction` must be "fast" with `strategy="auto"`, got "ordered". Leave one '
        "of them out.",
    ),
    Row(
        "A run without data to choose a strategy by",
        session_to_choose,
        ArgumentError,
        '`dataset` must be given, and a `step_fn`, with `strategy="auto"`, got None. '
        "Use `replicator.choose(step_fn, init_fn, batch).replicator`.",
    ),
    Row(
        "A choice of a strategy and of microbatches",
        lambda: run_to_choose(auto_microbatch=True),
        ArgumentError,
        '`auto_microbatch` must be False with `strategy="auto"`, got True. Choose '
        "`accumulate`; where nothing fits, the error says which does.",
    ),
    Row(
        "A choice for a Replicator that has its strategy",
        lambda: chosen(replicator=replicas(8, strategy=FSDP)),
        ArgumentError,
        '`replicator` must be one with `strategy="auto"` that is not decided yet, got '
        "one under fsdp. Leave it out, and use `choice.replicator`.",
    ),
    Row(
        "A choice for what is no Replicator",
        lambda: chosen(replicator="fsdp"),
        ArgumentError,
        '`replicator` must be one with `strategy="auto"` that is not decided yet, got '
        "'fsdp'. Leave it out, and use `choice.replicator`.",
    ),
    Row(
        "A choice for a Replicator, and devices",
        lambda: chosen(replicator=replicas(8, strategy="auto"), devices=[1, 2]),
        ArgumentError,
        "`devices` must be left out with a `replicator`, which has its own, got 2. "
        "Pass them to `Replicator` itself.",
    ),
    Row(
        "Narrow forms, for optimizers that do not obey rules",
        lambda: chosen(lossy=True),
        ArgumentError,
        "`replicator` must be given with `lossy=True`, got None: only optimizers that "
        'it wrapped send narrow forms. Pass one with `strategy="auto"`.',
    ),
    Row(
        "A choice for the problem of a file, and a first state",
        lambda: replicator.choose("train.py:problem", abs),
        ArgumentError,
        "`init_fn` must be left out with 'train.py:problem', whose function gets a "
        "replicator and returns the step, got <built-in function abs>. Leave it out.",
    ),
    Row(
        "A choice among nothing",
        lambda: chosen(candidates=[]),
        ArgumentError,
        "`candidates` must be a list of strategies, got []. Write "
        "`[strategies.data_parallel(), strategies.fsdp()]`, or leave it out.",
    ),
    Row(
        "Fewer than no trials",
        lambda: chosen(trials=-1),
        ArgumentError,
        "`trials` must be at least 0, got -1. Pass 0 to decide by the model alone.",
    ),
    Row(
        "A choice by the model alone, for a machine without figures",
        lambda: chosen(trials=0),
        ArgumentError,
        "`trials` must be at least 1 for cpu, whose figures are not known, got 0. Run "
        "`replicator devices --calibrate`, or pass a `machine`.",
    ),
    Row(
        "A choice for a machine of another size",
        lambda: chosen(machine=Machine.from_topology("h100:2x8")),
        ArgumentError,
        "`machine` must have the 8 devices that are there, got h100:2x8 with 16. Leave "
        "it out, or use `replicator.fake_devices`.",
    ),
    Row(
        "More candidates than fit in the time",
        lambda: too_much(6, 30.0, 120.0),
        ArgumentError,
        "`candidates` must fit into `limit_s`, got 6 for 120 s, of which the first "
        "took 30 s to compile. Name 4, or pass `limit_s=360`.",
    ),
    Row(
        "No strategy that works",
        lambda: searched(status="failed", why="NaN"),
        ArgumentError,
        "`strategy` must be found among candidates that work, got none: fsdp: NaN. "
        "Mend the step, or pass other `candidates`, or a larger `limit_s`.",
    ),
    Row(
        "No strategy with which a step fits",
        lambda: searched(
            memory_bytes=2**34 * 0.965, status="does not fit", need_bytes=30 << 30
        ),
        DeviceMemoryError,
        "`strategy` must make the step fit into each device's memory, got none that "
        "does: fsdp is the nearest, and needs 30 GiB, 15.3 GiB more than the 14.7 GiB "
        "that it may have. Use 3 times as many devices, or a smaller model or batch.",
    ),
    Row(
        "No time to choose",
        lambda: searched(is_over=True, status="left out"),
        ArgumentError,
        "`limit_s` must be enough to compile one candidate, got too little. Pass a "
        "larger one, or fewer `candidates`.",
    ),
    Row(
        "A strategy that was saved for other variables",
        lambda: partitioned(FSDP.made_for(OTHER_MODEL)),
        ArgumentError,
        "`strategy` must be one for the variables of this state, got fsdp made for "
        "others: `params/b1 float32[1, 8]` is new. Make another `Replicator`, with a "
        "strategy built for this state.",
    ),
    Row(
        "More shards than devices",
        lambda: replicas(8, strategy=strategies.fsdp(shards=16)),
        ArgumentError,
        "`strategy` must fit 8 devices, got fsdp with replica=1, shard=16, model=1."
        " Choose sizes whose product is 8.",
    ),
    Row(
        "An unknown key in a strategy's YAML",
        lambda: strategies.from_yaml("name: mine\nshards: 8\n"),
        ArgumentError,
        "`text` must hold known keys only, got 'shards' in line 2. Use one of name,"
        " kind, replica, shard, model, batch_axes, rules, whole_below_bytes, "
        "variables, devices_per_host.",
    ),
    Row(
        "An unknown key in a cluster's file",
        lambda: Machine.from_yaml("nodes:\n- {address: a, gpu: [0]}\n"),
        ArgumentError,
        "`text` must hold known keys only, got 'gpu' in line 2. Use one of address,"
        " chief, cpus, gpus, ssh_config, network_bandwidth.",
    ),
    Row(
        "Two chiefs in a cluster's file",
        lambda: Machine.from_yaml(
            "nodes:\n- {address: a, chief: true}\n- {address: b, chief: true}\n"
        ),
        ArgumentError,
        "`chief` must be true once, as in line 2, got 'true' in line 3. Leave it out.",
    ),
    Row(
        "No chief among several nodes",
        lambda: Machine.from_yaml("nodes:\n- address: a\n- address: b\n"),
        ArgumentError,
        "`nodes` must have one chief, got 2 nodes without one in line 2. Write `chief:"
        " true` below the one that launches.",
    ),
    Row(
        "A loopback among several nodes",
        lambda: Machine.from_yaml(
            "nodes:\n- {address: a, chief: true}\n- address: localhost\n"
        ),
        ArgumentError,
        "`address` must be one that the other nodes reach, got 'localhost' in line 3."
        " Write its name or IP address in the network.",
    ),
    Row(
        "An ssh group that is not there",
        lambda: Machine.from_yaml("nodes:\n- {address: a, ssh_config: worker}\n"),
        ArgumentError,
        "`ssh_config` must name a group below `ssh`, got 'worker' in line 2. Add it.",
    ),
    Row(
        "A kind of device without published figures",
        lambda: Machine.from_yaml("device: abacus\nnodes: [{address: a}]\n"),
        ArgumentError,
        "`device` must be of a kind with published figures, got 'abacus'. Leave it out,"
        " and take measured ones: `machine.with_figures_of(other)`.",
    ),
    Row(
        "A topology that does not exist",
        lambda: Machine.from_topology("v5e:3x5"),
        ArgumentError,
        "`topology` must be a slice of v5e that exists, got 'v5e:3x5'. Use one of 1x1,"
        " 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16.",
    ),
    Row(
        "A topology of more GPUs than a host has",
        lambda: Machine.from_topology("h100:2x16"),
        ArgumentError,
        "`topology` must be a number of hosts and of GPUs in each, at most 8, got "
        "'h100:2x16'. Write `h100:8` or `h100:2x8`.",
    ),
    Row(
        "Devices of a topology of GPUs",
        lambda: replicator.devices_of("h100:2x8"),
        ArgumentError,
        "`topology` must be of TPUs, got 'h100:2x8', which no compiler here knows. Use "
        "`strategies.Machine.from_topology` for a forecast.",
    ),
    Row(
        "A device to plan for whose links nobody published",
        lambda: topologies_of("b300:8"),
        ArgumentError,
        "`topology` must begin with a device whose links are published, got 'b300:8'. "
        "Use one of v2, v3, v4, v5p, v5e, v6e, v100, t4, a100, a100-80gb, a100-pcie, "
        "a100-80gb-pcie, l4, l40s, h100, h100-pcie, h100-nvl, h200, b200: `v5e:4x4`, "
        "`h100:2x8`.",
    ),
    Row(
        "A strategy to plan that is not known",
        lambda: named_strategies("fsdp,zero4"),
        ArgumentError,
        "`strategy` must be one of data_parallel, zero1, zero2, fsdp, hybrid, "
        "tensor_parallel, got 'zero4'. Use one of these, or `auto`.",
    ),
    Row(
        "A strategy to plan without what it needs",
        lambda: named_strategies("tensor_parallel"),
        ArgumentError,
        "`strategy` must give tensor_parallel what it takes, got 'tensor_parallel': "
        "tensor_parallel() missing 1 required positional argument: 'rules'. See "
        "`help(replicator.strategies.tensor_parallel)`.",
    ),
    Row(
        "A list of strategies that is none",
        lambda: named_strategies("hybrid(8"),
        ArgumentError,
        "`strategy` must be names of builders, got 'hybrid(8'. Write `fsdp,zero1` or "
        "`hybrid(shard=8)`.",
    ),
    Row(
        "A problem in a file that is not there",
        lambda: ProblemFile.from_text("trian.py:problem"),
        ArgumentError,
        "`FILE:FUNCTION` must name a Python file that is there, and a function in it, "
        "got 'trian.py:problem'. Write `train.py:problem`.",
    ),
    Row(
        "A problem that its file does not have",
        lambda: ProblemFile(
            path=str(folder("train.py") / "train.py"), function="probelm"
        ).load(),
        ArgumentError,
        "`FILE:FUNCTION` must name a function of runs/a/train.py, got 'probelm'. Write "
        "`def probelm(rep)` there.",
    ),
    Row(
        "A problem that reads data",
        lambda: problem_from(lambda rep: np.load("no/images.npz"), None),
        ArgumentError,
        "`problem` must return a step without reading data, got FileNotFoundError: "
        "[Errno 2] No such file or directory: 'no/images.npz', at train.py:12. Return "
        "`jax.ShapeDtypeStruct`s in place of a batch.",
    ),
    Row(
        "A problem without small sizes, to be rehearsed",
        lambda: at_small_sizes(lambda rep: None),
        ArgumentError,
        "`problem` must take `small` to be rehearsed, got one that takes (rep). Write "
        "`def problem(rep, small=False)`, and small sizes where it is True.",
    ),
    Row(
        "A problem that returns a dataset",
        lambda: problem_from(
            lambda rep: (lambda s, b: s, lambda key: {}, [np.ones(3), 7]), None
        ),
        ArgumentError,
        "`problem` must return a batch of arrays or `jax.ShapeDtypeStruct`s with a "
        "leading axis of examples, got 7 at `1`. Write `{'x': "
        "jax.ShapeDtypeStruct((256, 784), 'float32')}`.",
    ),
    Row(
        "A problem that returns something else",
        lambda: problem_from(lambda rep: None, None),
        ArgumentError,
        "`problem` must return a tuple of step_fn, init_fn and the shapes of a batch, "
        "got None. Return these three.",
    ),
    Row(
        "A prediction on a machine that is too small",
        lambda: strategies.predict(
            strategies.Features(num_devices=16, flops={}),
            Machine.from_topology("h100:8"),
        ),
        ArgumentError,
        "`machine` must have the 16 devices of the step, got h100:8 with 8. Take a "
        "larger one.",
    ),
    Row(
        "A prediction on a machine without figures",
        lambda: strategies.predict(
            strategies.Features(num_devices=1, flops={}),
            Machine.from_yaml("nodes: [{address: a}]"),
        ),
        ArgumentError,
        "`machine` must have figures of its devices, got cluster without. Run "
        "`replicator devices --calibrate` on it, or name the kind in its file: "
        "`device: ...`.",
    ),
    Row(
        "A builder of strategies that was not called",
        lambda: replicas(8, strategy=strategies.fsdp),
        ArgumentError,
        "`strategy` must be a `Strategy`, or take (variables, devices), got the "
        "function fsdp. Call it: `fsdp(...)`.",
    ),
    Row(
        "A mesh that a builder of one's own has not chosen yet",
        lambda: replicas(8, strategy=lambda variables, devices: FSDP).mesh,
        ArgumentError,
        "`strategy` must have seen the variables of a state, got a function that "
        "has seen none. Make the state first: `rep.init(init_fn)`, or "
        "`rep.put(state)`.",
    ),
    Row(
        "A builder of one's own that gives each device a replica",
        lambda: partitioned(lambda variables, devices: strategies.data_parallel()),
        ArgumentError,
        "`strategy` must return one that partitions where it is a function, got "
        "data_parallel. For copies alone return `Rules([], replica=None)`.",
    ),
    Row(
        "A rule that cuts, of a strategy that gives each device all of the state",
        lambda: strategies.data_parallel(
            [strategies.Rule(pattern="params/*", stored="shard")]
        ),
        ArgumentError,
        "`rules` must leave variables whole where a strategy replicates, got one that "
        "cuts 'params/*'. Use `Rules([...])`, or leave all but `synchronise` and "
        "`compress` out.",
    ),
    Row(
        "A rule for sums of gradients, of a strategy that partitions",
        lambda: strategies.Rules(
            [strategies.Rule(pattern="params/*", compress="int8")], shard=None
        ),
        ArgumentError,
        "`rules` must leave `synchronise` and `compress` out where a strategy "
        "partitions, got 'params/*' with 'int8': XLA adds gradients up. Use "
        "`data_parallel([...])`.",
    ),
    Row(
        "A rule for sums by hosts, and no number of their devices",
        lambda: synchronised(synchronise="hierarchical"),
        ArgumentError,
        "`devices_per_host` must be the number of devices of a host, got data_parallel "
        "without it. Pass `devices_per_host=8`; a `Replicator` also takes it from its "
        "`machine`.",
    ),
    Row(
        "A number of a host's devices, and no rule for sums by hosts",
        lambda: strategies.data_parallel(devices_per_host=4),
        ArgumentError,
        "`devices_per_host` must be left out where no rule synchronises by hosts, got "
        '4. Write `Rule(pattern="*", synchronise="hierarchical")`.',
    ),
    Row(
        "Pieces on each host, of which nothing says how many devices it has",
        lambda: replicas(8, strategy=strategies.hybrid()),
        ArgumentError,
        "`shard` must be the number of devices of a host, got hybrid without it. Pass "
        "`shard=8`; a `Replicator` also takes it from its `machine`.",
    ),
    Row(
        "A machine that has fewer devices than the replicator",
        lambda: replicas(8, machine="nodes: [{address: localhost, cpus: [0, 1]}]"),
        ArgumentError,
        "`machine` must have the 8 devices of the replicator, got cluster with 2. List "
        "the others in its file.",
    ),
    Row(
        "A machine's file that is not there",
        lambda: replicas(8, machine="cluster.yml"),
        ArgumentError,
        "`machine` must be a file of nodes, got 'cluster.yml': No such file or "
        "directory. Give its path.",
    ),
    Row(
        "A machine that is neither a `Machine` nor a file",
        lambda: replicas(8, machine=8),
        ArgumentError,
        "`machine` must be a `Machine`, or a cluster's file or its text, got 8. Write "
        "`Machine.from_devices()`.",
    ),
    Row(
        "Hosts that do not divide the devices",
        lambda: synchronised(synchronise="hierarchical", devices_per_host=3),
        ArgumentError,
        "`devices_per_host` must divide the 8 devices, got 3. Pass the number of "
        "devices that each host has.",
    ),
    Row(
        "An unknown form of numbers that travel",
        lambda: synchronised(compress="int4"),
        ArgumentError,
        "`compress` must be None, 'bf16', 'f16', 'int8' or 'power_sgd(rank)', got "
        "'int4'. Write for example 'power_sgd(4)'.",
    ),
    Row(
        "Rows of an embedding in a narrow form",
        lambda: synchronised(synchronise="rows", compress="int8"),
        ArgumentError,
        "`compress` must be None with `synchronise='rows'`, got 'int8'. Leave it out: "
        "rows travel as they are.",
    ),
    Row(
        "A narrow form for integers",
        lambda: compressed("int8", n=jnp.zeros(3, jnp.int32)),
        ArgumentError,
        "`compress` must be for real floating-point parameters, got int32[3] (leaf "
        "`params/n`). Give it a rule of its own before.",
    ),
    Row(
        "A rank above the matrix",
        lambda: compressed("power_sgd(9)", w=jnp.zeros((64, 8))),
        ArgumentError,
        "`compress` must have a rank of at most 8 here, got 9 for [64, 8] (leaf "
        "`params/w`). Give it a rule of its own before.",
    ),
    Row(
        "Rules for sums whose order of replicas is fixed",
        lambda: synchronised(compress="int8", reduction="ordered"),
        ArgumentError,
        "`reduction` must be 'fast' with rules for synchronising, got 'ordered' and "
        "one for '*'. Leave one of them out.",
    ),
    Row(
        "An optimizer that does not have the rules of the replicator",
        lambda: step_with_rules(replicator, pattern="*"),
        ArgumentError,
        "`strategy` must be that of the replicator in each optimizer, got `params` "
        "wrapped with no rules. Wrap it with `rep.wrap_optimizer`.",
    ),
    Row(
        "A rule for sums that matches no parameter of an optimizer",
        lambda: step_with_rules(pattern="embedding/*"),
        ArgumentError,
        "`rules` must each match a parameter that an optimizer updates, got "
        "'embedding/*', which matches none of: params/b1, params/w1, params/w2. "
        "Begin it with the name of "
        '`rep.wrap_optimizer(tx, name="params")`.',
    ),
    Row(
        "Gradients of another tree than that of the parameters, under rules for sums",
        lambda: other_tree(synchronised(compress="int8").wrap_optimizer(optax.sgd(1))),
        ArgumentError,
        "`grads` must have the paths of the parameters that `init` was given, got "
        "`params/v`, for which a rule of the strategy has no state. Pass gradients of "
        "the same tree.",
    ),
    Row(
        "The state of an optimizer that was wrapped without its rules",
        lambda: (
            synchronised(compress="int8")
            .wrap_optimizer(optax.sgd(1.0))
            .update(
                {"w": jnp.ones(2)},
                replicator.wrap_optimizer(optax.sgd(1.0)).init({"w": jnp.ones(2)}),
            )
        ),
        ArgumentError,
        "`state` must be made by `init` of this optimizer, got one with other rules of "
        "a strategy for `params`. Use the same wrapped optimizer in `init_fn` and in "
        "the step.",
    ),
    Row(
        "An array on another mesh that a step closes over",
        lambda: partitioned(
            FSDP, lambda s, b: (s, {"n": ELSEWHERE.mean() + b["x"].mean()})
        ),
        ArgumentError,
        "`step_fn` must compute with arrays that lie on no other mesh, got one that "
        "does. Close over `jax.device_get(array)`, or put it into the state.",
    ),
    Row(
        "A constraint of one's own in a step",
        lambda: partitioned(
            FSDP,
            lambda s, b: (s, {"n": lax.with_sharding_constraint(b["x"], P("data"))}),
        ),
        ArgumentError,
        "`step_fn` must leave it to the strategy where arrays lie, got a constraint "
        "that names a mesh or its axes. Leave it out (of a box of flax, its `mesh`), "
        "and write a rule of a strategy.",
    ),
    Row(
        "A variable of flax NNX that names axes of a mesh",
        lambda: replicas(8).init(
            lambda key: {"w": nnx.Param(0.0, out_sharding=("x",))}
        ),
        ArgumentError,
        "`init_fn` must make variables that are not placed on a mesh, got one of flax "
        "NNX that names axes. Make the module under `with nnx.use_eager_sharding(False)"
        ":`, and place its variables by the rules of a strategy.",
    ),
    Row(
        "A replica's number where a strategy makes all devices one replica",
        lambda: partitioned(FSDP, lambda s, b: (s, {"n": replicator.replica_id()})),
        ArgumentError,
        "`replica_id` must be left to strategies that replicate, got one that "
        "partitions: the step is one replica on all devices. Use `example_keys`, or"
        " `strategies.data_parallel()`.",
    ),
    Row(
        "A replica's number where the first state of all is made",
        lambda: replicas(8).init(lambda key: {"own": replicator.replica_id()}),
        ArgumentError,
        "`replica_id` must be called in a step, got a call in `init_fn`, whose state "
        "is the first of all replicas. For a state of each replica's own call "
        "`rep.put(state)` with a row for each in `PerReplica(rows)`.",
    ),
    Row(
        "A leaf of each replica where there is one",
        lambda: partitioned(
            FSDP, init_fn=lambda key: {"n": replicator.PerReplica(jnp.zeros(()))}
        ),
        ArgumentError,
        "`state` must hold no `PerReplica` leaf under a strategy that partitions, "
        "got one at `n`: there is one replica. Keep a plain array, or use "
        "`strategies.data_parallel()`.",
    ),
    Row(
        "An inspection of a step that was never compiled",
        lambda: replicas(8).inspect(lambda state, batch: (state, {})),
        ArgumentError,
        "`step` must have been called, or come with `state` and `batch`, got one that "
        "is not compiled. Pass `init_fn` and a global batch.",
    ),
    Row(
        "An inspection of a step that runs without a compiler",
        lambda: replicas(8).inspect(replicas(8).compile(plain_step, debug=True)),
        ArgumentError,
        "`step` must be compiled to be inspected, got one with `debug=True`. Pass the "
        "`step_fn` itself.",
    ),
    Row(
        "A step with other collectives than its test expects",
        lambda: testing.assert_collectives(inspected(), {"all-reduce": 2}),
        CollectivesError,
        "`step` must have the collectives expected, got all-reduce 1 times instead of "
        "2:\n  1 all-reduce replica of f32[], 7 bytes: train.py:12 in <lambda> (n)\n"
        "Mend the lines that send them, or expect them.",
    ),
    Row(
        "A collective that XLA does not know",
        lambda: testing.assert_collectives(inspected(), {"psum": 1}),
        ArgumentError,
        "`expected` must name kinds of collectives, got 'psum'. Write one of "
        "all-gather, all-reduce, all-to-all, collective-broadcast, collective-permute, "
        "ragged-all-to-all, reduce-scatter.",
    ),
    Row(
        "An order of replicas where there is one",
        lambda: replicas(8, strategy=FSDP, reduction="ordered"),
        ArgumentError,
        "`reduction` must be 'fast' under a strategy that partitions, got 'ordered'"
        " and fsdp. Leave it out: there is one replica.",
    ),
    Row(
        "Sums of an own loop where a strategy makes all devices one replica",
        lambda: replicas(8, strategy=FSDP).wrap_optimizer(optax.sgd(1.0), accumulate=2),
        ArgumentError,
        "`accumulate` must be 1 for an optimizer that is wrapped under a strategy that "
        "partitions, got 2. Accumulate with `rep.compile(step_fn, accumulate=2)`.",
    ),
    Row(
        "A slice larger than any island",
        lambda: islands().slice(3),
        ArgumentError,
        "`pw.slice` must ask for at most the devices of one island, got 3 devices. "
        "There is island0 with 2 devices of kind cpu.",
    ),
    Row(
        "A slice of a kind of device that is not there",
        lambda: islands().slice(1, kind="TPU v4"),
        ArgumentError,
        "`pw.slice` must ask for devices of a kind that is there, got 1 devices, kind "
        "'TPU v4'. There is island0 with 2 devices of kind cpu.",
    ),
    Row(
        "An axis of a slice below one",
        lambda: islands().slice(1, axes={"x": -1, "y": -1}),
        ArgumentError,
        "`axes['x']` must be at least 1, got -1. Use 1.",
    ),
    Row(
        "Axes of another number of devices",
        lambda: islands().slice(2, axes={"x": 2, "y": 2}),
        ArgumentError,
        "`axes` must have 2 devices in all, got {'x': 2, 'y': 2}. Pass 4 for `n`.",
    ),
    Row(
        "A slice of another `pw`",
        lambda: islands().fn(jnp.sin, islands().slice(1)),
        ArgumentError,
        "`slice` must be a slice of this `pw`, got slice0 (1 on island0). Make one by "
        "`pw.slice(n)`.",
    ),
    Row(
        "A future of another `pw`",
        lambda: an_op()(an_op()(np.ones(2))),
        ArgumentError,
        "a future must be of the same `pw`, got one of another, on slice0 (2 on "
        "island0). Pass its `result()`.",
    ),
    Row(
        "A number that the dtype of its op does not hold",
        lambda: an_op()(2**40),
        ArgumentError,
        "a number must fit int32, got 1099511627776. Pass an array of another dtype, "
        "or set `jax_enable_x64`.",
    ),
    Row(
        "A shape in place of an argument of a dataflow",
        lambda: an_op()(jax.ShapeDtypeStruct((2,), jnp.float32)),
        ArgumentError,
        "a dataflow must be called with arrays, numbers or futures, got "
        "ShapeDtypeStruct(shape=(2,), dtype=float32). Pass shapes to `dataflow`, which "
        "runs nothing.",
    ),
    Row(
        "A future that is donated and used by one dataflow",
        one_future_twice,
        ArgumentError,
        "a future that an op takes the memory of must be one argument of its dataflow, "
        "got it twice. Leave it out of `donate`.",
    ),
    Row(
        "A function of a slice that returns nothing",
        lambda: an_op(lambda x: None)(np.ones(2)),
        ArgumentError,
        "`fn` must return arrays, got None from `lambda`. Return what it computes.",
    ),
    Row(
        "Specs that do not divide",
        lambda: an_op(jnp.sin, P("devices"))(np.ones(3)),
        ArgumentError,
        "`in_specs` of op `sin` must fit an array of shape [3], got P('devices',): "
        "dimension 0 of size 3 does not divide by 2. Change the spec, or the shape.",
    ),
    Row(
        "A function of a slice that closes over large arrays",
        closing_over_101_mib,
        ArgumentError,
        "op `lambda` must take large arrays as arguments, got 101 MiB that it closes "
        "over, at train.py:12 in flow. Place them once with `pw.put(arrays, slice)`, "
        "and pass what that returns.",
    ),
    Row(
        "An op that donates an argument that it does not have",
        lambda: an_op(donate=1),
        ArgumentError,
        "`donate` must be positions of arguments of `lambda`, got 1: it takes fewer. "
        "Count from 0.",
    ),
    Row(
        "A position of an argument that is no whole number",
        lambda: an_op(donate=1.5),
        ArgumentError,
        "`donate` must be a whole number, got 1.5. Use 1.",
    ),
    Row(
        "A step of `rep.compile` on a slice, with specs",
        lambda: an_op(replicas(2).compile(lambda s, b: (s, {})), P()),
        ArgumentError,
        "`in_specs`, `out_specs` and `donate` must be left out for a step of "
        "`rep.compile`, got P(), None and (). It has the layouts of its strategy, and "
        "donates its state.",
    ),
    Row(
        "A step with checks on an island that is a process",
        checked_where_it_is_connected_to,
        ArgumentError,
        "`f` must be a step without `checks` and `check_first_updates` on an island "
        "that is a process, got one with them. Leave them out there, or use "
        "`controller.local`.",
    ),
    Row(
        "An array of half bytes on a slice",
        lambda: an_op()(jnp.ones(2, jnp.int4)),
        ArgumentError,
        "op `lambda` must take arrays of whole bytes, got int4[2] at train.py:12 in "
        "<lambda>. Pass int8, and cast in its function.",
    ),
    Row(
        "An op that donates what is used later",
        lambda: dataflow(lambda op, x: op(x) + op(x), donate=(0,)),
        ArgumentError,
        "op `lambda` must donate what nothing else uses, got float32[2] that is used "
        "again at train.py:12 in <lambda>. Leave it out of `donate`, or use what the "
        "op returns.",
    ),
    Row(
        "An op that is hidden in a loop of JAX",
        lambda: dataflow(lambda op, x: lax.fori_loop(0, 2, lambda _, y: op(y), x)),
        ArgumentError,
        "op `lambda` must be called by the dataflow itself, got a call inside of "
        "`scan` at train.py:12 in <lambda>. Call it in a Python loop or function, or "
        "make `scan` one op with all of it.",
    ),
    Row(
        "An operation of a dataflow that belongs to no slice",
        lambda: dataflow(lambda op, x: (op(x), x + 1)),
        ArgumentError,
        "`add` must belong to a slice, got no value of a slice at train.py:12 in "
        "<lambda>. Do it inside of a function of `pw.fn`, or after `result()`.",
    ),
    Row(
        "A dataflow that returns its argument",
        lambda: dataflow(lambda op, x: (op(x), x)),
        ArgumentError,
        "`pw.program` must be given a function that returns results of ops, got one "
        "that returns an argument or an array from outside of it. Return it outside "
        "of the dataflow.",
    ),
    Row(
        "A dataflow that returns nothing",
        lambda: dataflow(lambda op, x: (op(x), None)[1]),
        ArgumentError,
        "`pw.program` must be given a function that returns results of ops, got None "
        "from one. Return what its ops return.",
    ),
    Row(
        "A dataflow that closes over large arrays",
        lambda: dataflow(lambda op, x: op(jnp.asarray(LARGE))),
        ArgumentError,
        "the dataflow must take large arrays as arguments, got 101 MiB that it closes "
        "over, at train.py:12 in <lambda>. Place them once with `pw.put(arrays, "
        "slice)`, and pass what that returns.",
    ),
    Row(
        "A number in place of a function of a slice",
        lambda: an_op(3),
        ArgumentError,
        "`f` must be a function, got int. Pass the function itself.",
    ),
    Row(
        "An argument of an op that is no array",
        lambda: an_op()("train"),
        ArgumentError,
        "arguments of ops must be arrays, numbers or futures, got 'train'. Bind others "
        "by `functools.partial` before `pw.fn`.",
    ),
    Row(
        "Specs that are none",
        lambda: an_op(jnp.sin, "devices"),
        ArgumentError,
        "`in_specs` must be partition specs, got 'devices'. Use "
        "`jax.sharding.PartitionSpec`.",
    ),
    Row(
        "Specs of an axis that the slice has not",
        lambda: an_op(jnp.sin, P("x")),
        ArgumentError,
        "`in_specs` must name axes of slice0 (2 on island0), which are ['devices'], "
        "got P('x',). Make the slice with `axes={'x': ...}`, or change the spec.",
    ),
    Row(
        "Specs of another tree",
        lambda: an_op(jnp.add, (P(),))(np.ones(2), np.ones(2)),
        ArgumentError,
        "`in_specs` of op `add` must be a spec, or a prefix of the tree that it is "
        "for, got (P(),). Pass a spec, or a tree of them, for each of PyTreeDef((*, "
        "*)).",
    ),
    Row(
        "A name in place of a position to donate",
        lambda: an_op(jnp.sin, donate=("x",)),
        ArgumentError,
        "`donate` must be a whole number, got 'x'. Use 1.",
    ),
    Row(
        "Axes of a slice without sizes",
        lambda: islands().slice(2, axes=["x"]),
        ArgumentError,
        "`axes` must be a mapping of names to sizes, got ['x']. Pass `{'x': 2}`.",
    ),
    Row(
        "An island by a number",
        lambda: islands().slice(1, island=0),
        ArgumentError,
        "`pw.slice` must ask for an island by its name, got 1 devices, island 0. There "
        "is island0 with 2 devices of kind cpu.",
    ),
    Row(
        "A dataflow that is called with other shapes than it was traced for",
        traced_for_another_shape,
        ArgumentError,
        "dataflow `lambda` must be called with the structure, shapes, dtypes and "
        "slices that it was traced for, got float32[3] where leaf 0 was float32[2]. "
        "Call the function itself, which is traced for each.",
    ),
    Row(
        "Stages of a pipeline that cannot be shared out over its slices",
        lambda: pipeline(count=3),
        ArgumentError,
        "`stages` must be as many as `slices`, or a multiple of them, got 3 on 2 "
        "slices. Change either.",
    ),
    Row(
        "Strategies of some stages of a pipeline",
        lambda: pipeline(strategy=[None]),
        ArgumentError,
        "`strategy` must be one for all, or one for each of the 2 stages, got [None]. "
        "Write None for a stage whose arrays are whole.",
    ),
    Row(
        "A name in place of a stage's strategy",
        lambda: pipeline(strategy=["fsdp", None]),
        ArgumentError,
        "`strategy` must be a strategy, got 'fsdp'. Call what builds it: "
        "`strategies.fsdp()`.",
    ),
    Row(
        "Stages whose gradients travel compressed",
        lambda: pipeline(
            strategy=strategies.data_parallel([Rule(pattern="*", compress="int8")])
        ),
        ArgumentError,
        "`strategy` must cut the arrays of a stage and do no more, got data_parallel "
        "with 'int8' for '*'. Leave `synchronise`, `compress` and `uneven=\"pad\"` "
        "out.",
    ),
    Row(
        "A stage on a slice with other axes than its strategy",
        lambda: pipeline(strategy=strategies.fsdp(), devices=2),
        ArgumentError,
        "`slices` must have the axes of the strategy of their stage, got slice0 (2 on "
        "island0) with {'devices': 2} for fsdp. Make it by `pw.slice(2, "
        "axes={'replica': 1, 'shard': 2, 'model': 1})`.",
    ),
    Row(
        "A microbatch that does not divide over the devices of a stage",
        lambda: pipeline(
            strategy=strategies.fsdp(),
            devices=2,
            axes=strategies.fsdp().sizes(2),
            x=np.ones(6, np.float32),
        ),
        ArgumentError,
        "`x` must divide evenly over 2 microbatches, each in 2 pieces, got 6 examples. "
        "Use 4.",
    ),
    Row(
        "An optimizer that needs the loss",
        lambda: pipeline(optimizer=optax.polyak_sgd()),
        ArgumentError,
        "`optimizer` must need gradients, its state and parameters alone, got one that "
        "needs 'value', too. Use another.",
    ),
    Row(
        "A schedule without a name that is known",
        lambda: pipeline(schedule="1f1b"),
        ArgumentError,
        "`schedule` must be one of 'gpipe', 'one_f_one_b', 'interleaved', got '1f1b'. "
        "Use one of these.",
    ),
    Row(
        "Several stages a slice, in turn forward and backward",
        lambda: pipeline(count=4, schedule="one_f_one_b"),
        ArgumentError,
        "`schedule` must have one stage on each slice, got 4 stages on 2 slices for "
        "'one_f_one_b'. Use 'interleaved'.",
    ),
    Row(
        "A schedule that forgets a microbatch",
        lambda: pipeline(
            schedule=in_another_order(lambda orders: [ops[:-1] for ops in orders])
        ),
        ArgumentError,
        "`schedule` must have each op of 2 stages and 2 microbatches once, got "
        "backward of stage 0, microbatch 1 0 times. Have it return every one, and no "
        "other.",
    ),
    Row(
        "A schedule that waits for ever",
        lambda: pipeline(
            schedule=in_another_order(lambda orders: [ops[::-1] for ops in orders])
        ),
        ArgumentError,
        "`schedule` must run an op after what it needs, got backward of stage 0, "
        "microbatch 1 ahead of forward of stage 0, microbatch 1, for which all slices "
        "wait. Put it later in the list of its slice.",
    ),
    Row(
        "A schedule that runs stages on other slices",
        lambda: pipeline(schedule=in_another_order(lambda orders: orders[::-1])),
        ArgumentError,
        "`schedule` must run stage k on slice k modulo 2, got forward of stage 1, "
        "microbatch 0 on slice 0. Move it to the list of slice 1.",
    ),
    Row(
        "A schedule of some of the slices",
        lambda: pipeline(schedule=in_another_order(lambda orders: orders[:1])),
        ArgumentError,
        "`schedule` must return a list of ops for each of 2 slices, got 1 lists. "
        "Return an empty one for a slice that runs none.",
    ),
    Row(
        "Fewer targets than examples, in a pipeline",
        lambda: pipeline(targets=np.ones(2, np.float32)),
        ArgumentError,
        "`x` and `targets` must have as many examples in each array, got [2, 4]. Pass "
        "a row for each example.",
    ),
    Row(
        "Parameters of some stages of a pipeline",
        lambda: pipeline(params=[{}]),
        ArgumentError,
        "`params` must be a list with a tree for each of the 2 stages, got 1. Pass "
        "`{}` for a stage without parameters.",
    ),
    Row(
        "Parameters of a stage that are whole numbers",
        lambda: pipeline(params=[{"w": np.ones(1, np.int32)}] * 2),
        ArgumentError,
        "`params` must be floating point arrays, got int32 for `0/w`. Bind others to "
        "the stage by `functools.partial`.",
    ),
    Row(
        "A shared parameter that two stages have",
        lambda: pipeline(shared={"1/w": "0/w"}),
        ArgumentError,
        "`shared` must have paths of parameters that are None, each with that of the "
        "array in its place, got '1/w' and '0/w' of ['0/w', '1/w']. Write both as "
        "'stage/name'.",
    ),
    Row(
        "An optimizer in which arrays of several stages meet",
        lambda: pipeline(
            optimizer=optax.flatten(optax.sgd(0.1)),
            params=[{"w": np.ones(2, np.float32)}] * 2,
        ),
        ArgumentError,
        "`optimizer` must combine no arrays of several stages, only numbers such as "
        "norms, got `concatenate` of arrays of stages 0 and 1. Use one that "
        "keeps parameters apart.",
    ),
    Row(
        "A stage whose results have no gradient",
        lambda: pipeline(stages=[of_whole_numbers] * 2),
        ArgumentError,
        "`stages[0]` must return floating point numbers, which have a gradient, got "
        "int32[2]. Pass whole numbers in the batch, or as floats.",
    ),
    Row(
        "A loss of each example",
        lambda: pipeline(loss=lambda y, _: y),
        ArgumentError,
        "`loss` must return a scalar, or one `LocalSum`, got (2,). Add up, or take the "
        "mean.",
    ),
    Row(
        "A batch that does not divide over microbatches",
        lambda: pipeline(x=np.ones(5, np.float32)),
        ArgumentError,
        "`x` must divide evenly over 2 microbatches, got 5 examples. Use 4.",
    ),
    Row(
        "An op under `jax.grad` outside of a dataflow",
        lambda: jax.grad(an_op())(1.0),
        ArgumentError,
        "op `lambda` must be called by a dataflow of its own `pw`, got a call that "
        "JAX traces outside of one. Decorate the function that calls `jax.grad`, "
        "`jax.vmap` or the like by `pw.program`.",
    ),
    Row(
        "No address of an island",
        lambda: controller.connect([]),
        ArgumentError,
        "`addresses` must be a list of at least one, got []. Pass that of each "
        "`IslandServer`.",
    ),
    Row(
        "A spare island's address that is in no list",
        lambda: controller.connect(["host:7000"], spares="host:7001"),
        ArgumentError,
        "`spares` must be a list with an address, or a list of them, for each island, "
        "got 'host:7001'. Pass that of each `IslandServer`.",
    ),
    Row(
        "An island without an address",
        lambda: controller.connect(["host:7000", []]),
        ArgumentError,
        "`addresses` must be a list with an address, or a list of them, for each "
        "island, got ['host:7000', []]. Pass that of each `IslandServer`.",
    ),
    Row(
        "Devices that do not divide over the processes of an island",
        lambda: controller.start(devices=3, processes=2),
        ArgumentError,
        "`devices` must divide by `processes`, got 3 for 2. Use 4.",
    ),
    Row(
        "An island of two processes that has one address",
        connected_to_one_of_two,
        ArgumentError,
        "`addresses` must be those of all processes of an island, [0, 1], got those of "
        "[1] for one. Pass a list of one for each process of its `jax.distributed` "
        "group in its place.",
    ),
    Row(
        "Processes of two groups as one island",
        connected_to_two_groups_as_one,
        ArgumentError,
        "`addresses` must be those of one `jax.distributed` group for an island, got "
        "those of 2 for one. Pass a list of its own for each.",
    ),
    Row(
        "Islands that are lost at once",
        lambda: controller.start(lost_after_s=0),
        ArgumentError,
        "`lost_after_s` must be above 0, got 0. Use 10, or more.",
    ),
    Row(
        "A callback on an island that was connected to",
        called_back_where_it_is_connected_to,
        ArgumentError,
        "op `op` must be one that `jax.export` takes to run on island0, got one that "
        "it does not at train.py:12 in op: serialization of host_callbacks is not yet "
        "implemented. Use `controller.start`, which takes callbacks, or "
        "`controller.local`.",
    ),
    Row(
        "A function of the host without what it returns",
        lambda: host_op(result=3),
        ArgumentError,
        "`result` must be a tree of shapes and dtypes of NumPy, got 3. Pass a "
        "`jax.ShapeDtypeStruct` for each array that the function returns.",
    ),
    Row(
        "A random key for a function of the host",
        lambda: host_op()(jax.random.key(0)),
        ArgumentError,
        "`square` of `pw.host` must take arrays of NumPy, got key<fry>. Pass "
        "`jax.random.key_data(key)`, and call `jax.random.wrap_key_data` in it.",
    ),
    Row(
        "A function of the host under `jax.grad`",
        lambda: host_dataflow(lambda op: jax.grad(lambda x: op(x).sum())),
        ArgumentError,
        "`square` of `pw.host` must not be differentiated, got a call under "
        "`jax.grad`. Call it before, and pass what it returns.",
    ),
    Row(
        "A function of the host under `jax.vmap`",
        lambda: host_dataflow(lambda op: jax.vmap(op), (3, 2)),
        ArgumentError,
        "`square` of `pw.host` must not be mapped, got a call under `jax.vmap` that "
        "returns shapes [(3, 2)], not [(2,)]. Pass it the whole arrays.",
    ),
    Row(
        "A function of the host that returns another shape",
        lambda: host_op()(np.ones(3, np.float32)).result(),
        OpFailedError,
        "op `square` on island0 failed: `square` must return what `result` of "
        "`pw.host` says, ShapeDtypeStruct(shape=(2,), dtype=float32), got "
        "ShapeDtypeStruct(shape=(3,), dtype=float32). Change one of them.",
    ),
    Row(
        "A negative number of spare islands",
        lambda: controller.start(spares=-1),
        ArgumentError,
        "`spares` must be at least 0, got -1. Use 1.",
    ),
    Row(
        "A future of an island that was lost",
        lambda: on_a_lost_island(lambda pw, op, lost: op(lost)),
        IslandLostError,
        "a future must be on an island that is there, got one that was lost with "
        "island0, for its server is gone. Compute it again, or from a copy that "
        "another island has by `pw.copy`.",
    ),
    Row(
        "A slice whose island was lost, and no other has its devices",
        lambda: on_a_lost_island(lambda pw, op, lost: op(np.ones(2))),
        IslandLostError,
        "a slice must have an island, got slice0 (1 on island0), which was lost, for "
        "its server is gone: no other island has 1 devices of kind cpu for it. Pass "
        "`spares`, or start again from what was saved.",
    ),
    Row(
        "A slice, when all islands were lost",
        lambda: on_a_lost_island(lambda pw, op, lost: pw.slice(1)),
        ArgumentError,
        "`pw.slice` must have an island, got none: all were lost. Start others, and "
        "another controller.",
    ),
    Row(
        "A program for an island that is no export",
        lambda: sent_to_an_island(lambda island: island.load("a", 0, {}, b"code")),
        ArgumentError,
        "`program` must be the bytes of `jax.export`, got others (error). Send what "
        "`Exported.serialize` returns.",
    ),
    Row(
        "A message to an island out of its order",
        lambda: sent_to_an_island(lambda island: island.take("a", 3, [])),
        ArgumentError,
        "`number` must be the next of the sequence of island0, 0, got 3 with []. Send "
        "each message once, in order.",
    ),
    Row(
        "A message of another controller",
        lambda: sent_to_an_island(lambda island: island.take("b", 0, [])),
        ArgumentError,
        "`session` must be that of the island's controller, got another. The "
        "controller was given up, or closed: connect again.",
    ),
    Row(
        "A call after `pw` was closed",
        called_when_closed,
        ArgumentError,
        "`pw` must be open, got one that was closed. Call it inside of its `with` "
        "statement.",
    ),
    Row(
        "A result that was not read before `pw` was closed",
        read_when_closed,
        ArgumentError,
        "`pw` must be open to read what was not read before of island0, got one that "
        "was closed. Read it inside of its `with` statement.",
    ),
    Row(
        "A future of a client that left",
        lambda: a_client_that_left(lambda op, future: future.result()),
        ArgumentError,
        "a future must be of a client that is there, got one of `alice`, which left. "
        "Read it inside of the client's `with` statement.",
    ),
    Row(
        "A function of a client that left",
        lambda: a_client_that_left(lambda op, future: op(np.ones(2))),
        ArgumentError,
        "a client must be there to call `lambda`, got `alice`, which left. Call it "
        "inside of its `with` statement.",
    ),
    Row(
        "Two clients of one name",
        two_clients_of_one_name,
        ArgumentError,
        "`name` must be of no other client of this `pw`, got 'alice'. Choose another, "
        "or close that client.",
    ),
    Row(
        "A weight of nothing",
        lambda: islands().client("alice", weight=0),
        ArgumentError,
        "`weight` must be above 0, got 0. Use 1 for an equal share.",
    ),
    Row(
        "An order of clients that is none",
        lambda: controller.local(islands=1, devices=2, order="lifo"),
        ArgumentError,
        "`order` must be one of 'weight', 'fifo', got 'lifo'. Use one of these.",
    ),
    Row(
        "A function of a slice that was given back",
        a_closed_slice,
        ArgumentError,
        "`lambda` must be of a slice that is open, got slice0 (1 on island0), which "
        "was closed. Make another by `pw.slice(n)`, and place its arrays again.",
    ),
    Row(
        "A dataflow that can never fit its slice's memory",
        larger_than_its_slice,
        ArgumentError,
        "`lambda` must fit `memory_bytes` of slice0 (1 on island0), got 7.81 KiB of "
        "arguments and results on each device for 1 KiB. Ask for more by `pw.slice`, "
        "or for less by one call.",
    ),
    Row(
        "A sampler of a replay table that is none",
        lambda: lp.ReplayTable(64, sampler="uniform"),
        ArgumentError,
        "`sampler` must be one that `lp.uniform`, `lp.prioritised`, `lp.fifo` or "
        "`lp.lifo` returns, got 'uniform'. Pass `lp.uniform()`.",
    ),
    Row(
        "An exponent below 0",
        lambda: lp.prioritised(-0.6),
        ArgumentError,
        "`exponent` must be from 0 to 8, got -0.6. Use 0.6.",
    ),
    Row(
        "A limiter that is none",
        lambda: lp.ReplayTable(64, limiter=256),
        ArgumentError,
        "`limiter` must be a `RateLimiter`, got 256. Pass "
        "`lp.RateLimiter(min_size=1)`.",
    ),
    Row(
        "A replay table too small for its limiter",
        lambda: lp.ReplayTable(64, limiter=lp.RateLimiter(min_size=100)),
        ArgumentError,
        "`capacity` must be at least `min_size`, 100, got 64: no batch could ever be "
        "drawn. Use 400.",
    ),
    Row(
        "A replay table too small for a batch",
        lambda: replay_table().take(65, timeout_s=0),
        ArgumentError,
        "`capacity` must be at least 65, for samples of 65 (`batch_size` x "
        "`samples_per_call`), got 64. Use 260.",
    ),
    Row(
        "A replay table too small for an insert",
        lambda: insert_rows(replay_table(), 65),
        ArgumentError,
        "`capacity` must be at least 65, for inserts of 65, got 64. Use 260, or insert "
        "fewer at once.",
    ),
    Row(
        "A limiter's error without a ratio",
        lambda: lp.RateLimiter(error=10),
        ArgumentError,
        "`error` must be None without `samples_per_insert`, got 10. Leave it out, or "
        "pass `samples_per_insert`.",
    ),
    Row(
        "A limiter's ratio without an error",
        lambda: lp.RateLimiter(samples_per_insert=8),
        ArgumentError,
        "`error` must be a number with `samples_per_insert=8`, got None. Use 80.",
    ),
    Row(
        "A limiter's error below its ratio",
        lambda: lp.RateLimiter(samples_per_insert=8, error=4),
        ArgumentError,
        "`error` must be finite, and at least 1 and `samples_per_insert`, got 4 for 8. "
        "Use 80.",
    ),
    Row(
        "A limiter that can never let a batch pass",
        lambda: replay_table(
            limiter=lp.RateLimiter(samples_per_insert=8, error=16)
        ).take(32, timeout_s=0),
        ArgumentError,
        "`error` must be at least 20, for samples of 32 (`batch_size` x "
        "`samples_per_call`) and inserts of 1 at 8 rows drawn per insert, got 16: none "
        "could ever pass. Use 40, or take or insert fewer at once.",
    ),
    Row(
        "A priority below 0",
        lambda: insert_rows(replay_table(), 2, priorities=[1, -1]),
        TrajectoryError,
        "`priorities` of actor/0 must be finite and at least 0, got -1.0. Pass None "
        "for the largest so far.",
    ),
    Row(
        "Another number of priorities than of rows",
        lambda: insert_rows(replay_table(), 2, priorities=[1]),
        TrajectoryError,
        "`priorities` of actor/0 must have one for each row, got 1 for 2. Pass None "
        "for the largest so far.",
    ),
    Row(
        "A new priority that is NaN",
        lambda: replay_table().update_priorities(np.array([0]), [float("nan")]),
        ArgumentError,
        "`values` must be finite and at least 0, got nan. Use the absolute value of "
        "the error, and skip updates with NaN.",
    ),
    Row(
        "Another number of new priorities than of keys",
        lambda: replay_table().update_priorities(np.zeros(1, np.int64), [1, 2]),
        ArgumentError,
        "`values` must have one for each key, got 2 for 1. Pass the priorities of that "
        "batch.",
    ),
    Row(
        "A priority of a key that no row had",
        lambda: replay_table().update_priorities(np.array([-3]), [1.0]),
        ArgumentError,
        "`keys` must be keys that this table gave, got -3. Pass `Taken.keys`.",
    ),
    Row(
        "A save of a replay table without a directory",
        lambda: replay_table().save(),
        ArgumentError,
        "`checkpoint_dir` must be a directory for `save`, got None. Give the table "
        "one.",
    ),
    Row(
        "A replay table of turns with a sampler that needs an order of its own",
        lambda: replay_turns(sampler="fifo"),
        ArgumentError,
        "`sampler` must be one that `lp.uniform` or `lp.prioritised` returns, where "
        "actors take turns, got 'fifo'. Pass `lp.uniform()`.",
    ),
    Row(
        "New rows of a batch that are no whole turns",
        lambda: replay_turns(rows_per_turn=3),
        ArgumentError,
        "`new_rows_per_batch` must be a multiple of `rows_per_turn`, got 2 and 3. Use "
        "3.",
    ),
    Row(
        "A replay table of turns too small for its first rows",
        lambda: replay_turns(min_size=65),
        ArgumentError,
        "`capacity` must be at least 66, the rows before the first batch, got 64. Use "
        "264.",
    ),
    Row(
        "A replay table of turns without a directory",
        lambda: replay_turns(checkpoint_dir=None),
        ArgumentError,
        "`checkpoint_dir` must be a directory, got None. Give the table one.",
    ),
    Row(
        "Another batch than that of a replay table of turns",
        lambda: begun_turns().take(5, timeout_s=0),
        ArgumentError,
        "`count` must be `batch_size`, got 5 for 4. Use 4.",
    ),
    Row(
        "A replay table of turns that was not begun",
        lambda: replay_turns().take(4, timeout_s=0),
        TableRestartedError,
        "`begin` must be called first, got no call. Pass the last batch's cut.",
    ),
    Row(
        "A new priority below 0, of a table of turns",
        lambda: one_replay_batch().update_priorities(np.arange(2), [1, -1]),
        ArgumentError,
        "`values` must be at least 0, got -1.0. Use the absolute value of the error.",
    ),
    Row(
        "A new priority of a batch that was not drawn yet",
        lambda: one_replay_batch().update_priorities(np.array([4]), [1.0]),
        ArgumentError,
        "`keys` must be keys that this table gave, got 4 where batch 1 of 4 is next. "
        "Pass `Taken.keys`.",
    ),
    Row(
        "A cut of a replay table with other settings",
        lambda: begun_turns(begun_order(seed=1)),
        ArgumentError,
        "`cut` must be of this table's settings, got one of other seed. Go on as the "
        "run was begun, or begin it anew.",
    ),
    Row(
        "A cut of a batch that a replay table of turns has not",
        lambda: begun_turns(begun_order()),
        ArgumentError,
        "`cut` must be of a batch in `checkpoint_dir`, got batch 3 for runs/a, which "
        "ends at batch 0. Go on from a checkpoint of the learner's up to there, or "
        "begin the run anew.",
    ),
    Row(
        "A cut of another run on a replay table of turns",
        lambda: one_replay_batch().begin(
            Cut(batch=1, snapshots={"actor/0": None}, order=begun_order())
        ),
        ArgumentError,
        "`cut` must be of the run in `checkpoint_dir`, got one of another run. Give "
        "each run a directory of its own, or begin it anew.",
    ),
    Row(
        "A replay table of turns in a directory of a run",
        lambda: replay_turns(checkpoint_dir=folder("config")),
        CheckpointMismatchError,
        "`checkpoint_dir` must be empty, or of a `ReplayTurns`, got runs/a with "
        "config. Choose another directory.",
    ),
    Row(
        "A replay table in a directory of a run",
        lambda: replay_table(checkpoint_dir=folder("config")),
        CheckpointMismatchError,
        "`checkpoint_dir` must be empty, or of a replay table, got runs/a with config. "
        "Choose another directory.",
    ),
    Row(
        "A replay table whose saved rows are of another form",
        lambda: replay_table(
            checkpoint_dir=saved_rows(), like={"reward": np.zeros(4, np.float32)}
        ),
        CheckpointMismatchError,
        "`checkpoint_dir` must hold rows of this table's form, got others: "
        "`trajectories` of checkpoint_dir must have the form of the first ones: "
        "`reward` is float32[2,3] instead of float32[2,4]. Choose another "
        "directory.",
    ),
    Row(
        "Rows of another form than those in the checkpoint of a replay table",
        lambda: replay_table(checkpoint_dir=saved_rows()).insert(
            {"reward": np.zeros((1, 4), np.float32)}, actor="actor/0", version=0
        ),
        TrajectoryError,
        "`trajectories` of actor/0 must have the form of those in `checkpoint_dir`, "
        "{'reward': 'float32[3]'} in runs/a, got {'reward': 'float32[4]'}. Choose "
        "another directory, or insert rows as before.",
    ),
    Row(
        "Rows of a class that the checkpoint of a replay table cannot hold",
        lambda: replay_table(checkpoint_dir=folder()).insert(
            collections.namedtuple("Step", "reward", module="train")(np.zeros((1, 3))),
            actor="actor/0",
            version=0,
        ),
        TrajectoryError,
        "`trajectories` of actor/0 must be what `checkpoint_dir` can hold: `value` "
        "must be of a type that can be sent, got a train.Step, which is not "
        "registered. Register it with `rpc.register`, or send `tuple` of it.",
    ),
    Row(
        "A cut of a batch whose rows a replay table of turns has no longer",
        lambda: begun_turns(
            begun_order(), checkpoint_dir=folder("turns-000000000009-000000000000018")
        ),
        ArgumentError,
        "`cut` must be of a batch in `checkpoint_dir`, got batch 3 for runs/a, which "
        "has not all its rows. Begin the run anew: without the learner's checkpoints.",
    ),
    Row(
        "A replay table whose saved rows are damaged",
        lambda: replay_table(checkpoint_dir=saved_rows(damaged=True)),
        CheckpointError,
        "`table` must be as it was written, got its checksum is another in runs/a. "
        "Move that folder away: the table begins empty.",
    ),
    Row(
        "A dataflow that waits for memory when `pw` is closed",
        closed_while_it_waits_for_memory,
        ArgumentError,
        "dataflow `put` of client `main` must be able to start, got a `pw` that was "
        "closed while it waited for memory. Drop futures before.",
    ),
]


@pytest.fixture(autouse=True)
def no_hang():
    """End the process, with all stacks, if a row waits for ever."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def neutral(message):
    """Replace places in this test by those of a user's script and runs."""
    message = re.sub(r"\S+\.py:\d+", "train.py:12", message)
    message = re.sub(r"on one of [\d.]+ .iB", "on one of 100 GiB", message)
    message = message.replace("Denied: by a test", "Denied: Access Denied")
    return re.sub(r"/[^' ]*/bad-[a-z0-9_]+", "runs/a", message)


def place_of(error):
    """Return the heading for the folder that raised; checks of arguments aside."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [pathlib.Path(name) for name in frames if name.startswith(str(LIBRARY))]
    folders = [path.relative_to(LIBRARY).parts[0] for path in ours]
    found = (PLACES[each] for each in reversed(folders) if each in PLACES)
    return next(found, PLACES["replicator.py"])


def places_in_document():
    """Return the headings of the rows as the document has them, by their names."""
    parts = re.split(r"(?m)^## (.*)$", DOCUMENT.read_text())[1:]
    return {
        line.rsplit(" | ", 2)[1]: heading
        for heading, rows in zip(parts[::2], parts[1::2], strict=True)
        for line in rows.splitlines()
        if line.count(" | ") >= 2
    }


PLACED = places_in_document()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_input_is_refused_in_full_words(row, monkeypatch):
    monkeypatch.setenv("REPLICATOR_TRACEBACK", "full")  # it names the place
    with pytest.raises(row.kind) as found:
        row.provoke()
    assert type(found.value) is row.kind
    assert neutral(str(found.value)) == row.message
    assert place_of(found.value) == PLACED[row.name], "write the document anew"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_message_names_its_subject_and_one_remedy(row):
    assert re.search(r"`[^`]+`", row.message)
    assert ", got " in row.message or row.kind is ReplicationError
    assert row.message.endswith((".", "}"))  # a sentence, or lines of code


def test_the_document_is_this_table():
    assert DOCUMENT.read_text() == document(PLACED)


def test_an_uneven_last_batch_whose_mask_is_read_is_no_error():
    result = run(
        [regression_batch(), regression_batch(10)], make=weighted_trainer, steps=2
    )
    assert result.examples == 26


def document(places):
    """Write the table as a page, by headings of the rows' names."""
    lines = [
        "# Errors",
        "",
        "Messages first, grouped by the part of the library that raises them. Each",
        "names the argument, its rule, the value found and a remedy. Each class also",
        "inherits the builtin in brackets: `except ValueError` works. Paths in",
        "messages are examples. All classes:",
        "[`replicator.errors`](api/replicator.errors.md). `tests/test_errors.py` holds",
        "this page to what the library says; `python -m tests.test_errors` writes it.",
        "",
        "A traceback shows the frames of your program alone, yours last, whatever",
        "the library and JAX did between them; so do the causes, and the members of",
        "groups. `REPLICATOR_TRACEBACK=full` shows all frames,",
        "`JAX_TRACEBACK_FILTERING=off` those of JAX; the bundle of a run that failed",
        "keeps all.",
    ]
    for heading in dict.fromkeys(PLACES.values()):
        rows = [row for row in ROWS if places[row.name] == heading]
        if rows:
            lines += ["", f"## {heading}", ""]
            lines += ["| Message | Bad input | Error |", "|---|---|---|"]
        for row in rows:
            message = escaped(" ".join(row.message.splitlines()))
            builtin = next(
                each.__name__
                for each in row.kind.__mro__
                if each.__module__ == "builtins"
            )
            lines.append(
                f"| {message} | {row.name} | `{row.kind.__name__}` ({builtin}) |"
            )
    return "\n".join(lines) + "\n"


def escaped(message):
    """Return a message as Markdown of a table that shows its characters."""
    parts = re.split(r"(`[^`]*`)", message.replace("|", r"\|"))
    return "".join(p if p[:1] == "`" else re.sub("[*<]", r"\\\g<0>", p) for p in parts)


def raised_in(row):
    """Return the heading of a row."""
    try:
        row.provoke()
    except row.kind as error:
        return place_of(error)


if __name__ == "__main__":
    os.environ["REPLICATOR_TRACEBACK"] = "full"
    DOCUMENT.write_text(document({row.name: raised_in(row) for row in ROWS}))

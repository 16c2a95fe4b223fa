"""What the processes of these tests run: each returns values that can be compared."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from replicator import InputOptions, Replicator
from replicator.base.mesh import replicated
from replicator.errors import ArgumentError
from replicator.hooks import Callback, Hook, StateCallback, every
from replicator.training.best_metric import Follow
from replicator.training.evaluate_hook import EvaluateEvery
from tests.steps import apply, mlp_loss, regression_batch, trainer

STEPS = 10


def host(tree):
    """Fetch arrays that this process can read whole."""
    return jax.tree.map(np.asarray, jax.device_get(tree))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def global_batches(count=5, examples=24):
    return [regression_batch(examples, seed=seed) for seed in range(count)]


def laws(directory):
    """Train and evaluate in every way that must not depend on processes."""
    found = {
        "fast": train(Replicator(compilation_cache=False), directory),
        "ordered": train(Replicator(compilation_cache=False, reduction="ordered")),
        "accumulated": train(Replicator(compilation_cache=False), accumulate=2),
        "own_loop": own_loop(Replicator(compilation_cache=False)),
        "evaluated": evaluate(Replicator(compilation_cache=False)),
        "uneven": uneven(Replicator(compilation_cache=False)),
    }
    return found


def train(rep, directory=None, **options):
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9)))
    losses = []
    note = Callback(
        lambda event: losses.append(event.metrics["loss"]), every(n_steps=1)
    )
    result = rep.run(
        step_fn,
        global_batches(),
        init_fn=init_fn,
        steps=STEPS,
        directory=directory,
        write_every=1,
        hooks=[note],
        display=False,
        **options,
    )
    return {
        "state": host(result.state),
        "losses": np.asarray(losses),
        "examples": result.examples,
    }


def own_loop(rep):
    """Count what each replica saw, and report it for each replica."""
    optimizer = rep.wrap_optimizer(optax.sgd(0.1))
    init_fn, _ = trainer(optimizer)

    def own_init(key):
        return init_fn(key) | {"seen": replicator.PerReplica(jnp.zeros(()))}

    def step_fn(state, batch):
        grads = jax.grad(mlp_loss)(state["params"], batch)
        seen = replicator.PerReplica(state["seen"].value + batch["y"].sum())
        after = apply(optimizer, state, grads) | {"seen": seen}
        return after, {"y": replicator.PerReplica(batch["y"].sum())}

    step, state = rep.compile(step_fn), rep.init(own_init)
    reported = []
    for batch in global_batches():
        state, metrics = step(state, batch)
        reported.append(np.asarray(metrics["y"]))
    return {"params": host(state["params"]), "reported": np.stack(reported)}


def evaluate(rep):
    init_fn, _ = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    state = rep.init(init_fn)

    def eval_fn(state, batch):
        mask = batch["mask"]
        loss = (batch["x"].sum(1) - batch["y"]) ** 2
        return {
            "loss": loss,
            "ids": replicator.Sum((mask * batch["id"]).sum()),
            "seen": replicator.Max(batch["id"].max()),
        }

    rows = regression_batch(1003) | {"id": np.arange(1003, dtype=np.float32)}
    cut = [{k: v[at : at + 77] for k, v in rows.items()} for at in range(0, 1003, 77)]
    return rep.evaluate(eval_fn, cut, state=state, block=8)


def rows():
    """Predict a dataset, and report the rows of a batch in four microbatches."""
    rep = Replicator(compilation_cache=False)
    init_fn, train_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    state, ids = rep.init(init_fn), np.arange(1003, dtype=np.float32)

    def step_fn(state, batch):
        return train_fn(state, batch)[0], {"x": replicator.Concat(batch["x"])}

    predicted = rep.predict(lambda s, b: {"id": b}, [ids[:500], ids[500:]], state)
    [batch] = global_batches(1)
    _, metrics = rep.compile(step_fn, accumulate=3)(state, batch)
    return np.asarray(predicted["id"]), np.asarray(metrics["x"])


def uneven(rep):
    """Read an input function whose pipelines are of unlike lengths."""
    taken = []

    def input_fn(context):
        count = 3 + 2 * context.pipeline_index
        size = context.batch_size(24)
        base = 1000 * context.pipeline_index
        numbers = np.arange(base, base + count * size - 1, dtype=np.float32)
        return [{"x": numbers[at : at + size]} for at in range(0, len(numbers), size)]

    options = InputOptions(epochs=2)
    total = jax.jit(lambda x, mask: (x * mask).sum())
    with rep.batches(input_fn, options) as batches:
        for placed in batches:
            value = total(placed.value["x"], placed.value["mask"])
            taken.append((float(value), placed.examples, placed.padded))
    return taken


def timed(directory):
    """Note at which steps something is due by the clock."""
    rep = Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    due = []
    rep.run(
        step_fn,
        global_batches(),
        init_fn=init_fn,
        steps=200,
        hooks=[
            StateCallback(lambda event: due.append(event.step), every(seconds=0.01))
        ],
        display=False,
    )
    return due


def stopped(directory):
    """Stop early, while inputs are read that never end."""
    rep = Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))
    losses = iter([2.0, 1.0, 3.0, 3.0, 3.0])
    hook = EvaluateEvery(
        lambda state: {"loss": next(losses)},
        every(n_steps=3),
        follow=Follow(metric="loss", patience=2),
    )

    def input_fn(context):
        while True:
            yield regression_batch(context.batch_size(24), seed=context.pipeline_index)

    result = rep.run(
        step_fn, input_fn, init_fn=init_fn, steps=None, hooks=[hook], display=False
    )
    input_threads = [
        thread.name for thread in threading.enumerate() if "input" in thread.name
    ]
    return result.step, result.examples, hook.best, input_threads


def refusals(directory):
    """Return what is said where one process differs from the others."""
    here = jax.process_index()
    rep = Replicator(compilation_cache=False)
    init_fn, step_fn = trainer(rep.wrap_optimizer(optax.sgd(0.1)))

    def odd_init(key):
        state = init_fn(key)
        odd = jax.tree.map(lambda leaf: leaf + here, state["params"])
        return state | {"params": odd}

    def odd_step(state, batch):
        after, metrics = step_fn(state, batch)
        return after, metrics | ({"more": metrics["loss"] * 2} if here else {})

    def failing():
        yield regression_batch(24)
        if here:
            raise OSError("the disk of process 1 is gone")
        yield regression_batch(24)

    def empty_here(context):
        return [] if here else [regression_batch(12)]

    opened = itertools.count()

    def shuffled_anew(context):
        number = next(opened)
        return [regression_batch(12, seed=seed + here * number) for seed in range(9)]

    def refused(step_fn=step_fn, dataset=None, init_fn=init_fn, **options):
        options = {"steps": 3, "display": False} | options
        try:
            rep.run(step_fn, dataset or global_batches(), init_fn=init_fn, **options)
        except Exception as failure:
            return f"{type(failure).__name__}: {failure}"
        return None

    saved = {"dataset": shuffled_anew, "checkpoint_dir": Path(directory) / "saved"}
    assert refused(steps=2, **saved) is None
    return {
        "reread": refused(**saved),
        "seed": refused(seed=here),
        "steps": refused(steps=3 + here),
        "init": refused(init_fn=odd_init),
        "step_fn": refused(odd_step),
        "shape": refused(dataset=[regression_batch(24 + 12 * here)]),
        "content": refused(dataset=[regression_batch(24, seed=here)]),
        "count": refused(dataset=iter(global_batches(count=2 + here)), steps=None),
        "failure": refused(dataset=failing(), steps=None),
        "empty": refused(dataset=empty_here),
        "nothing": refused(),
    }


class DieAfter(Hook):
    """Kill this process after a step, once there is a checkpoint."""

    def __init__(self, directory, step):
        self._directory = Path(directory)
        self._step = step

    def on_state(self, event):
        if event.step <= self._step:
            return
        deadline_s = time.monotonic() + 60
        while not list(self._directory.glob("[0-9]" * 12)):
            assert time.monotonic() < deadline_s, "no checkpoint"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


class Seen(Hook):
    """Note for each step which examples it saw."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._folder.mkdir(exist_ok=True)

    def on_metrics(self, event):
        np.save(self._folder / f"{event.step}.npy", event.metrics["ids"])


def resumable(
    directory, die_after=None, strided=False, steps=STEPS, records=True, every_s=None
):
    """Train with a value of each replica's own, save every second step, perhaps die.

    `records` may be the URL of a bucket, too.
    """
    rep = Replicator(compilation_cache=False, reduction="ordered")
    optimizer = rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9))
    init_fn, _ = trainer(optimizer)
    root = Path(directory)

    def own_init(key):
        seen = replicator.PerReplica(jnp.zeros((2,)), on_resize="sum")
        return init_fn(key) | {"seen": seen}

    def step_fn(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        own = state["seen"].value + batch["y"].sum()
        ids = (
            jnp.zeros(96, jnp.int32)
            .at[batch["id"]]
            .add(batch["mask"].astype(jnp.int32))
        )
        after = apply(optimizer, state, grads)
        after |= {"seen": replicator.PerReplica(own, on_resize="sum")}
        return after, {"loss": loss, "ids": replicator.Sum(ids)}

    hooks = [Seen(root / "seen")]
    if die_after is not None:
        hooks.append(DieAfter(root / "checkpoints", die_after))
    result = rep.run(
        step_fn,
        _strided if strided else _numbered(96, 24),
        init_fn=own_init,
        steps=steps,
        directory=root / "records" if records is True else records or None,
        checkpoint_dir=root / "checkpoints",
        checkpoint_every=2 if every_s is None else every(seconds=every_s),
        write_every=1,
        hooks=hooks,
        display=False,
    )
    local = jax.tree.map(
        lambda leaf: np.stack([s.data for s in leaf.addressable_shards]),
        result.state["seen"].value,
    )
    return {
        "params": host(result.state["params"]),
        "opt": host(result.state["opt"]),
        "own": local,
        "examples": result.examples,
    }


def _numbered(count, size):
    rows = regression_batch(count) | {"id": np.arange(count, dtype=np.int32)}
    return [
        {name: leaf[at : at + size] for name, leaf in rows.items()}
        for at in range(0, count, size)
    ]


def _strided(context):
    """Deal examples out in turn: the j-th global batch is the same for any count."""
    rows = regression_batch(96) | {"id": np.arange(96, dtype=np.int32)}
    own = {
        n: x[context.pipeline_index :: context.num_pipelines] for n, x in rows.items()
    }
    size = context.batch_size(24)
    dataset = grain.MapDataset.range(len(own["id"]) // size)
    return dataset.map(
        lambda i: {name: leaf[i * size : (i + 1) * size] for name, leaf in own.items()}
    )


def unlike():
    """Read with a pipeline for each of three replicas, two of them in one process."""
    rep = Replicator(num_replicas=3, compilation_cache=False)

    def input_fn(context):
        return [{"x": np.full(4, context.pipeline_index, np.float32)}]

    options = InputOptions(mode="per_replica", epochs=1)
    everywhere = replicated(rep.mesh)
    own = jax.jit(lambda x: x.reshape(3, 4).mean(1), out_shardings=everywhere)
    with rep.batches(input_fn, options) as batches:
        means = [np.asarray(own(placed.value["x"])) for placed in batches]
    options = InputOptions(mode="per_host")
    try:
        rep.batches(input_fn, options)
    except ArgumentError as failure:
        return np.stack(means), str(failure)


def evaluated():
    return evaluate(Replicator(compilation_cache=False))

"""Make a program of a task, a way to count, an optimizer, and other state.

The oracle computes the loss of the whole global batch, divides by how much it counts,
differentiates, and updates. Both sides share the task and nothing else.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import replicator
from benchmarks.truth.law import cut_by
from benchmarks.truth.masks import Mask
from benchmarks.truth.program import Parts, Program, Setting
from benchmarks.truth.tasks import ROWS, Task, World
from replicator.collectives.batch_norm import RunningMoments, normalize, update_running
from replicator.collectives.moments import batch_moments, make_windows, pooled

Counting = Literal["mean", "weight", "count"]
EPSILON, MOMENTUM = 1e-3, 0.8
_ALL: Mapping[str, Any] = {}  # statistics over the whole microbatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """State besides parameters, optimizer and running statistics.

    Attributes:
      init: `init(params)` returns it.
      ours: `ours(old, params)` moves it, in each run of the step; params are new.
      oracle: The same, once per update.
    """

    init: Callable
    ours: Callable
    oracle: Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Parts of a program.

    Attributes:
      task: The model.
      counting: How examples count: a plain mean, `update(weight=)`, `update(count=)`.
      tx: Makes the optimizer.
      mask: Which examples are real; all by default.
      extras: Other state, by name.
      penalty: Weight decay in the loss: a term that is no example's.
      norm: Whose: the library's, or by hand with `all_reduce`.
      stats: Arguments of the library's norm.
      drive: As in `Program`.
    """

    task: Task
    counting: Counting
    tx: Callable[[], Any]
    mask: Mask | None = None
    extras: Mapping[str, Extra] = dataclasses.field(default_factory=dict)
    penalty: float = 0.0
    norm: Literal["library", "hand"] = "library"
    stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drive: Literal["compile", "own", "padded", "joined"] = "compile"


def supervised(name: str, recipe: Recipe, **program: Any) -> Program:
    """Return the program of a recipe; the other arguments are those of `Program`."""
    return Program(
        name=name,
        ours=lambda rep, setting: _ours(recipe, rep, setting),
        oracle=lambda setting: _oracle(recipe, setting),
        batch=lambda number: make_batch(recipe, number),
        keyed="dropout" in recipe.task.name,
        drive=recipe.drive,
        # A norm has a law of its own for what it does with microbatches.
        meets=recipe.task.meets and "norm" not in recipe.task.name,
        **program,
    )


def make_batch(recipe: Recipe, number: int) -> dict[str, np.ndarray]:
    """Return the global batch of an update."""
    rng = np.random.default_rng(100 + number)
    batch = recipe.task.batch(rng)
    if recipe.drive == "padded":  # by a reader, which makes the mask of the last batch
        real = ROWS if number < 2 else 19
        batch["mask"] = (np.arange(ROWS) < real).astype(np.float32)
    elif recipe.mask is not None:
        batch["mask"] = recipe.mask(rng)
    return batch


def first_state(recipe: Recipe, tx: Any) -> dict[str, Any]:
    """Return the state that `tx` begins with."""
    params = jax.tree.map(jnp.asarray, recipe.task.params)
    state = {"params": params, "opt": tx.init(params)}
    state |= {name: extra.init(params) for name, extra in recipe.extras.items()}
    if recipe.task.running is not None:
        state["running"] = jax.tree.map(jnp.asarray, recipe.task.running)
    return state


def _ours(recipe: Recipe, rep: replicator.Replicator, setting: Setting) -> Parts:
    accumulate = setting.microbatches if recipe.drive == "own" else 1
    tx = rep.wrap_optimizer(recipe.tx(), accumulate=accumulate)

    def step(state, batch, key=None):
        (loss, found), grads, how = _gradients(recipe, state, batch, key)
        updates, opt = tx.update(grads, state["opt"], state["params"], **how)
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt": opt}
        after |= {
            name: extra.ours(state[name], params)
            for name, extra in recipe.extras.items()
        }
        if recipe.task.running is not None:
            after["running"] = found.pop("moved")(state["running"])
        metrics = {
            "loss": loss,
            "examples": replicator.Sum(found["count"]),
            "largest": replicator.Max(found["largest"]),
        }
        return after, metrics

    def keyed(state, batch, key):
        return step(state, batch, key)

    step_fn = keyed if "dropout" in recipe.task.name else lambda s, b: step(s, b)
    return lambda key: first_state(recipe, tx), step_fn


def _gradients(recipe: Recipe, state, batch, key):
    """Return `(loss, found)`, gradients, and how `update` is to count them."""
    mask = batch.get("mask")
    kept = {}

    def local(params):
        world = our_world(batch, key, norm=recipe.norm, stats=recipe.stats)
        losses, _ = recipe.task.losses(params, batch, world)
        kept["moved"] = getattr(world.norm, "moved", None)
        weight = jnp.ones(losses.shape, losses.dtype) if mask is None else mask
        total, count = (losses * weight).sum(), weight.sum()
        decay = recipe.penalty * _squares(params)
        largest = lax.stop_gradient((losses * weight).max())
        return total, count, decay, {"count": count, "largest": largest}

    def mean(params):
        total, count, decay, found = local(params)
        return total / jnp.maximum(count, 1e-30) + decay, found

    def summed(params):
        total, count, decay, found = local(params)
        return replicator.LocalSum(total + count * decay, count), found

    if recipe.counting == "count":
        take = replicator.value_and_grad(summed, has_aux=True)
        (loss, found), grads = take(state["params"])
        return (loss, found | kept), grads, {"count": loss.weight}
    (loss, found), grads = jax.value_and_grad(mean, has_aux=True)(state["params"])
    if recipe.counting == "mean":
        return (loss, found | kept), grads, {}
    loss = replicator.Mean(loss, found["count"])
    return (loss, found | kept), grads, {"weight": found["count"]}


def our_world(batch, key, *, norm: str = "library", stats: Mapping = _ALL) -> World:
    """Return what a model knows on one of many replicas."""
    rows = len(next(iter(batch.values())))
    return World(
        keys=None if key is None else replicator.example_keys(key, rows),
        weight=example_weight(batch),
        norm=_LibraryNorm(stats) if norm == "library" else _HandNorm(),
        total=lambda x: replicator.all_reduce(x, "sum"),
        largest=lambda x: replicator.all_reduce(x, "max"),
        gather=lambda x: (
            replicator.all_gather(x, tiled=True),
            replicator.replica_id() * len(x),
        ),
    )


def example_weight(batch):
    """Return how much each example counts; one counts if any of its tokens does."""
    mask = batch.get("mask")
    return mask if mask is None or mask.ndim == 1 else mask.max(1)


class _LibraryNorm:
    """Batch norm by the library's functions."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats, self.moved = stats, None

    def __call__(self, x, weight):
        windows = make_windows(len(x), **self._stats)
        moments = batch_moments(x, windows, weight=weight)
        new = pooled(moments, windows)

        def moved(old):
            running = RunningMoments(old["mean"], old["var"])
            return update_running(running, new, momentum=MOMENTUM)._asdict()

        self.moved = moved
        return normalize(x, moments, epsilon=EPSILON), None


class _HandNorm:
    """Batch norm as users write it; statistics move at the last microbatch."""

    def __init__(self) -> None:
        self.moved = None

    def __call__(self, x, weight):
        y, mean, var = hand_batch_norm(
            x, weight, lambda leaf: replicator.all_reduce(leaf, "sum")
        )

        def moved(old):
            last = replicator.is_last_microbatch()
            share = jnp.where(last, 1 - MOMENTUM, 0.0)
            return {
                "mean": _toward(old["mean"], mean, share),
                "var": _toward(old["var"], var, share),
            }

        self.moved = moved
        return y, None


def hand_batch_norm(x, weight, total: Callable):
    """Normalise by sums that `total` adds up over whoever shares the statistics."""
    weight = jnp.ones(len(x), x.dtype) if weight is None else weight
    column = weight.reshape(-1, *[1] * (x.ndim - 1))
    axes = tuple(range(x.ndim - 1))
    positions = float(np.prod(x.shape[1:-1]))
    count = jnp.maximum(total(weight.sum()), 1e-30) * positions
    mean = total((x * column).sum(axes)) / count
    away = x - mean.reshape(*[1] * (x.ndim - 1), -1)
    var = total((away**2 * column).sum(axes)) / count
    scale = lax.rsqrt(var + EPSILON).reshape(*[1] * (x.ndim - 1), -1)
    return away * scale, lax.stop_gradient(mean), lax.stop_gradient(var)


def _toward(old, new, share):
    return (old + share * (new - old)).astype(old.dtype)


def _squares(params):
    return sum(jnp.sum(jnp.abs(leaf) ** 2) for leaf in jax.tree.leaves(params))


def _oracle(recipe: Recipe, setting: Setting) -> Parts:
    tx, pieces = optax.with_extra_args_support(recipe.tx()), _pieces(recipe, setting)

    def loss_fn(params, batch, keys):
        def one(batch, keys):
            losses, found = recipe.task.losses(params, batch, plain_world(batch, keys))
            weight = batch.get("mask", jnp.ones(losses.shape, losses.dtype))
            here = {
                "total": (losses * weight).sum(),
                "count": weight.sum(),
                "largest": (losses * weight).max(),
            }
            return here, found

        here, found = jax.vmap(one)(*_cut((batch, keys), pieces))
        count = here["count"].sum()
        loss = here["total"].sum() / jnp.maximum(count, 1e-30)
        loss += recipe.penalty * _squares(params)
        metrics = {
            "loss": loss,
            "examples": count,
            "largest": here["largest"].max(),
        }
        return loss, (metrics, here["count"], found)

    @cut_by(pieces)
    def step(state, batch, key=None):
        places = jnp.arange(ROWS)
        keys = (
            key
            if key is None
            else jax.vmap(lambda i: jax.random.fold_in(key, i))(places)
        )
        take = jax.grad(loss_fn, has_aux=True)
        grads, (metrics, counts, found) = take(state["params"], batch, keys)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt": opt}
        after |= {
            name: extra.oracle(state[name], params)
            for name, extra in recipe.extras.items()
        }
        if recipe.task.running is not None:
            last = recipe.norm == "hand"
            new = found["moments"]
            after["running"] = {
                name: moved_statistics(
                    state["running"][name], new[name], counts, last=last
                )
                for name in new
            }
        return after, metrics

    return lambda key: first_state(recipe, tx), step


def _pieces(recipe: Recipe, setting: Setting) -> int:
    """Return the number of runs of examples, which do not meet, in the batch."""
    if not recipe.task.meets:
        return 1
    if "stats_batch" in recipe.stats:
        return ROWS // recipe.stats["stats_batch"]
    if recipe.stats.get("stats") == "replica":
        return setting.microbatches * setting.replicas
    return setting.microbatches


def plain_world(batch, keys) -> World:
    """Return what a model knows where all examples are here."""

    def norm(x, weight):
        y, mean, var = hand_batch_norm(x, weight, lambda leaf: leaf)
        return y, {"mean": mean, "var": var}

    return World(
        keys=keys,
        weight=example_weight(batch),
        norm=norm,
        total=lambda x: x,
        largest=lambda x: x,
        gather=lambda x: (x, 0),
    )


def _cut(tree, pieces: int):
    return jax.tree.map(lambda leaf: leaf.reshape(pieces, -1, *leaf.shape[1:]), tree)


def moved_statistics(old, new, counts, *, last: bool):
    """Move statistics by the last microbatch alone, or by the mean of the real ones."""
    mean = new[-1]
    if not last:
        real = (counts > 0)[:, None]
        mean = jnp.where(real, new, 0).sum(0) / real.sum()
    return (MOMENTUM * old + (1 - MOMENTUM) * mean).astype(old.dtype)

"""Programs of several players: each has parameters, a loss and an optimizer.

All gradients are taken at the old parameters, then all players move, then what follows
them (targets, averages). The oracle does the same with the whole batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.truth.law import cut_by
from benchmarks.truth.masks import Mask
from benchmarks.truth.program import Parts, Program, Setting
from benchmarks.truth.supervised import our_world, plain_world
from benchmarks.truth.tasks import ROWS, World

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Game:
    """Parts of a program of several players.

    Attributes:
      players: NumPy parameters, by name.
      losses: By name, `loss(params, batch, world)`: one per example, from the
        parameters of all players.
      tx: By name, what makes its optimizer.
      batch: As in a task.
      counting: As in a recipe.
      mask: Which examples are real.
      meets: Whether examples of a microbatch meet.
      keyed: Whether losses draw random bits.
      before: `before(state, params)` moves what losses read, from old parameters alone.
      start: First value of that state.
      follow: `follow(old, params)` moves what follows the new parameters.
      followers: Its first value, from parameters.
    """

    players: Mapping[str, Tree]
    losses: Mapping[str, Callable[[Tree, Tree, World], jax.Array]]
    tx: Mapping[str, Callable[[], Any]]
    batch: Callable
    counting: Literal["mean", "weight", "count"] = "mean"
    mask: Mask | None = None
    meets: bool = False
    keyed: bool = True
    before: Callable | None = None
    start: Tree = None
    follow: Callable | None = None
    followers: Callable | None = None


def game(name: str, rules: Game, **program: Any) -> Program:
    """Return the program of a game; the other arguments are those of `Program`."""
    return Program(
        name=name,
        ours=lambda rep, setting: _ours(rules, rep),
        oracle=lambda setting: _oracle(rules, setting),
        batch=lambda number: _batch(rules, number),
        keyed=rules.keyed,
        **program,
    )


def _batch(rules: Game, number: int) -> Tree:
    rng = np.random.default_rng(200 + number)
    batch = rules.batch(rng)
    return batch if rules.mask is None else batch | {"mask": rules.mask(rng)}


def _first(rules: Game, tx: Mapping[str, Any]) -> Tree:
    params = jax.tree.map(jnp.asarray, dict(rules.players))
    state = {"params": params, "opt": {n: t.init(params[n]) for n, t in tx.items()}}
    if rules.before is not None:
        state["read"] = jax.tree.map(jnp.asarray, rules.start)
    if rules.followers is not None:
        state["follows"] = rules.followers(params)
    return state


def _moved(rules: Game, state: Tree, read: Tree, moves: Mapping[str, Tree]) -> Tree:
    params = {
        n: optax.apply_updates(state["params"][n], m[0]) for n, m in moves.items()
    }
    after = {"params": params, "opt": {n: m[1] for n, m in moves.items()}}
    if rules.before is not None:
        after["read"] = read
    if rules.follow is not None:
        after["follows"] = rules.follow(state["follows"], params)
    return after


def _read(rules: Game, state: Tree) -> tuple[Tree, Tree]:
    """Return what losses read of the state, and what of it has moved."""
    read = state.get("read")
    if rules.before is not None:
        read = rules.before(read, state["params"])
    return {"read": read, "follows": state.get("follows")}, read


def _ours(rules: Game, rep: replicator.Replicator) -> Parts:
    tx = {n: rep.wrap_optimizer(make(), name=n) for n, make in rules.tx.items()}

    def step(state, batch, key=None):
        seen, read = _read(rules, state)
        moves, losses = {}, {}
        for name in rules.players:
            world = our_world(batch, key)._replace(state=seen)
            losses[name], grads, how = _gradients(rules, name, state, batch, world)
            moves[name] = tx[name].update(
                grads, state["opt"][name], state["params"][name], **how
            )
        return _moved(rules, state, read, moves), losses

    step_fn = (
        (lambda s, b, k: step(s, b, k)) if rules.keyed else lambda s, b: step(s, b)
    )
    return lambda key: _first(rules, tx), step_fn


def _gradients(rules: Game, name: str, state: Tree, batch: Tree, world: World):
    def local(own):
        losses = rules.losses[name]({**state["params"], name: own}, batch, world)
        weight = batch.get("mask", jnp.ones(losses.shape, losses.dtype))
        return (losses * weight).sum(), weight.sum()

    def mean(own):
        total, count = local(own)
        return total / jnp.maximum(count, 1e-30), count

    if rules.counting == "count":
        take = replicator.value_and_grad(lambda own: replicator.LocalSum(*local(own)))
        loss, grads = take(state["params"][name])
        return loss, grads, {"count": loss.weight}
    (loss, count), grads = jax.value_and_grad(mean, has_aux=True)(state["params"][name])
    if rules.counting == "mean":
        return loss, grads, {}
    return replicator.Mean(loss, count), grads, {"weight": count}


def _oracle(rules: Game, setting: Setting) -> Parts:
    tx = {n: optax.with_extra_args_support(make()) for n, make in rules.tx.items()}
    pieces = setting.microbatches if rules.meets else 1

    def loss_fn(own, name, params, batch, keys, seen):
        def one(batch, keys):
            world = plain_world(batch, keys)._replace(state=seen)
            losses = rules.losses[name]({**params, name: own}, batch, world)
            weight = batch.get("mask", jnp.ones(losses.shape, losses.dtype))
            return (losses * weight).sum(), weight.sum()

        cut = jax.tree.map(
            lambda leaf: leaf.reshape(pieces, -1, *leaf.shape[1:]), (batch, keys)
        )
        total, count = jax.vmap(one)(*cut)
        return total.sum() / jnp.maximum(count.sum(), 1e-30)

    @cut_by(pieces)
    def step(state, batch, key=None):
        keys = key
        if key is not None:
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(ROWS))
        seen, read = _read(rules, state)
        moves, losses = {}, {}
        for name in rules.players:
            own = state["params"][name]
            losses[name], grads = jax.value_and_grad(loss_fn)(
                own, name, state["params"], batch, keys, seen
            )
            moves[name] = tx[name].update(grads, state["opt"][name], own)
        return _moved(rules, state, read, moves), losses

    return lambda key: _first(rules, tx), step

"""Losses and gradients that are another thing on more replicas, and their right twins.

They take what programs of `wrong` take. What comes out is equal on all replicas, so
that no drift shows; `python -m benchmarks.proof` runs each on one replica, too, to see
whether the answer depends on how many there are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

import replicator
from benchmarks.proof.wrong import AXIS, Program, loss
from replicator import LocalSum, all_reduce, global_loss, wrap_optimizer

_TX = optax.sgd(0.1)


def _updated(w, grads, **how):
    optimizer = wrap_optimizer(_TX)
    return w + optimizer.update(grads, optimizer.init(w), w, **how)[0]


def _summed(tree):
    return lax.psum(tree, AXIS)


def _trained(grads_fn: Callable) -> Program:
    """Return the program that follows `grads_fn(w, x)`."""
    return lambda x, w, key: _updated(w, grads_fn(w, x))


def _of(loss_fn: Callable, reduce: Callable = lambda grads: grads) -> Program:
    """Return the program that follows the gradient of `loss_fn(w, x)`."""
    return _trained(lambda w, x: reduce(jax.grad(loss_fn)(w, x)))


def _of_sum(sum_fn: Callable) -> Program:
    """Return the program that follows the gradient of a `LocalSum`."""

    def program(x, w, key):
        mean, grads = replicator.value_and_grad(sum_fn)(w, x)
        return _updated(w, grads, count=mean.weight)

    return program


def _whole(x):
    return global_loss(lambda w: LocalSum(loss(w, x) * len(x), count=len(x)))


def _total(w, x):
    return loss(w, x) * len(x)


def _real(x):
    """Return a mask; the numbers of real rows are equal, as means of means need it."""
    return jnp.isfinite(x[:, 0]).astype(x.dtype)


def _masked(w, x):
    return (((x @ w - x.sum(1)) ** 2) * _real(x)).sum() / _real(x).sum()


def _scanned(w, x):
    return lax.scan(lambda c, row: (c + (row @ w - 1) ** 2, None), 0.0, x)[0] / len(x)


def _product(w, x):
    apart = x @ w - x.sum(1)
    return apart @ apart / len(x)


def _gated(w, x):
    h = x * w[None]
    return ((jax.nn.softmax(h / 8.0, axis=1) * h) ** 2).mean()


def _normed(w, x):
    h = x * w[None]
    mean = lax.pmean(h.mean(0), AXIS)
    var = lax.pmean(((h - mean[None]) ** 2).mean(0), AXIS)
    return (jnp.tanh((h - mean[None]) / jnp.sqrt(var + 0.1)[None]) ** 2).mean()


_LOSSES = {
    "a mean": loss,
    "a masked mean": _masked,
    "a scan": _scanned,
    "a product": _product,
    "a gated mean": _gated,
    "a halved mean": lambda w, x: 0.5 * loss(w, x),
    "a recomputed mean": jax.checkpoint(lambda w, x: jnp.tanh(x @ w).mean()),
}


def _counted_in_a_loop(w, x):
    def add(total, row):
        return total + (row @ w - 1) ** 2, _summed(_real(x).sum())

    total, counts = lax.scan(add, 0.0, x)
    return LocalSum(total, counts[0])


def _summed_in_a_loop(w, x):
    def add(total, _):
        return total + _summed(_total(w, x)), None

    return LocalSum(lax.scan(add, 0.0, None, length=2)[0], len(x))


def _clipped(grads):
    return grads * jnp.minimum(1.0, 99.0 / jnp.linalg.norm(grads))


def _each(w, x):
    return jax.vmap(jax.grad(loss), (None, 0))(w, x[:, None])


def _in_pieces(grads):
    whole = jnp.pad(grads, (0, -len(grads) % lax.axis_size(AXIS)))
    piece = lax.psum_scatter(whole, AXIS, tiled=True)
    return lax.all_gather(piece, AXIS, tiled=True)[: len(grads)]


WRONG_LOSSES: dict[str, Program] = {
    "own times global": _of(lambda w, x: loss(w, x) * _whole(x)(w)),
    "own after a step by all": _of(
        lambda w, x: loss(w - 0.1 * jax.grad(_whole(x))(w), x)
    ),
    "global after an own step": _of(
        lambda w, x: _whole(x)(w - 0.1 * jax.grad(loss)(w, x))
    ),
    "a count of all": _of_sum(lambda w, x: LocalSum(_total(w, x), _summed(len(x)))),
    "a masked count of all": _of_sum(
        lambda w, x: LocalSum(_total(w, x), all_reduce(_real(x).sum(), "sum"))
    ),
    "a count that a loop summed": _of_sum(_counted_in_a_loop),
    "a sum of all": _of_sum(lambda w, x: LocalSum(_summed(_total(w, x)), len(x))),
    "a sum of all by a loop": _of_sum(_summed_in_a_loop),
    "a mean of all times a factor": _of_sum(
        lambda w, x: LocalSum(0.5 * lax.pmean(loss(w, x), AXIS), len(x))
    ),
    **{f"{name}, summed": _of(each, _summed) for name, each in _LOSSES.items()},
    "summed by ours": _of(loss, lambda grads: all_reduce(grads, "sum")),
    "summed and clipped": _of(loss, lambda grads: _clipped(_summed(grads))),
    "summed in a call": _of(loss, jax.jit(_summed)),
    "summed, with decay": _trained(lambda w, x: _summed(jax.grad(loss)(w, x)) + w / 9),
    "summed under a norm of all": _of(_normed, _summed),
    "summed means of each example": _trained(lambda w, x: _summed(_each(w, x).mean(0))),
    "summed, and moved by hand": lambda x, w, key: w - _summed(jax.grad(loss)(w, x)),
    "summed in pieces": lambda x, w, key: w - _in_pieces(jax.grad(loss)(w, x)),
    "summed, beside a local count": lambda x, w, key: _updated(
        w, _summed(jax.grad(_total)(w, x)), count=len(x)
    ),
}


def _as_many_as_all(w, x):
    losses = jnp.outer(x @ w, jnp.arange(1.0, 5.0)) ** 2  # on four replicas
    return LocalSum(losses.sum(), losses.size)


def _clip_factor(grads):
    replicas = lax.axis_size(AXIS)
    norm = jnp.linalg.norm(_summed(grads)) / replicas
    return jnp.minimum(1.0, 1.0 / norm) / replicas


def _divided(grads):
    return _summed(grads) / lax.axis_size(AXIS)


def _shared(loss_fn):
    return lambda w, x: loss_fn(w, x) / replicator.num_replicas()


def _by_count(loss_fn):
    def grads_fn(w, x):
        count = _real(x).sum()
        return _summed(count * jax.grad(loss_fn)(w, x)) / _summed(count)

    return grads_fn


RIGHT_LOSSES: dict[str, Program] = {
    "own and global": _of(lambda w, x: loss(w, x) + _whole(x)(w)),
    "global after a step by all": _of(
        lambda w, x: _whole(x)(w - 0.1 * jax.grad(_whole(x))(w))
    ),
    "global, squared": _of(lambda w, x: _whole(x)(w) ** 2),
    "a local sum": _of_sum(lambda w, x: LocalSum(_total(w, x), len(x))),
    "a mean of all times the own count": _of_sum(
        lambda w, x: LocalSum(len(x) * lax.pmean(loss(w, x), AXIS), len(x))
    ),
    "the same beside a local sum": _of_sum(
        lambda w, x: LocalSum(
            _total(w, x) + len(x) * lax.pmean(loss(w, x), AXIS), len(x)
        )
    ),
    "a count of numbers as many as all examples": _of_sum(_as_many_as_all),
    "summed, and moved by a rate shared out": lambda x, w, key: (
        w - jnp.asarray(0.1) / lax.axis_size(AXIS) * _summed(jax.grad(loss)(w, x))
    ),
    "summed times a rate shared out": _trained(
        lambda w, x: _summed(w.sum() / lax.axis_size(AXIS) * jax.grad(loss)(w, x))
    ),
    "averaged in pieces": lambda x, w, key: (
        w - _in_pieces(jax.grad(loss)(w, x) / lax.axis_size(AXIS))
    ),
    "summed and clipped, shared out": _of(
        loss, lambda grads: _clip_factor(grads) * _summed(grads)
    ),
    **{
        f"{name}, {how}": _of(each, reduce)
        for name, each in _LOSSES.items()
        for how, reduce in {
            "averaged": lambda grads: lax.pmean(grads, AXIS),
            "summed and divided": _divided,
        }.items()
    },
    **{
        f"{name}, shared and summed": _of(_shared(each), _summed)
        for name, each in _LOSSES.items()
    },
    "summed by count": lambda x, w, key: _updated(w, _by_count(_masked)(w, x)),
    "times the inverse": _of(loss, lambda g: _summed(g) * (1 / lax.axis_size(AXIS))),
    "divided and summed": _of(loss, lambda g: _summed(g / lax.axis_size(AXIS))),
    "sums of all": _of(lambda w, x: ((x @ w) ** 2).sum(), _summed),
    "a sum over a count of all": _of(
        lambda w, x: ((x @ w) ** 2).sum() / _summed(_real(x).sum()), _summed
    ),
    "a sum over all examples": _of(
        lambda w, x: ((x @ w) ** 2).sum() / (len(x) * lax.axis_size(AXIS)), _summed
    ),
    "a weighted mean": lambda x, w, key: _updated(
        w, all_reduce(jax.grad(_masked)(w, x), weight=_real(x).sum())
    ),
    "clipped one by one": _trained(
        lambda w, x: (
            _summed(jnp.clip(_each(w, x), -1, 1).sum(0))
            / (len(x) * lax.axis_size(AXIS))
        )
    ),
    "a vote": _of(loss, lambda g: jnp.sign(_summed(jnp.sign(g)))),
    "averaged, and moved by hand": lambda x, w, key: (
        w - lax.pmean(jax.grad(loss)(w, x), AXIS)
    ),
}

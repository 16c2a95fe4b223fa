"""Other state beside the parameters, and optimizers around and behind the wrap."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from benchmarks.truth import extras, masks, optimizers, tasks
from benchmarks.truth.games import Game, game
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import WHOLE, Parts, Program, Refused, Setting, pair
from benchmarks.truth.supervised import Recipe, make_batch, supervised
from benchmarks.truth.tasks import MLP_WEIGHTS, ROWS, vectors

_BY_MASK = Recipe(
    task=tasks.mlp, counting="weight", tx=optimizers.sgd, mask=masks.scattered
)


def _losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] - batch["y"]) ** 2


def _mean_loss(params, batch):
    total = (_losses(params, batch) * batch["mask"]).sum()
    return total / jnp.maximum(batch["mask"].sum(), 1e-30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Own:
    """A program that differs from plain training by its optimizer or its state.

    Attributes:
      make: `make(wrap)` returns the optimizer.
      trained: `trained(params)` returns what the gradient is taken of.
      start: `start(params)` returns parameters as the optimizer has them.
      more: Returns the first value of other state.
      plain_more: `plain_more(setting)` returns the oracle's, where it differs.
      ours: `ours(old, params, batch)` moves it in the step.
      oracle: `oracle(old, params, batch, setting)` moves it once per update.
      spoil: Changes the batch of an update.
    """

    make: Callable[[Callable], Any]
    trained: Callable = lambda params: params
    start: Callable = lambda params: params
    more: Callable[[], Any] | None = None
    plain_more: Callable[[Setting], Any] | None = None
    ours: Callable | None = None
    oracle: Callable | None = None
    spoil: Callable = lambda batch, number: batch


def _own(name: str, own: _Own, **program: Any) -> Program:
    def make(wrap):
        optimizer = own.make(wrap)

        def init(key):
            params = own.start(jax.tree.map(jnp.asarray, MLP_WEIGHTS))
            state = {"params": params, "opt": optimizer.init(params)}
            return state if own.more is None else state | {"more": own.more()}

        return init, optimizer

    def stepped(optimizer, state, batch, **how):
        params = state["params"]
        loss, grads = jax.value_and_grad(_mean_loss)(own.trained(params), batch)
        updates, opt = optimizer.update(grads, state["opt"], params, **how)
        return loss, {"params": optax.apply_updates(params, updates), "opt": opt}

    def ours(optimizer):
        def step(state, batch):
            count = batch["mask"].sum()
            loss, after = stepped(optimizer, state, batch, weight=count)
            if own.ours is not None:
                after["more"] = own.ours(state["more"], after["params"], batch)
            return after, {"loss": replicator.Mean(loss, count)}

        return step

    def oracle(setting, optimizer):
        optimizer = optax.with_extra_args_support(optimizer)

        @cut_by(setting if own.oracle else ())
        def step(state, batch):
            loss, after = stepped(optimizer, state, batch)
            if own.oracle is not None:
                more = state.get("more")
                after["more"] = own.oracle(more, after["params"], batch, setting)
            return after, {"loss": loss}

        return step

    def batch(number):
        return own.spoil(make_batch(_BY_MASK, number), number)

    parts = pair(make, ours, oracle)
    if own.plain_more is not None:
        parts["oracle"] = _beginning_with(own.plain_more, parts["oracle"])
    return Program(name=name, batch=batch, **parts, **program)


def _beginning_with(more: Callable, oracle: Callable) -> Callable:
    def of_setting(setting: Setting) -> Parts:
        init, step = oracle(setting)
        return lambda key: init(key) | {"more": more(setting)}, step

    return of_setting


def _behind(wrap):
    """Keep Adam's moments behind the wrap, which only clips."""
    return optax.chain(
        wrap(optax.clip_by_global_norm(0.3)),
        optax.scale_by_adam(eps=1e-4),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(optimizers.schedule),
    )


def _around(wrap):
    """Wrap each part of a transformation by labels."""
    parts: dict[Hashable, Any] = {
        "matrix": wrap(optimizers.adam(), name="matrix"),
        "vector": wrap(optimizers.momentum(), name="vector"),
    }
    return optax.multi_transform(
        parts, {"w1": "matrix", "b1": "vector", "w2": "vector"}
    )


_TRAINED = {"w1": True, "b1": False, "w2": True}


def _masked(wrap):
    """Train all but one leaf, which optax leaves at its raw gradient."""
    return optax.masked(wrap(optimizers.clipped_adam()), _TRAINED)


def _frozen(wrap):
    """Train all but one leaf, which stays."""
    others = {name: not trained for name, trained in _TRAINED.items()}
    return optax.chain(_masked(wrap), optax.masked(optax.set_to_zero(), others))


def _ahead(wrap):
    return wrap(optax.lookahead(optimizers.momentum(), 2, 0.5))


def _spoilt(batch, number):
    if number == 1:
        batch["y"][np.flatnonzero(batch["mask"])[0]] = np.inf
    return batch


def _finite(wrap):
    """Leave out an update that is not finite."""
    return wrap(optimizers.adam(), skip_nonfinite=True)


def _parts(leaf, setting):
    """Return [microbatches, replicas, rows, ...]: who has which rows of a batch."""
    n, k = setting
    return leaf.reshape(k, n, ROWS // (n * k), *leaf.shape[1:])


def _seen_by_each(old, params, batch, setting):
    return old + _parts(batch["mask"], setting).sum((0, 2))


def _seen_here(old, params, batch):
    return dataclasses.replace(old, value=old.value + batch["mask"].sum())


def _normaliser(old, x, total: Callable):
    """Merge the mean of these examples into that of all before (Chan et al.)."""
    many = total(jnp.ones((), old["mean"].dtype) * len(x))
    mean = total(x.sum(0)) / many
    count = old["count"] + many
    return {"count": count, "mean": old["mean"] + (mean - old["mean"]) * many / count}


def _normalised_by_all(old, params, batch, setting):
    for part in batch["x"].reshape(setting.microbatches, -1, *batch["x"].shape[1:]):
        old = _normaliser(old, part, lambda leaf: leaf)
    return old


def _alias(state):
    """Let the target be the very buffers of the parameters, as users write it."""
    return state | {"more": state["params"]}


def _polyak(old, params, *_):
    return jax.tree.map(lambda o, n: 0.9 * o + 0.1 * n, old, params)


_ANNEALED = Game(
    players={"model": MLP_WEIGHTS},
    tx={"model": optimizers.adam},
    batch=vectors,
    losses={
        "model": lambda p, b, w: (
            _losses(p["model"], b)
            + (
                jnp.abs(b["x"] @ p["model"]["w1"]).sum(-1)
                * w.state["read"]["step"]
                / 50
            )
        )
    },
    keyed=False,
    before=lambda read, params: {"step": read["step"] + 1},
    start={"step": np.zeros((), np.int32)},
    counting="count",
    mask=masks.padded,
)


def _ordered(name: str, counting, task) -> Program:
    recipe = Recipe(
        task=task,
        counting=counting,
        tx=optimizers.clipped_adam,
        mask=masks.scattered,
        extras={"ema": extras.ema},
    )
    return supervised(name, recipe, options={"reduction": "ordered"})


PROGRAMS = [
    _own("chain-behind-the-wrap", _Own(make=_behind)),
    _own("multi-transform-around-wraps", _Own(make=_around)),
    _own("masked-around-the-wrap", _Own(make=_frozen)),
    _own(
        "masked-raw-gradient-refused",
        _Own(make=_masked),
        expect=Refused(by="ReplicationError", word="`params/b1` may differ"),
        settings=WHOLE[1:],
    ),
    _own(
        "lookahead",
        _Own(
            make=_ahead,
            trained=lambda params: params.fast,
            start=optax.LookaheadParams.init_synced,
        ),
    ),
    _own("skip-nonfinite", _Own(make=_finite, spoil=_spoilt)),
    _own(
        "per-replica-count",
        _Own(
            make=lambda wrap: wrap(optimizers.adam()),
            more=lambda: replicator.PerReplica(jnp.zeros(())),
            plain_more=lambda setting: jnp.zeros(setting.replicas),
            ours=_seen_here,
            oracle=_seen_by_each,
        ),
    ),
    _own(
        "running-normaliser",
        _Own(
            make=lambda wrap: wrap(optimizers.adam()),
            more=lambda: {"count": jnp.ones(()), "mean": jnp.zeros(4)},
            ours=lambda old, params, batch: _normaliser(
                old, batch["x"], lambda leaf: replicator.all_reduce(leaf, "sum")
            ),
            oracle=_normalised_by_all,
        ),
    ),
    _own(
        "one-buffer-twice-polyak",
        _Own(
            make=lambda wrap: wrap(optimizers.adam()),
            more=lambda: jax.tree.map(jnp.asarray, MLP_WEIGHTS),
            ours=_polyak,
            oracle=_polyak,
        ),
        prepare=_alias,
    ),
    game("annealed-by-own-counter-count", _ANNEALED),
    _ordered("ordered-mlp-weight", "weight", tasks.mlp),
    _ordered("ordered-conv-count", "count", tasks.conv),
]

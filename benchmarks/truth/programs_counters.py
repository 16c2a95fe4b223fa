"""Counters beside a model, in many spellings: what each must be, leaf by leaf.

The oracle walks through the microbatches of an update in Python. A count that weighs a
mean, a pointer into a queue and a count of examples go with them; what counts updates
moves once. Each is born as a number of Python and as an array, and one is saved and
read between updates. What nobody can tell is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import replicator
from benchmarks.truth import optimizers
from benchmarks.truth.law import cut_by
from benchmarks.truth.program import CUT, Program, Refused, Setting, pair
from benchmarks.truth.tasks import FEATURES, MLP_WEIGHTS, ROWS, vectors

_SETTINGS = (Setting(2, 4), Setting(1, 1), Setting(1, 4), Setting(4, 1))
_SLOTS = 3 * ROWS // 2  # of a queue: a batch passes its end
_LIMIT = 2 * ROWS - 8
_ONE = np.ones(1, np.int32)
_EMPTY = np.zeros(_SLOTS)

State = Mapping[str, Any]
More = Callable[[State, Any], dict[str, Any]]


def _loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    return ((hidden @ params["w2"] - batch["y"]) ** 2).mean()


def _program(
    name: str, start: State, ours: More, oracle: More | None = None, **program: Any
) -> Program:
    """Make a program whose state holds more.

    Args:
      name: Of the program.
      start: The first value of the rest of the state.
      ours: `ours(state, batch)` moves it in the step.
      oracle: `oracle(state, parts)` moves it by an update of microbatches, each its
        rows of `x`.
      **program: As `Program` takes it.
    """

    def make(wrap):
        optimizer = wrap(optimizers.adam())

        def init(key):
            params = jax.tree.map(jnp.asarray, MLP_WEIGHTS)
            return {"params": params, "opt": optimizer.init(params), **start}

        return init, optimizer

    def trained(optimizer, state, batch):
        loss, grads = jax.value_and_grad(_loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt": opt}, {"loss": loss}

    def of_replicas(optimizer):
        def step(state, batch):
            after, metrics = trained(optimizer, state, batch)
            return after | ours(state, batch), metrics

        return step

    def of_one(setting, optimizer):
        @cut_by(setting.microbatches)
        def step(state, batch):
            after, metrics = trained(optimizer, state, batch)
            assert oracle is not None
            parts = jnp.split(batch["x"], setting.microbatches)
            return after | oracle({each: state[each] for each in start}, parts), metrics

        return step

    made = {"settings": _SETTINGS, **program}
    return Program(
        name=f"counter-{name}",
        batch=lambda number: vectors(np.random.default_rng(900 + number)),
        **pair(make, of_replicas, of_one),
        **made,
    )


def _in_turn(move: More) -> More:
    """Let each microbatch move the state in turn."""

    def oracle(more, parts):
        for rows in parts:
            more = move(more, rows)
        return more

    return oracle


def _rows(batch) -> int:
    """Return how many examples a microbatch has on all replicas."""
    return len(batch["x"]) * replicator.num_replicas()


def _keys(batch):
    return replicator.all_gather(batch["x"][:, 0]).reshape(-1)


def _like(leaf, number):
    return jnp.asarray(number, leaf.dtype)


def _number(count):
    return jnp.asarray(count, float).reshape(())


# How a count of microbatches is written that weighs a running mean: where it starts,
# how it moves, and, where that is another spelling, how it is read.
_WEIGHING: dict[str, tuple] = {
    "n+1": (0, lambda n: n + 1),
    "1+n": (0, lambda n: 1 + n),
    "n+1.0": (0.0, lambda n: n + 1.0),
    "n-(-1)": (0, lambda n: n - (-1)),
    "safe-increment": (0, optax.safe_increment),
    "cast": (0, lambda n: (n.astype(float) + 1).astype(n.dtype)),
    "limit": (0, lambda n: jnp.minimum(n + 1, 1000)),
    "clip": (0, lambda n: jnp.clip(n + 1, 0, 1000)),
    "where": (0, lambda n: jnp.where(n < 1000, n + 1, n)),
    "modulo": (0, lambda n: (n + 1) % 1000),
    "of-one": (np.zeros(1, np.int32), lambda n: n + _ONE),
    "jit": (0, jax.jit(lambda n: n + 1)),
    "remat": (0.0, jax.checkpoint(lambda n: n + 1)),
    "read-as-another": (0, lambda n: n + 1, lambda n: 1.0 + n.astype(float)),
    "downwards": (1000, lambda n: n - 1, lambda n: 1000 - (n - 1)),
}
# How a pointer into a queue is written, and a count of examples.
_POINTING: dict[str, tuple] = {
    "modulo": (0, lambda place, rows: (place + rows) % _SLOTS),
    "rem": (0, lambda place, rows: lax.rem(rows + place, _like(place, _SLOTS))),
    "where": (
        0,
        lambda place, rows: jnp.where(
            place + rows >= _SLOTS, place + rows - _SLOTS, place + rows
        ),
    ),
    "endless": (0, lambda place, rows: place + rows),
}
_COUNTING: dict[str, tuple] = {
    "sum": (0, lambda seen, rows: rows + seen),
    "limit": (0, lambda seen, rows: jnp.minimum(seen + rows, _LIMIT)),
    "float": (0.0, lambda seen, rows: seen + float(rows)),
    "mask": (0, lambda seen, rows: (seen + rows) & (4 * ROWS - 1)),
    "at": (np.zeros(1, np.int32), lambda seen, rows: seen.at[0].add(rows)),
}


def _mean(state, value, move, read=None):
    count = move(state["count"])
    weight = _number(count if read is None else read(state["count"]))
    return {
        "count": count,
        "mean": state["mean"] + (value - state["mean"]) / weight,
    }


def _filled(state, keys, move):
    places = (state["place"] + jnp.arange(len(keys))) % _SLOTS
    queue = state["queue"].at[places].set(keys)
    return {"queue": queue, "place": move(state["place"], len(keys))}


def _each(table: Mapping[str, tuple], move: Callable) -> Callable:
    """Move every counter of a table, however it was born."""

    def moved(state, *values):
        return {
            birth: {
                name: move(own, *values, *table[name][1:])
                for name, own in counters.items()
            }
            for birth, counters in state.items()
        }

    return moved


def _spelt(name: str, table: Mapping[str, tuple], first: Callable, move: Callable):
    """Make two programs of a table's counters: run through, and saved and read.

    Each counter is born as a number of Python, weakly typed, and as an array.
    """

    def born(birth: Callable) -> dict[str, Any]:
        return {spelling: first(birth(row[0])) for spelling, row in table.items()}

    moved = _each(table, move)
    start = {"weak": born(lambda number: number), "strong": born(np.asarray)}

    def ours(state, batch):
        keys = _keys(batch)
        return moved({birth: state[birth] for birth in start}, keys)

    oracle = _in_turn(lambda more, rows: moved(more, rows[:, 0]))
    return [
        _program(f"{name}-{drive}", start, ours, oracle, drive=drive)
        for drive in ("compile", "resumed")
    ]


def _weighed(state, keys, *how):
    return _mean(state, keys.mean(), *how)


def _seen(state, keys, move):
    return {"seen": move(state["seen"], len(keys))}


def _kept_and_reset(state, batch):
    """Keep the sum of an update's microbatches; at the last their mean."""
    last = replicator.is_last_microbatch()
    total = state["total"] + replicator.all_reduce(batch["x"].mean())
    count = state["count"] + 1
    return {
        "total": jnp.where(last, 0, total),
        "count": jnp.where(last, 0, count),
        "mean": jnp.where(last, total / count, state["mean"]),
    }


def _mean_of_an_update(more, parts):
    mean = jnp.concatenate(parts).mean()
    return {"total": 0 * more["total"], "count": 0 * more["count"], "mean": mean}


def _gated(state, batch):
    """Count by updates, and examples by what an update is made of."""
    k, last = replicator.num_microbatches(), replicator.is_last_microbatch()
    return {
        "updates": state["updates"] + last.astype(state["updates"].dtype),
        "seen": state["seen"] + jnp.where(last, _rows(batch) * k, 0),
        "all": state["all"] + _rows(batch) * k,
        "given": state["given"] + ROWS,
    }


def _by_updates(more, parts):
    seen = {name: more[name] + ROWS for name in ("seen", "all", "given")}
    return {"updates": more["updates"] + 1, **seen}


def _scheduled(step, temperature, running, value):
    warm = jnp.minimum(1.0, (1 + step) / 100)
    return 0.9 * running + 0.1 * value / temperature * warm


def _schedules(state, batch):
    """Warm up and anneal what a running mean of losses reads."""
    value = replicator.all_reduce(batch["x"].mean())
    return {
        "step": state["step"] + 1,
        "temperature": state["temperature"] * 0.99,
        "running": _scheduled(
            state["step"], state["temperature"], state["running"], value
        ),
    }


def _by_schedule(more, parts):
    step, temperature, running = (
        more[name] for name in ("step", "temperature", "running")
    )
    for rows in parts:
        running = _scheduled(step, temperature, running, rows.mean())
    return {"step": step + 1, "temperature": temperature * 0.99, "running": running}


def _refused(
    name: str, start: State, ours: More, leaf: str, reader: str, **program: Any
) -> Program:
    word = f"`{leaf}` of the returned state moves once per update and `{reader}`, which"
    return _program(
        f"{name}-refused",
        start,
        ours,
        expect=Refused(by="ArgumentError", word=word),
        **{"settings": CUT, **program},
    )


def _pulled(rate: Callable) -> More:
    """Move a mean by a rate of a number that is annealed."""

    def ours(state, batch):
        away = replicator.all_reduce(batch["x"].mean()) - state["mean"]
        after = state["rate"] * 0.9 + 0.1
        return {"rate": after, "mean": state["mean"] + away * rate(state["rate"])}

    return ours


def _history(state, batch):
    value = replicator.all_reduce(batch["x"].mean())
    after = state["history"].at[state["step"]].set(value)
    return {"history": after, "step": state["step"] + 1}


def _of_fixed_size(state, batch):
    """Fill a queue with keys of a size that is written down."""
    keys = _keys({"x": batch["x"].reshape(_FIXED, FEATURES)})
    return _filled(state, keys, lambda place, _: (place + 2 * _FIXED) % _SLOTS)


_FIXED = ROWS // 4  # of setting 2x2


PROGRAMS = [
    *_spelt("weighs", _WEIGHING, lambda n: {"count": n, "mean": 0.0}, _weighed),
    *_spelt("points", _POINTING, lambda n: {"place": n, "queue": _EMPTY}, _filled),
    *_spelt("sees", _COUNTING, lambda n: {"seen": n}, _seen),
    _program(
        "kept-and-reset",
        {"total": 0.0, "count": 0, "mean": 0.0},
        _kept_and_reset,
        _mean_of_an_update,
    ),
    _program(
        "gated", {"updates": 0, "seen": 0, "all": 0, "given": 0}, _gated, _by_updates
    ),
    _program(
        "schedules",
        {"step": 0, "temperature": 1.0, "running": 0.0},
        _schedules,
        _by_schedule,
    ),
    _refused(
        "annealed-rate",
        {"rate": 1.0, "mean": 0.0},
        _pulled(lambda rate: rate),
        "rate",
        "mean",
    ),
    _refused(
        "history-by-step",
        {"history": np.zeros(9), "step": 0},
        _history,
        "step",
        "history",
    ),
    _refused(
        "pointer-of-fixed-size",
        {"queue": _EMPTY, "place": 0},
        _of_fixed_size,
        "place",
        "queue",
        settings=(Setting(2, 2),),
    ),
]

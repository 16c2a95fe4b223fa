"""Rules by which replicas add up gradients: what comes and is owed is what was given.

Three small models under each way of a sum and each form of numbers, with optimizers
that see all gradients at once. Over 20 updates the sum of the gradients that the
optimizer got, and of what replicas owe, is the sum of the true ones; ways that are
exact also obey law 1: the first gradient is that of one device.
"""

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.strategy_matrix.builders import OPTIMIZERS
from benchmarks.strategy_matrix.cover import Row, cover
from benchmarks.strategy_matrix.law import Setting
from experiments import digits_resnet
from replicator import Replicator, strategies
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.collectives import all_reduce
from replicator.strategies import Rule

UPDATES = 20
LAW_1 = 1.1e-5
OWED = 1e-5
"""Largest share of the norm of all gradients that may be missing."""

_FORMS = (None, "bf16", "f16", "int8", "power_sgd(2)")
WITHIN = 0.015
"""Largest loss of accuracy of the digits."""

METHODS: Mapping[str, dict[str, Any]] = {
    " ".join(filter(None, (way, form))): {"synchronise": way, "compress": form}
    for way, form in (
        *itertools.product(("all_reduce", "hierarchical"), _FORMS),
        ("rows", None),
    )
}
"""By name: words of a rule."""

_TX = ("adamw", "muon")
_DEVICES = (8, 2)


class Summed(NamedTuple):
    """State of a transformation that passes gradients on, and adds them up."""

    total: PyTree


def summing() -> optax.GradientTransformation:
    """Return a transformation that keeps the sum of all gradients."""

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple:
        del params
        return updates, Summed(jax.tree.map(jnp.add, state.total, updates))

    return optax.GradientTransformation(
        lambda params: Summed(jax.tree.map(jnp.zeros_like, params)), update
    )


def _mlp(params: PyTree, batch: PyTree) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return (hidden @ params["down"] - batch["y"]) ** 2


def _convolution(params: PyTree, batch: PyTree) -> jax.Array:
    image = batch["x"].reshape(-1, 8, 8, 1)
    features = lax.conv_general_dilated(
        image, params["kernel"], (1, 1), "SAME", dimension_numbers=_IMAGES
    )
    mean = jax.nn.relu(features + params["bias"]).mean(axis=(1, 2))
    return (mean @ params["down"] - batch["y"]) ** 2


def _embedding(params: PyTree, batch: PyTree) -> jax.Array:
    words = params["table"][batch["words"]].mean(axis=1)
    return (words @ params["down"] - batch["y"]) ** 2


_IMAGES = ("NHWC", "HWIO", "NHWC")
_SHAPES: Mapping[str, tuple[Callable, dict[str, tuple[int, ...]]]] = {
    "mlp": (_mlp, {"up": (64, 96), "bias": (96,), "down": (96, 8)}),
    "convolution": (
        _convolution,
        {"kernel": (3, 3, 1, 48), "bias": (48,), "down": (48, 8)},
    ),
    "embedding": (_embedding, {"table": (2048, 16), "down": (16, 8)}),
}
MODELS = tuple(_SHAPES)


def replicator_under(method: str, devices: int) -> Replicator:
    """Return a replicator with one rule for all variables; tables have rows."""
    words = METHODS[method]
    pattern = "params/table" if words["synchronise"] == "rows" else "*"
    rules = [Rule(pattern=pattern, **words)]
    hosts = 2 if words["synchronise"] == "hierarchical" else None
    strategy = strategies.data_parallel(rules, devices_per_host=hosts)
    return Replicator(devices, strategy=strategy, compilation_cache=False)


def parts(
    model: str, rep: Replicator, tx: optax.GradientTransformation
) -> tuple[Callable, Callable, dict[str, np.ndarray]]:
    """Return `init_fn`, `step_fn` and a batch; the state sums the true gradients."""
    losses_of, shapes = _SHAPES[model]
    optimizer = rep.wrap_optimizer(optax.chain(summing(), tx))

    def init_fn(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, len(shapes))
        params = {
            name: 0.3 * jax.random.normal(each, shape)
            for (name, shape), each in zip(shapes.items(), keys, strict=True)
        }
        truth = jax.tree.map(jnp.zeros_like, params)
        return {"params": params, "opt": optimizer.init(params), "truth": truth}

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        params = state["params"]
        grads = jax.grad(lambda p: losses_of(p, batch).mean())(params)
        updates, opt = optimizer.update(grads, state["opt"], params)
        return {
            "params": optax.apply_updates(params, updates),
            "opt": opt,
            "truth": jax.tree.map(jnp.add, state["truth"], all_reduce(grads)),
        }, {}

    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(32, 64)).astype(np.float32),
        "y": rng.normal(size=(32, 8)).astype(np.float32),
        "words": rng.integers(0, 2048, (32, 3)).astype(np.int32),
    }
    return init_fn, step_fn, batch


def judged(setting: Setting) -> str | None:
    """Return what is wrong with the sums of a run, or None."""
    tx = OPTIMIZERS[setting.optimizer]()
    rep = replicator_under(setting.builder, setting.devices)
    init_fn, step_fn, batch = parts(setting.case, rep, tx)
    step, state = rep.compile(step_fn), rep.init(init_fn)
    state, _ = step(state, batch)
    if METHODS[setting.builder]["compress"] is None:
        alone = Replicator(1, compilation_cache=False)
        init_fn, step_fn, _ = parts(setting.case, alone, tx)
        one, _ = alone.compile(step_fn)(alone.init(init_fn), batch)
        by = _distance(_sums(state), _sums(one))
        if not by <= LAW_1:
            return f"the first gradient is off by {by:.1e}"
    for _ in range(UPDATES - 1):
        state, _ = step(state, batch)
    owed = own.value if (own := state["opt"].synchroniser.owed) else {}
    found = {
        name: leaf + np.sum(owed.get(f"params/{name}", np.zeros(1)), axis=0)
        for name, leaf in _sums(state).items()
    }
    by = _distance(found, dict(named_leaves(jax.device_get(state["truth"]))))
    return None if by <= OWED else f"{by:.1e} of the gradients is missing"


def sums_settings(*, full: bool) -> list[Setting]:
    """List the settings: a cover that holds each pair, or all."""
    ideas = {"case": MODELS, "builder": list(METHODS), "optimizer": _TX}

    def allowed(row: Row) -> bool:
        by_rows = row.get("builder") == "rows"
        return not by_rows or row.get("case", "embedding") == "embedding"

    rows: list[Row] = cover({**ideas, "devices": _DEVICES}, allowed)
    if full:
        every = itertools.product(_DEVICES, *ideas.values())
        rows = [
            {**dict(zip(ideas, words, strict=True)), "devices": devices}
            for devices, *words in every
        ]
    return [
        Setting(row["case"], row["builder"], row["devices"], row["optimizer"])
        for row in rows
        if allowed(row)
    ]


def accuracies(names: Sequence[str]) -> dict[str, float]:
    """Return the mean accuracy of three ResNets that read digits, by method.

    Args:
      names: Methods of `METHODS`; a plain all-reduce is among the results.
    """
    found = {}
    for name in dict.fromkeys(["all_reduce", *names]):
        reads = []
        for seed in range(3):
            with tempfile.TemporaryDirectory() as folder:
                config = digits_resnet.Config(seed=seed, directory=folder)
                rep = replicator_under(name, 8)
                reads.append(digits_resnet.train(rep, config).accuracy)
        found[name] = float(np.mean(reads))
        print(f"{name}: {found[name]:.4f} of {reads}", flush=True)
    return found


def _sums(state: PyTree) -> dict[str, np.ndarray]:
    [found] = [
        node
        for node in jax.tree.leaves(state["opt"].inner, is_leaf=_is_summed)
        if _is_summed(node)
    ]
    return dict(named_leaves(jax.device_get(found.total)))


def _is_summed(node: Any) -> bool:
    return isinstance(node, Summed)


def _distance(found: Mapping, true: Mapping) -> float:
    apart = [np.ravel(found[name] - leaf) for name, leaf in true.items()]
    whole = [np.ravel(leaf) for leaf in true.values()]
    return float(
        np.linalg.norm(np.concatenate(apart)) / np.linalg.norm(np.concatenate(whole))
    )

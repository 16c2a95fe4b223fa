"""The law: a step under a strategy does what it does on one device.

Law 1 of `docs/design.md`, at equal parameters: one run on one device visits the steps
of a case; at each, its state is put where the strategy keeps it, and makes one update
there. The gradient, which the state of all optimizers but `bare` shows, differs by a
norm of 1e-5 in all; each leaf of what comes out of the update by a thousandth of how
far it moved: what adamw, lamb and muon make of a rounding of 1e-5 stays below, and a
gradient that counts twice, or a norm over pieces, does not. It lies where it lay, and
that is in pieces.

Where patterns stand side by side, each has its own gradient, metric and state, all
compared by law 1's tolerance, and what is wrong is named.
"""

import dataclasses
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks.strategy_matrix.builders import (
    ACCUMULATED,
    BUILDERS,
    OPTIMIZERS,
    PADDED,
    PLAIN,
)
from benchmarks.strategy_matrix.cases import Case
from benchmarks.strategy_matrix.pattern_cases import named
from benchmarks.truth.compare import distances, farthest, seen
from replicator import Replicator, strategies
from replicator.base.mesh import put
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.engine.layout import Layout
from replicator.strategies import Strategy, unpadded

MODEL_TOLERANCE = 5e-5
"""Share of the gradient's norm where `model` splits a contraction: law 1."""

UPDATE_TOLERANCE = 1e-3
"""Share of a leaf's move in one update."""


_NAMED = 12
"""Number of wrong leaves that a message names."""


class Setting(NamedTuple):
    """One run of one case."""

    case: str
    builder: str
    devices: int
    optimizer: str

    def __str__(self) -> str:
        """Write it as `mlp under fsdp on 8 with adamw`."""
        return f"{self.case} under {self.builder} on {self.devices} with {self[3]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
    """One update on one device; flat leaves, on the host.

    Attributes:
      before: Leaves of the state.
      start: The same, by path, as `compare.seen` names them.
      gradient: Its leaves, by path; of several optimizers, all.
      after: The new state by path.
      metrics: By name; those that are plain arrays.
    """

    before: list[np.ndarray]
    start: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]


class Oracles:
    """Runs cases on one device, each once with each optimizer."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], list[Visit]] = {}

    def visits(self, case: Case, optimizer: str, accumulate: int = 1) -> list[Visit]:
        """Return the updates that are compared."""
        key = (case.name, optimizer, accumulate)
        if key not in self._known:
            self._known[key] = _visits(case, optimizer, accumulate)
        return self._known[key]


def problem(setting: Setting, oracles: Oracles) -> str | None:
    """Return what is wrong with a run, or None."""
    return explained(lambda: _judged(setting, oracles))


def explained(judge: Callable[[], str | None]) -> str | None:
    """Return what `judge` returns, or the error that it raised, with its line."""
    try:
        return judge()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [each for each in frames if "site-packages" not in each.filename]
        where = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}"
        return f"{type(error).__name__} at {where}: {str(error)[:400]}"


def _judged(setting: Setting, oracles: Oracles) -> str | None:
    case, accumulate = named(setting.case), ACCUMULATED.get(setting.builder, 1)
    builder = {**BUILDERS, **PADDED, **dict.fromkeys(ACCUMULATED, BUILDERS["zero1"])}
    strategy = builder[setting.builder](setting.devices, case.tensor)
    rep = Replicator(setting.devices, strategy=strategy, compilation_cache=False)
    wraps = strategy.kind == "replicates" or accumulate > 1
    init_fn, step_fn = case.parts(_wrap(setting.optimizer, rep if wraps else None))
    step, state = rep.compile(step_fn, accumulate=accumulate), rep.init(init_fn)
    structure = jax.tree.structure(unpadded(state))
    if _cuts(strategy, setting.devices) and not _is_in_pieces(state):
        return "nothing of the state lies in pieces: this would show nothing"
    visits = oracles.visits(case, setting.optimizer, accumulate)
    for number, visit in zip(case.steps, visits, strict=True):
        given = rep.layout.pad_state(structure.unflatten(visit.before))
        state, metrics = step(put(given, rep.layout.state_shardings(given)), case.batch)
        tolerance = max(case.tolerance, MODEL_TOLERANCE * (strategy.model != 1))
        compare = _differing_parts if case.each else _differing
        if wrong := compare(visit, unpadded(state), metrics, tolerance):
            return f"at step {number}: {wrong}"
        if not _is_in_place(rep.layout, state):
            return f"at step {number}: the new state lies elsewhere"
    return None


def _visits(case: Case, optimizer: str, accumulate: int) -> list[Visit]:
    found = []
    if accumulate == 1:
        init_fn, step_fn = case.parts(_wrap(optimizer, None))
        state, step = jax.jit(init_fn)(jax.random.key(0)), jax.jit(step_fn)
    else:  # what microbatches make of a state only our engine knows
        rep = Replicator(1, strategy=strategies.zero1(), compilation_cache=False)
        init_fn, step_fn = case.parts(_wrap(optimizer, rep))
        state, step = rep.init(init_fn), rep.compile(step_fn, accumulate=accumulate)
    for number in range(max(case.steps) + 1):
        before = [np.array(leaf) for leaf in jax.tree.leaves(state)]
        start = seen(state)
        state, metrics = step(state, case.batch)
        if number in case.steps:
            found.append(
                Visit(
                    before=before,
                    start=start,
                    gradient=_gradients(state),
                    after=seen(state),
                    metrics=_plain(metrics),
                )
            )
    return found


def _plain(metrics: dict[str, Any]) -> dict[str, np.ndarray]:
    """Leave out declared metrics: one device has nothing to merge."""
    return {
        name: np.asarray(value)
        for name, value in metrics.items()
        if isinstance(value, jax.Array)
    }


def _wrap(optimizer: str, rep: Replicator | None) -> Any:
    """Return what makes a case's optimizers; the trace keeps the last gradient.

    `bare` has none: that gradients are results, too, changes how programs are cut.
    """

    def wrap(name: str | None = "params") -> Any:
        made = {**OPTIMIZERS, **PLAIN}[optimizer]()
        tx = made if optimizer == "bare" else optax.chain(optax.trace(0.0), made)
        plain = optax.with_extra_args_support(tx)
        # A step that wraps its optimizer gets it plain.
        return (
            plain if rep is None or name is None else rep.wrap_optimizer(tx, name=name)
        )

    return wrap


def _gradients(state: PyTree) -> dict[str, np.ndarray]:
    nodes = jax.tree.leaves(state, is_leaf=_is_trace)
    kept = [node.trace for node in nodes if _is_trace(node)]
    return {
        path: np.asarray(leaf, np.float64)
        # One optimizer's leaves have the names that they have in the parameters.
        for path, leaf in named_leaves(kept[0] if len(kept) == 1 else kept)
    }


def _is_trace(node: Any) -> bool:
    return isinstance(node, optax.TraceState)


def _cuts(strategy: Strategy, devices: int) -> bool:
    if strategy.kind == "replicates":
        return False
    sizes = strategy.sizes(devices)
    return sizes["shard"] * sizes["model"] > 1


def _differing(
    visit: Visit, state: PyTree, metrics: PyTree, tolerance: float
) -> str | None:
    found = _gradients(state)
    apart = [found[path] - leaf for path, leaf in visit.gradient.items()]
    by = _norm(apart) / _norm(visit.gradient.values()) if apart else 0.0
    if not by <= tolerance:
        return f"the gradient is off by {by:.1e}"
    scale = max(1.0, tolerance / MODEL_TOLERANCE)
    plain = {name: np.asarray(metrics[name]) for name in visit.metrics}
    for what, one, other, start in (
        ("metrics", plain, visit.metrics, None),
        ("state", seen(state), visit.after, visit.start),
    ):
        worst = farthest(one, other, start, tolerance=UPDATE_TOLERANCE * scale)
        if not worst.by <= 1:
            off = worst.by * UPDATE_TOLERANCE * scale
            return f"{what}: `{worst.path}` is off by {off:.1e}"
    return None


def _differing_parts(
    visit: Visit, state: PyTree, metrics: PyTree, tolerance: float
) -> str | None:
    """Name each part that is off: of the gradient, of metrics, of the state."""
    found, expected = _gradients(state), visit.gradient
    floor = 0.01 * _norm(expected.values())
    off = {
        ("gradient", path): _norm([found[path] - leaf])
        / max(_norm([leaf]), floor)
        / tolerance
        for path, leaf in expected.items()
    }
    plain = {name: np.asarray(metrics[name]) for name in visit.metrics}
    by = distances(plain, visit.metrics, None, tolerance=UPDATE_TOLERANCE)
    off |= {("metric", name): ratio for name, ratio in by.items()}
    # By itself: a queue that is given what it holds does not move.
    by = distances(seen(state), visit.after, None, tolerance=tolerance)
    off |= {tuple(path.split("/", 1)): ratio for path, ratio in by.items()}
    kinds: dict[str, list[str]] = {}
    for (kind, name), ratio in off.items():
        if not ratio <= 1 and kind != "opt":  # the optimizer's is the gradient
            kinds.setdefault(name, []).append(kind)
    named = [f"{name} ({', '.join(kind)})" for name, kind in sorted(kinds.items())]
    return f"{len(named)} parts are off: {'; '.join(named[:_NAMED])}" if named else None


def _norm(leaves: Iterable[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(leaf).sum() for leaf in leaves)))


def _is_in_place(layout: Layout, state: PyTree) -> bool:
    """Return whether a state lies where the strategy keeps it."""
    lies = layout.state_shardings(state)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(lies), strict=True)
    return all(
        leaf.sharding.is_equivalent_to(where, leaf.ndim) for leaf, where in leaves
    )


def _is_in_pieces(state: PyTree) -> bool:
    return any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(state))

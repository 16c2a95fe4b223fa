"""Check a step of your own against the law: the same answer on any number of replicas.

Design law 1. At equal parameters the gradient of a fixed global batch is the same on 1,
2, 4 and 8 replicas and at any accumulation, up to rounding; and in float64 whole
trajectories are, leaf by leaf. Parameters in float32 are not compared: a bias before a
batch norm has gradient zero, and rounding alone moves it. State that reads the batch
moves at every microbatch: it is compared with one replica's at the same accumulation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.mesh import put, replica_mesh
from replicator.base.padded import unpadded
from replicator.base.per_replica import is_per_replica, repeat_own, take_own
from replicator.base.tracebacks import short_traceback
from replicator.base.trees import named_leaves
from replicator.base.types import InitFn, Key, PyTree, StepFn
from replicator.engine.compiled_step import CompiledStep, CompileOptions
from replicator.engine.first_update.comparison import (
    GRADIENT_TOLERANCE,
    SPLIT_TOLERANCE,
)
from replicator.engine.layout import EQUAL, STATE, Layout, examples
from replicator.engine.make_step import make_layout
from replicator.engine.require_eager import in_no_mesh
from replicator.engine.step.accumulate import accumulated, single
from replicator.engine.step.microbatch_sums import KeyedStep, zero_sums
from replicator.engine.step.optimizer_state import optimizer_states
from replicator.engine.step.state import RunState, first_state
from replicator.engine.step.transforms import count_steps, keyed, lift
from replicator.engine.step.update_dependence import find_update_dependent
from replicator.errors import (
    ArgumentError,
    InvarianceError,
    ReplicatorError,
    check_function,
    check_whole,
)
from replicator.inputs.placement import batch_axis, place
from replicator.strategies.builders import Builder, Rules
from replicator.strategies.strategy import Strategy
from replicator.testing.comparisons import (
    Comparison,
    InvarianceReport,
    compared,
    norm,
)

OPTIMUM_FLOOR = 1e-2
"""Least later norm to divide by, as a share of the first gradient's norm."""

TRAJECTORY_TOLERANCE = 1e-9
"""Largest difference as a share of the norm of all parameters, float64: law 1."""

REPORTED = "metric"
"""Name of a metric in a report: it may be kept in float32, as means are."""

READS_BATCH = "float64 state that reads the batch"
"""Name of running statistics and the like in a report."""


@short_traceback
@in_no_mesh
def assert_replica_invariant(
    step_fn: StepFn,
    init_fn: InitFn,
    batch: PyTree,
    *,
    replicas: Sequence[int] = (1, 2, 4, 8),
    accumulate: Sequence[int] = (1, 2, 4),
    at_steps: Sequence[int] = (0, 1, 10, 50),
    seed: int = 0,
    strategy: Strategy | Builder | None = None,
) -> InvarianceReport:
    """Check that `step_fn` gives the same answer on any number of replicas.

    One run on one replica visits `at_steps`; at each, the gradient of `batch` is taken
    on every number of replicas at every accumulation, and compared in float32:
    |g_N - g_1| ≤ (1e-5 + 1e-6)·|g_1| over all leaves of an optimizer, where |g_1|
    counts as at least a hundredth of the first gradient's norm. Then the run is
    repeated in float64 on each, and at its end the state may differ by 1e-9 of its
    norm: what moves once per update from that of one replica and one microbatch, what
    reads the batch from that of one replica at the same accumulation. Integers, keys
    and flags must be equal; `PerReplica` leaves are not compared, and named. Under a
    strategy that partitions the metrics of the last update are compared, too.

    Args:
      step_fn: Step with an optimizer from `wrap_optimizer`.
      init_fn: Returns its state for a key.
      batch: One global batch, which divides by replicas times microbatches.
      replicas: Numbers of replicas; of devices, under a strategy that partitions, and
        those that do not fit its sizes are left out.
      accumulate: Numbers of microbatches. Leave it at (1,) for batch norm over the
        whole microbatch, on which the answer depends.
      at_steps: Numbers of updates after which gradients are compared; at the last,
        trajectories are.
      seed: Seed of the run.
      strategy: As `Replicator` takes it. Each answer under it is compared with that of
        one device; without a wrapped optimizer trajectories alone are, and of
        `accumulate` only 1.

    Returns:
      The comparisons, and the parts that were not compared.

    Raises:
      InvarianceError: An answer differs; the message names where.
      ArgumentError: There are too few devices, no wrapped optimizer, no number of
        devices that fits `strategy`, or an argument is of a wrong kind.

    >>> report = assert_replica_invariant(
    ...     step_fn, init_fn, batch, replicas=(1, 2), accumulate=(1,), at_steps=(0, 1)
    ... )
    """
    check_function("step_fn", step_fn, "state, batch", "state, batch, key")
    check_function("init_fn", init_fn, "key")
    check_whole("seed", seed)
    for name, value in (
        ("replicas", replicas),
        ("accumulate", accumulate),
        ("at_steps", at_steps),
    ):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ArgumentError(
                f"`{name}` must be a list of numbers, got {value!r}. Write "
                f"`{name}=({value},)`."
            )
    replicas, left_out = _that_fit(strategy, replicas)
    case = _Case(step_fn, init_fn, batch, seed, strategy)
    states = case.visit(sorted(at_steps), 1, 1)
    if _partitions(strategy) and not optimizer_states(states[min(states)]):
        left_out += [
            f"accumulate={k}: no optimizer is a wrapped one"
            for k in accumulate
            if k > 1 and 1 in accumulate
        ]
        accumulate = [1] if 1 in accumulate else accumulate
    settings = [(n, k) for n in replicas for k in accumulate if (n, k) != (1, 1)]
    comparisons = list(case.compare_gradients(states, settings))
    if not comparisons:
        left_out.append("gradients: no optimizer is a wrapped one")
    left_out += [
        f"`{path}`, a `PerReplica` leaf: each replica has its own"
        for path, node in named_leaves(states[min(states)], is_leaf=is_per_replica)
        if is_per_replica(node)
    ]
    try:
        comparisons += case.compare_trajectories(max(at_steps), settings)
    except (ReplicatorError, TypeError, ValueError) as refusal:
        if isinstance(refusal, InvarianceError):
            raise
        left_out.append(f"float64 trajectories, the step refuses float64: {refusal}")
    return InvarianceReport(comparisons=tuple(comparisons), left_out=tuple(left_out))


@dataclasses.dataclass(frozen=True)
class _Case:
    step_fn: StepFn
    init_fn: InitFn
    batch: PyTree
    seed: int
    strategy: Strategy | Builder | None
    layouts: dict[tuple[int, str], Layout] = dataclasses.field(default_factory=dict)

    def visit(
        self, at_steps: Sequence[int], num_replicas: int, accumulate: int
    ) -> dict[int, PyTree]:
        """Run, and return host copies of the state after `at_steps` updates."""
        return self._visited(at_steps, num_replicas, accumulate)[0]

    def _visited(
        self, at_steps: Sequence[int], num_replicas: int, accumulate: int
    ) -> tuple[dict[int, PyTree], PyTree]:
        """Run; return also the metrics of the last update."""
        layout = self._layout(num_replicas)
        options = CompileOptions(accumulate=accumulate)
        update = count_steps(lift(self.step_fn, accumulate=accumulate))
        step = CompiledStep(update, layout, options)
        run = self._at(0, self._start(layout))
        visited, metrics = {}, {}
        for done in range(max(at_steps) + 1):
            if done in at_steps:
                visited[done] = unpadded(jax.device_get(run.user))
            if done < max(at_steps):
                run, metrics = step(run, _as_wide(self.batch))
        return visited, jax.device_get(metrics)

    def compare_gradients(self, states: dict[int, PyTree], settings: Sequence):
        """Compare gradients at equal states with those on one replica."""
        expected = self._gradients_at(states, 1, 1)
        # At an optimum the gradient is 0 and rounding is all of it.
        floors = {
            name: norm(gradient) * OPTIMUM_FLOOR
            for name, gradient in expected[min(expected)].items()
        }
        for n, k in settings:
            found = self._gradients_at(states, n, k)
            is_split = self._layout(n).mesh.shape.get("model", 1) > 1
            for step, by_name in found.items():
                for name, gradient in by_name.items():
                    yield compared(
                        gradient,
                        expected[step][name],
                        floor=floors[name],
                        what=f"gradient of `{name}`",
                        step=step,
                        tolerance=SPLIT_TOLERANCE if is_split else GRADIENT_TOLERANCE,
                        **self._place(n, k),
                    )

    def compare_trajectories(self, steps: int, settings: Sequence) -> list[Comparison]:
        """Compare the state after `steps` updates in float64."""
        with jax.enable_x64(True):
            once = self._follows_optimizer(max((k for _, k in settings), default=1))
            cuts = {(1, 1), *((1, k) for _, k in settings)}
            alone = {k: self._final(once, steps, n, k) for n, k in sorted(cuts)}
            comparisons = []
            for n, k in settings:
                final = alone[k] if n == 1 else self._final(once, steps, n, k)
                updated, read, metrics = final
                pairs = [("float64 trajectory", updated, alone[1][0])]
                if read and n > 1:
                    pairs.append((READS_BATCH, read, alone[k][1]))
                if n > 1 and _partitions(self.strategy):
                    one = alone[k][2]
                    pairs += [(REPORTED, {p: metrics[p]}, {p: one[p]}) for p in one]
                comparisons += [
                    compared(
                        found,
                        expected,
                        what=what,
                        step=steps,
                        tolerance=GRADIENT_TOLERANCE
                        if what == REPORTED
                        else TRAJECTORY_TOLERANCE,
                        **self._place(n, k),
                    )
                    for what, found, expected in pairs
                ]
            return comparisons

    def _final(
        self, once: list[bool], steps: int, num_replicas: int, accumulate: int
    ) -> tuple[dict[str, np.ndarray], ...]:
        """Return leaves that move once per update, those that read batches, metrics."""
        visited, metrics = self._visited([steps], num_replicas, accumulate)
        state = visited[steps]
        updated, read = {}, {}
        marks = iter(once)
        for path, node in named_leaves(state, is_leaf=is_per_replica):
            own = [next(marks) for _ in jax.tree.leaves(node)]
            if not is_per_replica(node):
                (updated if own[0] else read)[path] = _numbers(node)
        return updated, read, {path: _numbers(x) for path, x in named_leaves(metrics)}

    def _follows_optimizer(self, accumulate: int) -> list[bool]:
        found: list[bool] = []

        def ask(state: PyTree, batch: PyTree, key: Key) -> tuple[PyTree, tuple[()]]:
            step = keyed(self.step_fn)
            sums = zero_sums(step, state, batch, key, count=accumulate)
            parted = find_update_dependent(
                step, state, sums, batch, key, count=accumulate
            )
            found.extend(parted.leaves)
            return state, ()

        # As one of many, though there is one: it may use collectives.
        layout = self._layout(1)
        state = self._start(layout)
        if not optimizer_states(state):  # no microbatches, then
            return [True] * len(jax.tree.leaves(state))
        program = _on_each_replica(ask, layout, accumulate=1)
        jax.eval_shape(program, self._at(0, state), _as_wide(self.batch))
        return found

    def _gradients_at(
        self, states: dict[int, PyTree], num_replicas: int, accumulate: int
    ) -> dict[int, dict[str, PyTree]]:
        layout = self._layout(num_replicas)
        gradients = _make_gradients(self.step_fn, layout, accumulate)
        # States first: a builder of strategies asks for variables.
        runs = {step: self._at(step, _put(x, layout)) for step, x in states.items()}
        batch = place(self.batch, layout, accumulate=accumulate)
        return {step: jax.device_get(gradients(x, batch)) for step, x in runs.items()}

    def _layout(self, num_replicas: int) -> Layout:
        # A builder's strategy is bound to the variables that it saw, dtypes and all.
        which = num_replicas, jax.dtypes.canonicalize_dtype(np.float64).name
        if which not in self.layouts:
            strategy = self.strategy
            if num_replicas == 1 and _partitions(strategy):
                strategy = Rules([])  # the oracle, without a strategy
            self.layouts[which] = make_layout(
                replica_mesh(num_replicas), strategy, reduction="fast"
            )
        return self.layouts[which]

    def _place(self, num_replicas: int, accumulate: int) -> dict[str, Any]:
        """Return the fields of a comparison that describe the devices."""
        return {
            "replicas": num_replicas,
            "accumulate": accumulate,
            "strategy": self._layout(num_replicas).describe().get("name"),
        }

    def _start(self, layout: Layout) -> PyTree:
        """Return the first state, born in float32: every run starts the same."""
        with jax.enable_x64(False):
            key = jax.random.key(self.seed)
            state = first_state(self.init_fn, self._layout(1), key=key).born()
        return _put(_as_wide(jax.device_get(state)), layout)

    def _at(self, step: int, state: PyTree) -> RunState:
        """Return the run after `step` updates, as `rep.run` has it."""
        data = jax.random.key_data(jax.random.key(self.seed))
        return RunState(step=jnp.int32(step), key=data, user=state)


def _partitions(strategy: Strategy | Builder | None) -> bool:
    return callable(strategy) or getattr(strategy, "kind", None) == "partitions"


def _that_fit(
    strategy: Strategy | Builder | None, replicas: Sequence[int]
) -> tuple[list[int], list[str]]:
    """Return the numbers of devices that a strategy fits, and texts for the others.

    The numbers for a builder are not known before there are variables; one device is
    the oracle, which has no strategy.

    Raises:
      ArgumentError: It fits none of those above 1.
    """
    if not (isinstance(strategy, Strategy) and _partitions(strategy)):
        return list(replicas), []
    refusals: dict[int, ArgumentError] = {}
    for n in replicas:
        try:
            strategy.sizes(n)
        except ArgumentError as refusal:
            if n != 1:
                refusals[n] = refusal
    fitting = [n for n in replicas if n not in refusals]
    if refusals and fitting in ([], [1]):
        raise refusals[max(refusals)]
    return fitting, [f"replicas={n}: {refusal}" for n, refusal in refusals.items()]


def _make_gradients(step_fn: StepFn, layout: Layout, accumulate: int) -> Callable:
    step = keyed(step_fn)
    made = single(step, show="reduced")
    if accumulate > 1:
        made = accumulated(step, accumulate, show="reduced")

    def update(state: PyTree, batch: PyTree, key: Key) -> tuple[PyTree, PyTree]:
        _, _, shown = made(state, batch, key)
        return state, shown

    return jax.jit(_on_each_replica(update, layout, accumulate=accumulate))


def _on_each_replica(update: KeyedStep, layout: Layout, *, accumulate: int) -> Callable:
    """Lift the metrics of `update`, equal on all replicas, to `program(run, batch)`."""
    return layout.spread(
        lambda run, batch: count_steps(update)(run, batch, None)[1],
        inputs=(STATE, examples(batch_axis(accumulate))),
        outputs=EQUAL,
    )


def _put(state: PyTree, layout: Layout) -> PyTree:
    """Put a one-replica state in its place; declared leaves start as replica 0's."""
    own = take_own(state)
    placed = layout.pad_state(repeat_own(own, num_replicas=layout.num_replicas))
    return put(placed, layout.state_shardings(placed))


def _as_wide(tree: PyTree) -> PyTree:
    """Make floats float64 where JAX has it on."""
    if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        return tree

    def widen(leaf: np.ndarray) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.asarray(leaf, np.float64)
        return leaf

    return jax.tree.map(widen, tree)


def _numbers(leaf: jax.Array | np.ndarray) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)

"""Pure transforms from the step of one replica to a call of the compiled step.

From the inside out: a step that always takes a key and must keep its state's structure;
an update of k microbatches; metrics merged over replicas; the run's own step count and
key around it; gradient norms among the metrics; n updates in one `lax.scan`. Nothing
here runs or compiles.
"""

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.trees import (
    first_difference,
    first_without_numbers,
    named_leaves,
)
from replicator.base.types import Key, PyTree, StepFn
from replicator.collectives.context.axes import num_replicas
from replicator.collectives.context.keys import refuse_keys
from replicator.collectives.context.step_number import in_step
from replicator.engine.analysis.lookup_hints import explained
from replicator.engine.analysis.shared_noise import SharedRandomKeyWarning
from replicator.engine.analysis.source_lines import user_stacklevel
from replicator.engine.metrics import declared as metrics
from replicator.engine.metrics.rows import join_rows, refuse_rows
from replicator.engine.reduction.row_bounds import bounds_known
from replicator.engine.step.accumulate import accumulated, single
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.optimizer_state import (
    NotedUpdate,
    Reduction,
    Showing,
    is_optimizer_state,
    optimizer_states,
    updates_noted,
    without_pending,
)
from replicator.engine.step.state import RunState, step_key, strong
from replicator.errors import ArgumentError, ReplicatorError, StateError


class Measured(NamedTuple):
    """Metrics, and the norm of each optimizer's reduced gradient by its name."""

    metrics: PyTree
    gradient_norms: dict[str, jax.Array]


def lift(
    step_fn: StepFn,
    *,
    accumulate: int = 1,
    reduction: Reduction = "fast",
    measures: bool = False,
) -> KeyedStep:
    """Lift `step_fn` to one update of one replica, with metrics merged.

    Args:
      step_fn: The user's `step_fn(state, batch[, key])`.
      accumulate: Number of microbatches per update; batch leaves then are [accumulate,
        examples, ...] of one replica.
      reduction: Way in which gradients and metrics add up over replicas.
      measures: Whether metrics come as `Measured`.

    Returns:
      `update(state, batch, key) -> (state, metrics)`; `PerReplica` metrics stay
      declared.
    """
    step = keyed(step_fn)
    show: Showing = "norm" if measures else "nothing"
    lone, many = single(step, show=show), accumulated(step, accumulate, show=show)

    def update(state: PyTree, batch: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        with bounds_known(step, state, batch, key, accumulate=accumulate):
            return run(state, batch, key)

    def run(state: PyTree, batch: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        if accumulate > 1:
            after, reported, shown = many(state, batch, key)
        elif reduction == "ordered" and optimizer_states(state):
            # Ordered bits need every block to pass the same scan body, even if alone.
            block = jax.tree.map(lambda leaf: leaf[None], batch)
            after, reported, shown = many(state, block, key)
        else:
            after, reported, shown = lone(state, batch, key)
        given, cut = (state, batch, key), accumulate > 1
        if num_replicas() * accumulate > 1:  # else there are no others to merge with
            refuse_rows(reported, lone, given, cut=cut)
        reported = join_rows(reported, lone, given, cut=cut)
        merged = metrics.merge_replicas(reported, reduction=reduction)
        return after, Measured(merged, shown) if measures else merged

    return update


def count_steps(update: KeyedStep) -> KeyedStep:
    """Make an update of a `RunState`: `update` gets the step's key, and is counted."""

    def counted(run: RunState, batch: PyTree, key: None) -> tuple[RunState, PyTree]:
        key_now = step_key(run.key, run.step)
        with in_step(run.step):
            user, reported = update(run.user, batch, key_now)
        return dataclasses.replace(run, step=run.step + 1, user=user), reported

    return counted


def repeat_steps(update: KeyedStep) -> KeyedStep:
    """Run `update` over a leading axis of batches and keys, in one `lax.scan`."""

    def repeated(
        state: PyTree, batches: PyTree, keys: Key | None
    ) -> tuple[PyTree, PyTree]:
        return lax.scan(lambda s, turn: update(s, *turn), state, (batches, keys))

    return repeated


def report_norms(update: KeyedStep, *, among_metrics: bool) -> KeyedStep:
    """Return plain metrics for `Measured` ones.

    Args:
      update: An update whose metrics are `Measured`.
      among_metrics: Whether a dict of metrics holds the norms: `gradient_norm`, or
        `gradient_norm/NAME` for several optimizers. Otherwise they are not computed.
    """

    def plain(state: PyTree, batch: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        after, (reported, norms) = update(state, batch, key)
        if among_metrics and isinstance(reported, dict):
            names = dict.fromkeys(norms, "gradient_norm")
            if len(norms) > 1:
                names = {name: f"gradient_norm/{name}" for name in norms}
            reported = {names[name]: norms[name] for name in norms} | reported
        return after, reported

    return plain


def takes_key(step_fn: Callable) -> bool:
    """Return whether `step_fn` requires a third positional parameter: a random key.

    >>> takes_key(lambda state, batch, key: (state, {}))
    True
    """
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    found = inspect.signature(step_fn).parameters.values()
    required = [each for each in found if each.default is inspect.Parameter.empty]
    return sum(each.kind in positional for each in required) >= 3


def keyed(step_fn: StepFn) -> KeyedStep:
    """Give `step_fn` its key if it wants one, and check its results.

    Args:
      step_fn: The user's step.

    Returns:
      A step that always takes a key, and raises `StateError` if the state it returns
      has another structure than the state it was given, or a leaf is not a number.
    """
    wants_key = takes_key(step_fn)

    def step(state: PyTree, batch: PyTree, key: Key | None) -> tuple[PyTree, PyTree]:
        if wants_key and key is None:
            raise ArgumentError(
                "`key` must be given to a step whose `step_fn` takes one, got None. "
                "Call `step(state, batch, key)`."
            )

        def run(state: PyTree) -> tuple[PyTree, PyTree]:
            return step_fn(*((state, batch, key) if wants_key else (state, batch)))

        state = strong(state)
        # In containers of its own: a step may write into those that it is given.
        given = jax.tree.map(lambda leaf: leaf, state)
        drawn = _numpy_drawn()
        with _axis_named(), explained(state, batch), updates_noted() as updates:
            returned = _run_noted(run, given)
        if _is_traced(state) and _numpy_drawn() != drawn:
            _warn_of_numpy()
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise StateError(
                "`step_fn` must return (state, metrics), got "
                f"{type(returned).__name__}. Return an empty dict if there are no "
                "metrics."
            )
        after, reported = returned
        for what, tree in {"state": after, "metrics": reported}.items():
            if found := first_without_numbers(tree):
                raise StateError(
                    f"`step_fn` must return arrays and numbers, got {found} in its "
                    f"{what}. Leave it out."
                )
        refuse_keys("step_fn", reported)
        _refuse_unused(updates, state, after)
        return _kept(state, after, run), reported

    return step


def _run_noted(run: Callable, state: PyTree) -> tuple[PyTree, PyTree]:
    """Run a step; add the weakly typed leaf to JAX's errors about dtypes."""
    try:
        return run(state)
    except (TypeError, ValueError) as failure:
        is_ours = isinstance(failure, ReplicatorError)
        if not is_ours and (remedy := _weak_remedy(run, state)):
            failure.add_note(remedy)
        raise


def _numpy_drawn() -> tuple[bytes, int]:
    """Return where NumPy's global generator stands."""
    _, words, position, *_ = np.random.get_state()
    return np.asarray(words).tobytes(), int(position)


def _warn_of_numpy() -> None:
    warnings.warn(
        "`step_fn` must draw random numbers by its `key`, got one that draws by "
        "`np.random`: once, when it is traced, the same for all steps and replicas. "
        "Write `def step_fn(state, batch, key)`.",
        SharedRandomKeyWarning,
        stacklevel=user_stacklevel(),
    )


@contextlib.contextmanager
def _axis_named() -> Iterator[None]:
    """Add the name of the axis to JAX's error about an unknown one."""
    try:
        yield
    except NameError as failure:
        if "unbound axis" in str(failure):
            failure.add_note(f"In a step the replicas' axis is named {REPLICA_AXIS!r}.")
        raise


def _kept(before: PyTree, after: PyTree, run: Callable) -> PyTree:
    """Return `after` as strongly typed arrays; refuse another structure."""
    after = jax.tree.map(jnp.asarray, after)
    difference = first_difference(without_pending(before), without_pending(after))
    if difference is not None:
        remedy = _weak_remedy(run, before) or "Return every leaf as it came, updated."
        raise StateError(
            "`step_fn` must return a state of the structure, shapes and dtypes that it "
            f"was given, got another: {difference}. {remedy}"
        )
    return strong(after)


def _refuse_unused(
    updates: Sequence[NotedUpdate], before: PyTree, after: PyTree
) -> None:
    """Refuse a step that makes an update, and returns the state without it.

    A leaf that the step did not touch is the very array that it was given. An optimizer
    rests if its parameters stay as they came: then its state may, too.
    """
    kept = dict(named_leaves(after, is_leaf=is_optimizer_state))
    given = named_leaves(before, is_leaf=is_optimizer_state)
    own = {path: leaf for path, leaf in given if not is_optimizer_state(leaf)}
    numbers = [path for path in own if jnp.issubdtype(own[path].dtype, jnp.inexact)]
    for update in updates:
        new, old, moves = map(_ids, (update.updates, update.params, update.state))
        for path, leaf in own.items():
            if id(leaf) in old and id(kept.get(path)) in new:
                raise _unused(path, "its update alone")
        if numbers and all(kept.get(path) is own[path] for path in numbers):
            raise _unused(numbers[0], "it as it came")
        mine = [path for path, leaf in own.items() if id(leaf) in old]
        if mine and all(kept.get(path) is own[path] for path in mine):
            continue
        for path, leaf in given:
            if moves and moves == _ids(leaf) == _ids(kept.get(path)):
                raise StateError(
                    "`step_fn` must return the new state of its optimizer, got "
                    f"`{path}` as it came. Return `opt` of `updates, opt = "
                    "optimizer.update(...)` there."
                )
        if moves and _is_traced(before) and not _is_traced(update.state):
            raise StateError(
                "`step_fn` must take the state of its optimizer from its `state`, got "
                "one from outside, which no update moves. Return "
                "`optimizer.init(params)` among the state of `init_fn`."
            )


def _is_traced(tree: PyTree) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def _ids(tree: PyTree) -> list[int]:
    return [id(leaf) for leaf in jax.tree.leaves(tree)]


def _unused(path: str, found: str) -> StateError:
    return StateError(
        f"`step_fn` must return `{path}` with its update, got {found}. Return "
        "`optax.apply_updates(params, updates)` in its place."
    )


def _weak_remedy(run: Callable, state: PyTree) -> str | None:
    """Name the scalars of `state` that are to blame if a step changes dtypes.

    If they were weakly typed, as numbers of Python are, `run(state)` would keep all
    dtypes.
    """
    leaves, treedef = jax.tree.flatten(state)
    numbers = [jnp.asarray(number).dtype for number in (0, 0.0)]
    blamed = [n for n, x in enumerate(leaves) if not x.shape and x.dtype in numbers]

    def keeps(weak: list[int]) -> bool:
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=place in weak)
            for place, leaf in enumerate(leaves)
        ]
        try:
            after, _ = jax.eval_shape(run, treedef.unflatten(shapes))
        except Exception:
            return False
        kept = without_pending(state), without_pending(after)
        return first_difference(*kept) is None

    if not blamed or not keeps(blamed):
        return None
    for place in list(blamed):
        if keeps(fewer := [each for each in blamed if each != place]):
            blamed = fewer
    named = named_leaves(state)
    names = " and ".join(f"`{named[place][0]}`" for place in blamed)
    return (
        f"{names} is {leaves[blamed[0]].dtype}, as a number of Python is once it is "
        "state. Give it the dtype of its operands: `jnp.asarray(value, w.dtype)`."
    )

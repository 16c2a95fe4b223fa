"""State of a wrapped optimizer, from update to update and within one.

The slot `pending` chooses the action of `update`: None means reduce and update;
`Collecting` add up, `Collected` update from the sums, `Show` return the gradients or
their norm, too. That is part of the structure of the state, so it is known while a step
is traced, and a value that is not asked for is not computed.

A `flax.nnx.Optimizer` writes the values of its new state into the old one, whose
structure cannot change. For such a state the structure of the sums is learned first
(`Learning`), and sums and slots are there, in its variables, before it is called.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from replicator.base.per_replica import PerReplica
from replicator.base.types import PyTree
from replicator.collectives.precision import sum_dtype
from replicator.engine.step.loss_scale import LossScaleState
from replicator.errors import ArgumentError
from replicator.strategies.strategy import Strategy

Reduction = Literal["fast", "ordered"]

Share = Literal["equal", "weight", "count"]
"""Kind of gradients: of means that count alike, of means that count as much as their
weight, or of sums over a count of examples."""

Showing = Literal["nothing", "given", "reduced", "norm"]
"""Value that `update` returns in `shown`: none; the gradients it was given, and does
not use (the analysis follows them); the reduced ones; or their norm."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientsOfSums:
    """Gradients of several sums over examples, each with a count of its own.

    Attributes:
      parts: One tree like the parameters for each sum.
      counts: Their counts, [sums]; None if they are kept elsewhere.
    """

    parts: tuple[PyTree, ...]
    counts: jax.Array | None = None


def one_of(gradients: PyTree) -> PyTree:
    """Return one tree like the parameters from the gradients given to `update`."""
    several = isinstance(gradients, GradientsOfSums)
    return gradients.parts[0] if several else gradients


_STATIC = {"static": True}  # part of the structure, in JAX's terms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Collecting:
    """Gradients add up: the step is running over the microbatches of one update.

    Attributes:
      total: Sum of gradients so far, times their weights if they have such, or None
        before the first.
      weight: Sum of weights or counts so far, a scalar of JAX's default float, or one
        for each of several sums.
      count: Number of microbatches so far, an int32 scalar.
      calls: Number of calls of `update` in this run of the step.
      share: Kind of the gradients.
    """

    total: PyTree
    weight: jax.Array
    count: jax.Array
    calls: int = dataclasses.field(default=0, metadata=_STATIC)
    share: Share = dataclasses.field(default="equal", metadata=_STATIC)


def nothing_yet() -> Collecting:
    """Return sums before the first microbatch, whose structure is not known."""
    return Collecting(total=None, weight=jnp.zeros(()), count=jnp.zeros((), jnp.int32))


@dataclasses.dataclass(eq=False)
class UpdateCalls:
    """Arguments of the traced calls of `update`; compared by identity, as a trace is.

    Attributes:
      calls: One for each call that was traced: `Collecting` of shapes, or None if these
        are not asked for.
    """

    calls: list[Any] = dataclasses.field(default_factory=list)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
    """Ask for the shapes that `update` would collect, and change nothing."""

    given: UpdateCalls = dataclasses.field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """All microbatches of the update are in the sums: reduce them and update.

    Attributes:
      total: Sum of gradients, times their weights if they have such.
      weight: Sum of weights or counts, a scalar of JAX's default float.
      count: Number of microbatches, an int32 scalar.
      share: Kind of the gradients.
      show: Kind of the value that `update` returns.
      shown: Slot of that value.
    """

    total: PyTree
    weight: jax.Array
    count: jax.Array
    share: Share = dataclasses.field(default="equal", metadata=_STATIC)
    show: Showing = dataclasses.field(default="nothing", metadata=_STATIC)
    shown: PyTree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Ask an update without accumulation for something: gradients, or their norm.

    Attributes:
      show: Kind of the value that `update` returns.
      given: Calls of `update`.
      shown: Slot of that value. With zeros in it the state that `update` returns has
        the structure of the one that it took, as `lax.scan` wants of its carry.
    """

    show: Showing = dataclasses.field(metadata=_STATIC)
    given: UpdateCalls = dataclasses.field(metadata=_STATIC)
    shown: PyTree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSums:
    """Sums of an own loop that feeds microbatches one by one.

    Attributes:
      total: Sum of gradients, times their weights if they have such.
      weight: Sum of weights or counts.
      count: Number of microbatches so far, an int32 scalar.
      every: Number of microbatches of an update.
    """

    total: PerReplica
    weight: PerReplica
    count: jax.Array
    every: int = dataclasses.field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SynchroniserState:
    """State of the rules by which replicas add up gradients.

    Attributes:
      owed: Part of gradients that this replica did not send yet, by path: in shares of
        the update, without a loss scale. All replicas together owe the same after a
        restore on another number of them. None where all ways are exact.
      factors: Warm start of each approximation of low rank, by path.
      paths: Paths of the parameters, each with the name of the optimizer in front.
      strategy: Strategy that has the rules.
    """

    owed: PerReplica | None
    factors: dict[str, jax.Array]
    paths: tuple[str, ...] = dataclasses.field(metadata=_STATIC)
    strategy: Strategy = dataclasses.field(metadata=_STATIC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """State of a wrapped optimizer.

    Attributes:
      inner: State of the wrapped transformation.
      skipped: Number of updates skipped for a non-finite gradient, int32; None if not
        asked for.
      scale: The dynamic loss scale, or None.
      pending: None between updates; sums under accumulation.
      name: First component of the path of the parameters that it updates.
      reduction: Way in which its gradients add up.
      synchroniser: State of a strategy's rules for its gradients; None without rules.
    """

    inner: PyTree
    skipped: jax.Array | None
    scale: LossScaleState | None
    pending: Learning | Collecting | Collected | Show | OwnSums | None
    name: str = dataclasses.field(metadata=_STATIC)
    reduction: Reduction = dataclasses.field(metadata=_STATIC)
    synchroniser: SynchroniserState | None = None

    @property
    def hyperparams(self) -> dict[str, jax.Array]:
        """Hyperparameters of `optax.inject_hyperparams`, to read or to set."""
        return self.inner.hyperparams


class NotedUpdate(NamedTuple):
    """One call of `update` in a step: what it was given, and its updates."""

    state: OptimizerState
    params: PyTree
    updates: PyTree


_noted: ContextVar[list[NotedUpdate] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def updates_noted() -> Iterator[list[NotedUpdate]]:
    """List the updates that are made in a context."""
    noted: list[NotedUpdate] = []
    before = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(before)


def note_update(state: OptimizerState, params: PyTree, updates: PyTree) -> None:
    """Add an update to the list of the context, if there is one."""
    if (noted := _noted.get()) is not None:
        noted.append(NotedUpdate(state, params, updates))


def is_optimizer_state(node: PyTree) -> bool:
    """Return whether `node` is the state of a wrapped optimizer.

    >>> is_optimizer_state(optax.adam(1e-3).init(jnp.ones(2)))
    False
    """
    return isinstance(node, OptimizerState)


def own_variables(tree: PyTree) -> list[Callable | None]:
    """Return per optimizer state the maker of its variables; None for plain arrays.

    A `flax.nnx.Optimizer` keeps its state, and its step, in variables.
    """

    def is_holder(node: PyTree) -> bool:
        held = getattr(node, "opt_state", None)
        return hasattr(node, "wrt") and is_optimizer_state(held)

    def is_either(node: PyTree) -> bool:
        return is_optimizer_state(node) or is_holder(node)

    nodes = filter(is_either, jax.tree.leaves(tree, is_leaf=is_either))
    return [type(node.step) if is_holder(node) else None for node in nodes]


def empty_slot(show: Showing, total: PyTree, variable: Callable | None) -> PyTree:
    """Return the slot for a shown value, if it must be there before the update."""
    if variable is None or show == "nothing":
        return None
    total = total if show == "given" else one_of(total)
    like = jnp.zeros((), jnp.float32) if show == "norm" else total
    return jax.tree.map(lambda leaf: variable(jnp.zeros_like(leaf)), like)


def without_pending(tree: PyTree) -> PyTree:
    """Drop the values of accumulation from the optimizer states of `tree`."""
    return with_pending(tree, [None] * len(optimizer_states(tree)))


def with_pending(tree: PyTree, pending: Sequence) -> PyTree:
    """Put `pending` into the optimizer states of `tree`, in leaf order."""
    rest = iter(pending)
    return jax.tree.map(
        lambda node: (
            dataclasses.replace(node, pending=next(rest))
            if is_optimizer_state(node)
            else node
        ),
        tree,
        is_leaf=is_optimizer_state,
    )


def optimizer_states(tree: PyTree) -> list[OptimizerState]:
    """List the states of wrapped optimizers in `tree`, in leaf order.

    >>> optimizer_states({"params": jnp.ones(2)})
    []
    """
    nodes = jax.tree.leaves(tree, is_leaf=is_optimizer_state)
    return [node for node in nodes if is_optimizer_state(node)]


def scale_loss(loss: jax.Array, state: OptimizerState) -> jax.Array:
    """Multiply `loss` by the optimizer's loss scale; unchanged if it has none.

    A loss in half precision comes back in float32: times the scale it would overflow.

    Raises:
      ArgumentError: `state` is not the state of a wrapped optimizer.

    >>> optimizer = wrap_optimizer(optax.adam(1e-3), loss_scale=DynamicLossScale())
    >>> def step_fn(state, batch):
    ...     def scaled_fn(params):
    ...         loss = loss_fn(params, batch)
    ...         return scale_loss(loss, state["opt"]), loss
    ...     grads, loss = jax.grad(scaled_fn, has_aux=True)(state["params"])
    ...     updates, opt = optimizer.update(grads, state["opt"], state["params"])
    ...     params = optax.apply_updates(state["params"], updates)
    ...     return {"params": params, "opt": opt}, {"loss": loss}
    """
    check_optimizer_state(state)
    if state.scale is None:
        return loss
    wide = jnp.asarray(loss).astype(sum_dtype(jnp.result_type(loss)))
    return wide * state.scale.value.astype(wide.dtype)


def check_optimizer_state(state: object) -> None:
    """Refuse a value that is not the state of a wrapped optimizer.

    Raises:
      ArgumentError: It is not.
    """
    if not isinstance(state, OptimizerState):
        raise ArgumentError(
            f"`state` must be a wrapped optimizer's, got {type(state).__name__}. Pass "
            "the result of the wrapped one's `init`."
        )

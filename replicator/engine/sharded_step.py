"""Make the one program that runs a lifted step on every replica of a layout.

A replica takes its slice of the batch and of declared leaves, runs, and returns state,
merged metrics, metrics of its own, and the errors of `checkify`: four parts, because
each is of its own kind.
"""

import dataclasses
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from replicator.base.flat_tree import FlatTree
from replicator.base.per_replica import is_per_replica
from replicator.base.types import Key, PyTree
from replicator.engine.layout import EQUAL, STATE, Layout, examples, per_replica
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.optimizer_state import Reduction
from replicator.errors import ArgumentError, check_counts
from replicator.inputs.placement import batch_axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of a compiled step.

    Attributes:
      accumulate: Number of microbatches per update.
      steps_per_call: Number of updates per call; batches and keys then have a leading
        axis.
      max_in_flight: Largest number of calls dispatched and not yet finished.
      checks: `checkify` errors to look for, e.g. `checkify.user_checks`; None for none.
      reduction: Way in which gradients add up; `"ordered"` allows the step no
        collectives of its own.
      state_copies: Most copies of the state that its devices hold at once, for saves:
        they count as memory that the step needs.

    Raises:
      ArgumentError: A number is below 1, or `checks` is not a set.
    """

    accumulate: int = 1
    steps_per_call: int = 1
    max_in_flight: int = 4
    checks: frozenset | None = None
    reduction: Reduction = "fast"
    state_copies: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "accumulate", "steps_per_call", "max_in_flight")
        if self.checks is not None and not isinstance(self.checks, Set):
            raise ArgumentError(
                f"`checks` must be a set of `checkify` errors, got {self.checks!r}. "
                "Pass `checkify.user_checks`."
            )


class Outputs(NamedTuple):
    """Results of a replica, a field for each kind."""

    state: PyTree
    shared: PyTree  # metrics, with None in place of declared per-replica ones
    own: PyTree  # the per-replica metrics, with None in place of all others
    error: Any  # `checkify.Error`, or None where nothing was checked
    token: Any  # an array, ready when the program is done, and never donated


def shard_step(update: KeyedStep, layout: Layout, options: CompileOptions):
    """Return the jitted program of all replicas; it takes over the state.

    Args:
      update: A lifted step of one replica.
      layout: Layout of the replicas on devices.
      options: Options of the compiled step.

    Returns:
      A jitted `program(state, batch, key) -> Outputs` of global arrays; it takes and
      returns the state as a `FlatTree`.
    """
    on_all = layout.spread(
        one_replica(update, options),
        inputs=(
            STATE,
            examples(batch_axis(options.accumulate, options.steps_per_call)),
            EQUAL,
        ),
        outputs=Outputs(
            state=STATE,
            shared=EQUAL,
            own=per_replica(axis=int(options.steps_per_call > 1)),
            error=per_replica(),
            token=EQUAL,
        ),
    )

    def program(flat: FlatTree, batch: PyTree, key: Key | None) -> Outputs:
        outputs = on_all(flat.tree, batch, key)
        return outputs._replace(state=FlatTree.of(outputs.state))

    return jax.jit(program, donate_argnums=0)


def one_replica(
    update: KeyedStep, options: CompileOptions
) -> Callable[[PyTree, PyTree, Key | None], Outputs]:
    """Return the function of one replica in the program of all of them."""

    def replica(state: PyTree, batch: PyTree, key: Key | None) -> Outputs:
        run = update if options.checks is None else _checked(update, options.checks)
        outputs = run(state, batch, key)
        (after, reported), error = (
            outputs if options.checks is not None else (outputs, None)
        )
        return Outputs(
            state=after,
            shared=_declared_only(reported, keep=False),
            own=_declared_only(reported, keep=True),
            error=error,
            token=jnp.zeros((), jnp.uint8),
        )

    return replica


def _checked(update: KeyedStep, checks: frozenset) -> Callable:
    def run(state: PyTree, batch: PyTree, key: Key | None):
        error, outputs = checkify.checkify(update, errors=checks)(state, batch, key)
        return outputs, error

    return run


def raise_error(error: checkify.Error, num_replicas: int) -> None:
    """Raise the error of a `checkify` check, with the replicas that found it."""
    found: dict[str, list[int]] = {}
    for replica in range(num_replicas):
        message = jax.tree.map(lambda leaf, r=replica: leaf[r], error).get()
        if message is not None:
            found.setdefault(message, []).append(replica)
    # A NaN spreads through collectives: where it began, fewer replicas report it.
    causes = sorted(found.items(), key=lambda item: len(item[1]))
    if causes:
        lines = [f"{_named(where)}: {message}" for message, where in causes]
        raise checkify.JaxRuntimeError("\n".join(lines[:3]))


def _named(found: list[int]) -> str:
    if len(found) == 1:
        return f"replica {found[0]}"
    return f"replicas {', '.join(map(str, found))}"


def _declared_only(metrics: PyTree, *, keep: bool) -> PyTree:
    """Keep only the per-replica metrics, or only the others; None for the rest."""

    def choose(node: PyTree) -> PyTree:
        if is_per_replica(node) is not keep:
            return None
        return node.value if keep else node

    return jax.tree.map(choose, metrics, is_leaf=is_per_replica)


def joined_metrics(outputs: Outputs) -> PyTree:
    """Put shared and per-replica metrics back into one tree."""
    if not jax.tree.leaves(outputs.own):
        return outputs.shared
    return jax.tree.map(
        lambda shared, own: own if shared is None else shared,
        outputs.shared,
        outputs.own,
        is_leaf=lambda node: node is None,
    )

"""Reduce the gradients of one update over replicas: the one place that does.

A leaf without a rule takes an all-reduce. One with a rule is made this replica's term
of the sum: its own gradient, times its share of the weight. Terms that travel in a
narrow form are shares of the update: there what is owed from before is added, and what
rounding takes away is owed after.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from replicator.base.per_replica import PerReplica
from replicator.base.trees import describe
from replicator.base.types import PyTree
from replicator.collectives.all_reduce import (
    all_reduce,
    share_of,
    weighted_term,
)
from replicator.collectives.context.axes import Axis, at_leaf, resolve_axis
from replicator.collectives.precision import like_leaf
from replicator.collectives.synchronise.gradient_sum import (
    LossySum,
    exact_sum,
    lossy_sum,
    owed_at_first,
)
from replicator.collectives.synchronise.method import SumMethod, matrix_shape
from replicator.collectives.synchronise.power_sgd import first_factor
from replicator.engine.reduction.row_bounds import bound_of, mark_rows
from replicator.engine.step.gradient_sums import UpdateArguments, Valued, divided
from replicator.engine.step.optimizer_state import (
    GradientsOfSums,
    OptimizerState,
    Reduction,
    SynchroniserState,
)
from replicator.errors import ArgumentError
from replicator.strategies.strategy import Strategy
from replicator.strategies.variables import path_names


class Reduced(NamedTuple):
    """Gradients that are equal on all replicas, and the state of the rules after."""

    grads: PyTree
    synchroniser: SynchroniserState | None


class _Terms(NamedTuple):
    """Terms of this replica in a sum or a mean over all."""

    own: PyTree
    op: str
    weight: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reducer:
    """Reduction of the gradients of one optimizer.

    Attributes:
      name: First component of the paths of its parameters.
      reduction: Way in which gradients add up.
      axis_name: Mesh axis of the replicas.
      strategy_fn: Function that returns the strategy whose rules hold, or None, once
        it is known.
    """

    name: str
    reduction: Reduction
    axis_name: str
    strategy_fn: Callable[[], Strategy | None]

    def init(self, params: PyTree) -> SynchroniserState | None:
        """Return the state of the rules before the first update; None without rules.

        Raises:
          ArgumentError: A parameter has no such narrow form.
        """
        strategy = self.strategy_fn()
        if strategy is None or not strategy.rules:
            return None
        leaves = self._named(params)
        owed, factors = {}, {}
        for path, leaf in leaves:
            method = strategy.method_of(path)
            _check_form(method, path, leaf)
            if method.narrows(jnp.shape(leaf), jnp.result_type(leaf)):
                owed[path] = owed_at_first(leaf)
                if method.rank:
                    factors[path] = first_factor(path, leaf, method.rank)
        return SynchroniserState(
            owed=PerReplica(owed, on_resize="sum") if owed else None,
            factors=factors,
            paths=tuple(path for path, _ in leaves),
            strategy=strategy,
        )

    def reduce(
        self,
        given: UpdateArguments,
        state: OptimizerState,
        *,
        like: PyTree,
        summed: bool,
    ) -> Reduced:
        """Return the mean over the examples of all replicas.

        Args:
          given: Gradients of one call, or their sums over calls.
          state: The optimizer's state.
          like: Gradients whose dtypes the mean has.
          summed: Whether these are sums over calls.

        Raises:
          ArgumentError: The state was made with other rules.
        """
        kept, weight = state.synchroniser, given.weight
        self._check_own(kept)
        if summed and self.reduction == "ordered":  # over replicas, too, already
            assert weight is not None, "sums have weights"
            return Reduced(divided(given.grads, weight, like=like), kept)
        terms = self._terms(given, like=like, summed=summed)
        if kept is None:
            return Reduced(self._all_reduce(terms, terms.own), None)
        scale = None if state.scale is None else state.scale.value
        return self._by_rules(terms, kept, scale)

    def _terms(self, given: UpdateArguments, *, like: PyTree, summed: bool) -> _Terms:
        weight = given.weight
        if weight is None or not (summed or given.share == "count"):
            return _Terms(given.grads, "mean", weight)
        if given.share == "equal":
            return _Terms(divided(given.grads, weight, like=like), "mean", None)
        # Divided by the weight of all replicas, then added up: sums could overflow.
        everywhere = all_reduce(weight, "sum", axis_name=self.axis_name)
        return _Terms(divided(given.grads, everywhere, like=like), "sum", None)

    def _all_reduce(self, terms: _Terms, leaves: PyTree) -> PyTree:
        return all_reduce(
            leaves, terms.op, weight=terms.weight, axis_name=self.axis_name
        )

    def _by_rules(
        self, terms: _Terms, kept: SynchroniserState, scale: jax.Array | None
    ) -> Reduced:
        """Reduce leaf by leaf; those without a rule together."""
        leaves, structure = jax.tree.flatten(terms.own)
        methods = [_method(kept.strategy, path) for path in self._paths(terms.own)]
        plain = [n for n, (path, _) in enumerate(methods) if path is None]
        found = dict(
            zip(plain, self._all_reduce(terms, [leaves[n] for n in plain]), strict=True)
        )
        axis = resolve_axis(self.axis_name)
        share = None if terms.weight is None else share_of(terms.weight, axis)
        divisor = axis.size if terms.op == "mean" and share is None else 1
        owed, factors = dict(kept.owed.value if kept.owed else {}), dict(kept.factors)
        for n, (path, method) in enumerate(methods):
            if path is None:
                continue
            self._check_known(path, kept)
            term = leaves[n] if share is None else weighted_term(leaves[n], share)
            if path in owed:
                mine = _Term(term, divisor, scale)
                sent = mine.send(owed[path], method, axis, factors.get(path))
                total, owed[path] = sent.total, sent.owed
                factors |= {path: sent.factor} if path in factors else {}
            else:
                total = exact_sum(term, method, axis, most_rows=bound_of(path))
                total = total if divisor == 1 else total / divisor
            found[n] = like_leaf(total, leaves[n])
        grads = structure.unflatten(found[n] for n in range(len(leaves)))
        owing = kept.owed and dataclasses.replace(kept.owed, value=owed)
        after = dataclasses.replace(kept, owed=owing, factors=factors)
        return Reduced(grads, after)

    def marked(self, grads: PyTree) -> PyTree:
        """Return gradients, marked by their paths if their rows are asked for."""
        if isinstance(grads, GradientsOfSums):
            parts = (
                mark_rows(each, [path for path, _ in self._named(each)], part=n)
                for n, each in enumerate(grads.parts)
            )
            return dataclasses.replace(grads, parts=tuple(parts))
        return mark_rows(grads, [path for path, _ in self._named(grads)])

    def _paths(self, own: PyTree) -> list[str | None]:
        """List the paths of gradients; the value of a loss has none."""
        if isinstance(own, Valued):
            return [*self._paths(own.grads), None]
        return [path for path, _ in self._named(own)]

    def _named(self, tree: PyTree) -> list[tuple[str, jax.Array]]:
        """List leaves with their paths, the optimizer's name in front."""
        found, _ = jax.tree_util.tree_flatten_with_path(tree)
        return [
            ("/".join([self.name, *path_names(path)]), leaf) for path, leaf in found
        ]

    def _check_own(self, kept: SynchroniserState | None) -> None:
        mine = self.strategy_fn()
        rules = kept.strategy.rules if kept else ()
        if rules != (mine.rules if mine else ()):
            raise ArgumentError(
                "`state` must be made by `init` of this optimizer, got one with other "
                f"rules of a strategy for `{self.name}`. Use the same wrapped "
                "optimizer in `init_fn` and in the step."
            )

    def _check_known(self, path: str, kept: SynchroniserState) -> None:
        if path not in kept.paths:
            raise ArgumentError(
                "`grads` must have the paths of the parameters that `init` was given, "
                f"got `{path}`, for which a rule of the strategy has no state. Pass "
                "gradients of the same tree."
            )


def _method(strategy: Strategy, path: str | None) -> tuple[str | None, SumMethod]:
    """Return the method of a gradient, with its path if a rule matters there."""
    method = SumMethod() if path is None else strategy.method_of(path)
    return (None if method == SumMethod() else path), method


class _Term(NamedTuple):
    """Term of this replica in a sum, to be divided; multiplied by a loss scale."""

    value: jax.Array
    divisor: int
    scale: jax.Array | None

    def send(
        self, owed: jax.Array, method: SumMethod, axis: Axis, factor: jax.Array | None
    ) -> LossySum:
        """Send a share of the update with what is owed, which has no loss scale."""
        share = self.value.astype(owed.dtype)
        share = share if self.divisor == 1 else share / self.divisor
        scale = None if self.scale is None else self.scale.astype(owed.dtype)
        share += owed if scale is None else owed * scale
        sent = lossy_sum(share, method, axis, dtype=self.value.dtype, factor=factor)
        return sent if scale is None else sent._replace(owed=sent.owed / scale)


def _check_form(method: SumMethod, path: str, leaf: jax.Array) -> None:
    """Refuse a form that a parameter has not.

    Raises:
      ArgumentError: It is no real number, or is smaller than the rank.
    """
    if method.compress is None:
        return
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        raise ArgumentError(
            "`compress` must be for real floating-point parameters, got "
            f"{describe(leaf)}{at_leaf(path)}. Give it a rule of its own before."
        )
    rank, sides = method.rank, matrix_shape(jnp.shape(leaf))
    if rank and jnp.ndim(leaf) > 1 and rank > min(sides):
        raise ArgumentError(
            f"`compress` must have a rank of at most {min(sides)} here, got {rank} for "
            f"{list(sides)}{at_leaf(path)}. Give it a rule of its own before."
        )

"""Trace the ops of a pipeline in the order of its schedule, into one dataflow."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.collectives.moments import wider_dtype
from replicator.controller.pipeline.parameters import filled, without
from replicator.controller.pipeline.simulation import ScheduledOp
from replicator.controller.pipeline.stage_layout import placements
from replicator.controller.pipeline.stage_ops import (
    Stage,
    StageInput,
    forward_op,
    stage_ops,
)
from replicator.errors import ArgumentError


@dataclasses.dataclass(kw_only=True)
class PipelineTrace:
    """What the dataflows of a pipeline are traced of.

    Attributes:
      stages: The stages.
      shared: For the path of a shared parameter, that of its array.
      spans: All forwards and backwards, in their order.
    """

    stages: Sequence[Stage]
    shared: Mapping[str, str]
    spans: Sequence[ScheduledOp]

    def gradients(
        self, params: Sequence[PyTree], x: PyTree, targets: PyTree, key: Any
    ) -> tuple[jax.Array, jax.Array, list[PyTree]]:
        """Return the mean loss, the count, and the sums of gradients of all stages."""
        params, placed = self._whole(params)
        begun = list(map(_begin, self.stages, params, placed))
        tokens = {stage: token for stage, (token, _, _) in enumerate(begun)}
        sums = [zeros for _, _, zeros in begun]
        last = self.stages[-1]
        parts, goals = _split(self.stages[0], x), _split(last, targets)
        ops: dict[int, Any] = {}
        results: dict[tuple[int, int], Any] = {(-1, m): v for m, v in enumerate(parts)}
        residuals: dict[tuple[int, int], Any] = {}
        cotangents: dict[tuple[int, int], Any] = {}
        losses: dict[int, Any] = {}
        for span in self.spans:
            at, (kind, k, m) = span.slice, span.op
            if kind == "forward":
                given = StageInput(
                    x=results.pop((k - 1, m)),
                    targets=goals[m] if k == last.number else None,
                    number=begun[k][1][m],
                    key=key,
                )
                if k not in ops:
                    ops[k] = stage_ops(self.stages[k], params[k], given, placed[k])
                run, _ = ops[k]
                tokens[at], y, count, saved = run(tokens[at], params[k], given)
                results[k, m], residuals[k, m] = y, saved
                losses[m] = y, count  # of the last stage, at the end
                continue
            _, run = ops[k]
            cotangent = cotangents.pop((k, m), None)
            saved = residuals.pop((k, m))
            tokens[at], sums[k], of_x = run(tokens[at], sums[k], saved, cotangent)
            if of_x:
                cotangents[k - 1, m] = of_x[0]
        loss, count = last.bind(_mean_loss)([losses[m] for m in sorted(losses)])
        return loss, count, self._summed(sums, placed)

    def forward(self, params: Sequence[PyTree], x: PyTree, key: Any) -> PyTree:
        """Return the results of the last stage for a batch."""
        params, placed = self._whole(params)
        begun = list(map(_begin, self.stages, params, placed))
        tokens = {stage: token for stage, (token, _, _) in enumerate(begun)}
        values = dict(enumerate(_split(self.stages[0], x)))
        ops: dict[int, Any] = {}
        for span in self.spans:
            at, (kind, k, m) = span.slice, span.op
            if kind == "forward":
                given = StageInput(values[m], None, begun[k][1][m], key)
                if k not in ops:
                    run = self.stages[k].results
                    ops[k] = forward_op(self.stages[k], run, given, placed[k])
                tokens[at], values[m] = ops[k](tokens[at], params[k], given)
        return self.stages[-1].bind(_join)([values[m] for m in sorted(values)])

    def _whole(
        self, params: Sequence[PyTree]
    ) -> tuple[Sequence[PyTree], Sequence[PyTree]]:
        """Return parameters with those that are shared, and how they lie."""
        params = filled(params, self.shared)
        return params, placements([each.layout for each in self.stages], params)[0]

    def _summed(self, sums: Sequence[PyTree], placed: Sequence[PyTree]) -> list[PyTree]:
        """Return the sums of gradients, those of shared parameters once."""
        found, places = dict(named_leaves(list(sums))), dict(named_leaves(placed))
        for copy, owner in self.shared.items():
            stage = self.stages[int(owner.partition("/")[0])]
            spec = stage.layout.spec(places[owner].gradient)
            found[owner] = stage.bind(_add, out_specs=spec)(found[owner], found[copy])
        bare = without(sums, self.shared)
        paths = [path for path, _ in named_leaves(bare)]
        return jax.tree.unflatten(
            jax.tree.structure(bare), [found[path] for path in paths]
        )


def _begin(
    stage: Stage, params: PyTree, placed: PyTree
) -> tuple[jax.Array, Sequence[jax.Array], PyTree]:
    """Return a token, the numbers of microbatches and sums of zero, on a slice."""

    def begin(params: PyTree) -> Any:
        like = jax.tree.map(sum_shape, params)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        numbers = jnp.arange(stage.microbatches, dtype=jnp.int32)
        return jnp.zeros((), jnp.int32), tuple(numbers), zeros

    specs = jax.tree.map(lambda each: stage.layout.spec(each.gradient), placed)
    return stage.bind(begin, out_specs=(None, None, specs))(params)


def _split(stage: Stage, tree: PyTree) -> list[PyTree]:
    """Return the parts of a batch, on the slice of a stage."""
    if not jax.tree.leaves(tree):
        return [tree] * stage.microbatches

    def split(tree: PyTree) -> list[PyTree]:
        def part(leaf: jax.Array, m: int) -> jax.Array:
            return leaf.reshape(stage.microbatches, -1, *leaf.shape[1:])[m]

        return [
            jax.tree.map(functools.partial(part, m=m), tree)
            for m in range(stage.microbatches)
        ]

    specs = stage.layout.examples(tree)
    out_specs = [specs] * stage.microbatches
    return stage.bind(split, in_specs=(specs,), out_specs=out_specs)(tree)


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, a future or a number."""
    if not hasattr(leaf, "shape"):
        leaf = jnp.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def sum_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the sum of gradients of a parameter."""
    return jax.ShapeDtypeStruct(leaf.shape, wider_dtype(leaf.dtype, jnp.float32))


def flat_update(
    tx: optax.GradientTransformation, structure: Any
) -> Callable[..., list[jax.Array]]:
    """Return the update of one device, from flat arrays to flat arrays.

    Args:
      tx: The optimizer.
      structure: Of sums of gradients, count, parameters and the optimizer's state.

    Raises:
      ArgumentError: When it is traced: the optimizer needs more than these.
    """

    def update(*flat: jax.Array) -> list[jax.Array]:
        sums, count, params, state = jax.tree.unflatten(structure, flat)
        gradients = jax.tree.map(
            lambda total, p: (total / count.astype(total.dtype)).astype(p.dtype),
            sums,
            params,
        )
        try:
            updates, state = tx.update(gradients, state, params)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ArgumentError(
                "`optimizer` must need gradients, its state and parameters alone, got "
                f"one that needs {str(error).partition(': ')[2]}, too. Use another."
            ) from error
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves((gradients, params, state))

    return update


def _mean_loss(losses: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    total = jnp.stack([value for value, _ in losses])
    total = total.astype(wider_dtype(total.dtype, jnp.float32)).sum()
    count = jnp.stack([count for _, count in losses]).sum()
    count = jnp.where(count == 0, 1, count)
    return total / count.astype(total.dtype), count


def _join(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _add(total: jax.Array, other: jax.Array) -> jax.Array:
    return total + other

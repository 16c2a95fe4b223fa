"""Trace the ops of a pipeline in the order of its schedule, into one dataflow."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.collectives.moments import wider_dtype
from replicator.controller.pipeline.parameters import filled, without
from replicator.controller.pipeline.simulation import ScheduledOp
from replicator.controller.pipeline.stage_ops import StageInput, named, stage_ops


@dataclasses.dataclass(kw_only=True)
class PipelineTrace:
    """What the dataflows of a pipeline are traced of.

    Attributes:
      stages: Functions of the stages.
      loss: `loss(y, targets)`.
      microbatches: Number of them.
      shared: For the path of a shared parameter, that of its array.
      spans: All forwards and backwards, in their order.
      bind: `bind(stage, f, in_specs, out_specs)` makes an op of the stage's slice.
      specs: For each stage, partition specs of its parameters.
      batch_spec: Of arrays with a leading axis of examples.
    """

    stages: Sequence[Callable[..., PyTree]]
    loss: Callable[..., Any]
    microbatches: int
    shared: Mapping[str, str]
    spans: Sequence[ScheduledOp]
    bind: Callable[..., Callable[..., PyTree]]
    specs: Sequence[PyTree]
    batch_spec: PartitionSpec | None

    def gradients(
        self, params: Sequence[PyTree], x: PyTree, targets: PyTree, key: Any
    ) -> tuple[jax.Array, jax.Array, list[PyTree]]:
        """Return the mean loss, the count, and the sums of gradients of all stages."""
        bare, params = params, filled(params, self.shared)
        last = len(self.stages) - 1
        begun = [self._begin(stage, tree) for stage, tree in enumerate(params)]
        tokens = {stage: token for stage, (token, _, _) in enumerate(begun)}
        sums = [zeros for _, _, zeros in begun]
        parts, goals = self._split(0, x), self._split(last, targets)
        ops: dict[int, Any] = {}
        results: dict[tuple[int, int], Any] = {(-1, m): v for m, v in enumerate(parts)}
        residuals: dict[tuple[int, int], Any] = {}
        cotangents: dict[tuple[int, int], Any] = {}
        for span in self.spans:
            at, stage, m = span.slice, span.op.stage, span.op.microbatch
            if span.op.kind == "forward":
                given = StageInput(
                    x=results.pop((stage - 1, m)),
                    targets=goals[m] if stage == last else None,
                    number=begun[stage][1][m],
                    key=key,
                )
                if stage not in ops:
                    ops[stage] = self._ops(stage, params[stage], given)
                tokens[at], result, count, residuals[stage, m] = ops[stage][0](
                    tokens[at], params[stage], given
                )
                results[stage, m] = (result, count) if stage == last else result
                continue
            tokens[at], sums[stage], of_x = ops[stage][1](
                tokens[at],
                sums[stage],
                residuals.pop((stage, m)),
                cotangents.pop((stage, m), None),
            )
            if of_x:
                cotangents[stage - 1, m] = of_x[0]
        losses = [results[last, m] for m in range(self.microbatches)]
        loss, count = self.bind(last, _mean_loss)(losses)
        return loss, count, self._summed(sums, bare)

    def forward(self, params: Sequence[PyTree], x: PyTree, key: Any) -> PyTree:
        """Return the results of the last stage for a batch."""
        params = filled(params, self.shared)
        begun = [self._begin(stage, tree) for stage, tree in enumerate(params)]
        tokens = {stage: token for stage, (token, _, _) in enumerate(begun)}
        values = dict(enumerate(self._split(0, x)))
        run = functools.partial(_after, self.microbatches)
        ops = [
            self.bind(stage, named(f"forward{stage}", functools.partial(run, fn)))
            for stage, fn in enumerate(self.stages)
        ]
        for span in self.spans:
            stage, m = span.op.stage, span.op.microbatch
            if span.op.kind == "forward":
                at = span.slice
                given = StageInput(values[m], None, begun[stage][1][m], key)
                tokens[at], values[m] = ops[stage](tokens[at], params[stage], given)
        join = self.bind(len(self.stages) - 1, _join)
        return join([values[m] for m in range(self.microbatches)])

    def _begin(
        self, stage: int, params: PyTree
    ) -> tuple[jax.Array, Sequence[jax.Array], PyTree]:
        """Return a token, the numbers of microbatches and sums of zero, on a slice."""

        def begin(params: PyTree) -> Any:
            like = jax.tree.map(sum_shape, params)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
            numbers = jnp.arange(self.microbatches, dtype=jnp.int32)
            return jnp.zeros((), jnp.int32), tuple(numbers), zeros

        specs = self.specs[stage]
        out = None if specs is None else (None, None, specs)
        return self.bind(stage, begin, None, out)(params)

    def _split(self, stage: int, tree: PyTree) -> list[PyTree]:
        """Return the parts of a batch, on the slice of a stage."""
        if not jax.tree.leaves(tree):
            return [tree] * self.microbatches

        def split(tree: PyTree) -> list[PyTree]:
            def part(leaf: jax.Array, m: int) -> jax.Array:
                return leaf.reshape(self.microbatches, -1, *leaf.shape[1:])[m]

            return [
                jax.tree.map(functools.partial(part, m=m), tree)
                for m in range(self.microbatches)
            ]

        return self.bind(stage, split, self.batch_spec, self.batch_spec)(tree)

    def _ops(self, stage: int, params: PyTree, given: StageInput) -> Any:
        bind = functools.partial(self.bind, stage)
        specs = self.specs[stage]
        out = None if specs is None else (None, specs, None)
        return stage_ops(
            self.stages[stage],
            self.loss if stage == len(self.stages) - 1 else None,
            number=stage,
            count=self.microbatches,
            bind=(bind, functools.partial(bind, out_specs=out)),
            like=jax.tree.map(shape_of, (params, given)),
        )

    def _summed(self, sums: Sequence[PyTree], bare: Sequence[PyTree]) -> list[PyTree]:
        """Return the sums of gradients, those of shared parameters once."""
        found = dict(named_leaves(list(sums)))
        for copy, owner in self.shared.items():
            add = self.bind(int(owner.partition("/")[0]), _add)
            found[owner] = add(found[owner], found[copy])
        paths = [path for path, _ in named_leaves(without(sums, self.shared))]
        structure = jax.tree.structure(list(bare))
        return jax.tree.unflatten(structure, [found[path] for path in paths])


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
    """

    def update(*flat: jax.Array) -> list[jax.Array]:
        sums, count, params, state = jax.tree.unflatten(structure, flat)
        gradients = jax.tree.map(
            lambda total, p: (total / count.astype(total.dtype)).astype(p.dtype),
            sums,
            params,
        )
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.leaves((gradients, params, state))

    return update


def _mean_loss(losses: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    total = jnp.stack([value for value, _ in losses])
    total = total.astype(wider_dtype(total.dtype, jnp.float32)).sum()
    count = jnp.stack([count for _, count in losses]).sum()
    count = jnp.where(count == 0, 1, count)
    return total / count.astype(total.dtype), count


def _after(
    count: int,
    fn: Callable[..., PyTree],
    token: jax.Array,
    params: PyTree,
    given: StageInput,
) -> tuple[jax.Array, PyTree]:
    with given.in_batch_of(count):
        return token + 1, fn(params, given.x, *given.keys)


def _join(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _add(total: jax.Array, other: jax.Array) -> jax.Array:
    return total + other

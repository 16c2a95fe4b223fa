"""Pipelines over slices: one dataflow runs all stages, for all microbatches."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from replicator.base.types import PyTree
from replicator.controller.dataflow import Dataflow
from replicator.controller.future import Future
from replicator.controller.pipeline import tracing
from replicator.controller.pipeline.joint_update import JointUpdate
from replicator.controller.pipeline.parameters import (
    check_params,
    filled,
    homes_of,
    without,
)
from replicator.controller.pipeline.schedules import SCHEDULES, Schedule
from replicator.controller.pipeline.simulation import simulate
from replicator.controller.pipeline.stage_layout import (
    layouts_of,
    placements,
)
from replicator.controller.pipeline.stage_ops import Stage
from replicator.controller.slices import Slice
from replicator.errors import ArgumentError, check_count, check_word
from replicator.monitoring.drawing.spans import Span, spans_svg
from replicator.strategies.strategy import Placement, Strategy


class PipelineState(NamedTuple):
    """Parameters of each stage, and the optimizer's state, on their slices."""

    params: list[PyTree]
    optimizer: PyTree


class PipelineUpdate(NamedTuple):
    """Results of an update: the mean loss, its gradients, and the state after it."""

    loss: Future
    gradients: list[PyTree]
    state: PipelineState


class Binder(Protocol):
    """What a pipeline needs of the controller."""

    fn: Callable[..., Any]
    put: Callable[..., Any]
    program: Callable[..., Any]


class Pipeline:
    """Stages on slices; a call makes one update. From `pw.pipeline`.

    Args:
      pw: The controller.
      stages: `stage(params, x)` of each, or `stage(params, x, key)` with a key in the
        call; the first one takes its part of the batch, the others what the stage
        before them returns: arrays of floating point numbers.
      loss: `loss(y, targets)`: the mean over a microbatch, or a `LocalSum`, whose count
        is what the microbatch weighs.
      slices: Stage k runs on slice k modulo their number.
      microbatches: Number of parts of a batch.
      schedule: "one_f_one_b", "gpipe", "interleaved", or a `Schedule`.
      optimizer: Its update is that of one device with the parameters of all stages;
        without one, calls return gradients and leave the parameters.
      shared: For the path of a parameter that is None, that of the array that stands
        there: `{"3/table": "0/table"}`. Its gradients are summed, and updated once.
      strategy: For stages on slices of several devices: a strategy for all, or one or
        None for each, which cuts examples, and variables by rules for their paths:
        `params/3/table`. Their slices have its axes: `pw.slice(n,
        axes=strategy.sizes(n))`. Without one, each device has all.

    Raises:
      ArgumentError: An argument breaks its rule, or the schedule does not end.

    Attributes:
      simulation: Its schedule, simulated: spans of time, live microbatches, bubble.
    """

    def __init__(
        self,
        pw: Binder,
        stages: Sequence[Callable[..., PyTree]],
        loss: Callable[..., Any],
        slices: Sequence[Slice],
        microbatches: int,
        schedule: str | Schedule = "one_f_one_b",
        *,
        optimizer: optax.GradientTransformation | None = None,
        shared: Mapping[str, str] | None = None,
        strategy: Strategy | Sequence[Strategy | None] | None = None,
    ) -> None:
        check_count("microbatches", microbatches)
        if not slices or not stages or len(stages) % len(slices):
            raise ArgumentError(
                "`stages` must be as many as `slices`, or a multiple of them, got "
                f"{len(stages)} on {len(slices)} slices. Change either."
            )
        if isinstance(schedule, str):
            check_word("schedule", schedule, tuple(SCHEDULES))
            schedule = SCHEDULES[schedule]
        orders = schedule(len(stages), len(slices), microbatches)
        if len(orders) != len(slices):
            raise ArgumentError(
                f"`schedule` must return a list of ops for each of {len(slices)} "
                f"slices, got {len(orders)} lists. Return an empty one for a slice "
                "that runs none."
            )
        self.simulation = simulate(
            orders, stages=len(stages), microbatches=microbatches
        )
        self._pw, self._slices = pw, slices
        self._on = [slices[k % len(slices)] for k in range(len(stages))]
        self._layouts = layouts_of(strategy, self._on)
        self._microbatches = microbatches
        self._tx = optax.set_to_zero() if optimizer is None else optimizer
        self._shared = shared or {}
        self._traced = tracing.PipelineTrace(
            stages=[
                Stage(
                    number=number,
                    fn=fn,
                    loss=loss if number == len(stages) - 1 else None,
                    microbatches=microbatches,
                    layout=self._layouts[number],
                    bind=partial(pw.fn, slice=self._on[number]),
                )
                for number, fn in enumerate(stages)
            ],
            shared=self._shared,
            spans=self.simulation.spans,
        )
        self._update = pw.program(self._trace_update, fuse=False)
        self._forward = pw.program(self._traced.forward, fuse=False)

    def init(self, params: Sequence[PyTree], optimizer: PyTree = None) -> PipelineState:
        """Place parameters and the optimizer's state on the slices.

        Args:
          params: Parameters of each stage; None for one that is shared and elsewhere.
          optimizer: State of the optimizer to go on from; a new one by default.

        Raises:
          ArgumentError: The parameters do not fit the stages, or the optimizer combines
            arrays of several stages.
        """
        params = list(params)
        check_params(params, len(self._on), self._shared)
        if optimizer is None:
            optimizer = self._tx.init(params)
        state = PipelineState(params, optimizer)
        self._joint_of(state)
        leaves, structure = jax.tree.flatten(state)
        at = homes_of(state, params), self._places(state)
        placed = [
            self._pw.put(leaf, self._on[home or 0], PartitionSpec(*place.stored))
            for leaf, home, place in zip(leaves, *at, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def __call__(
        self, state: PipelineState, x: PyTree, targets: PyTree = None, key: Any = None
    ) -> PipelineUpdate:
        """Make one update; return futures at once.

        Args:
          state: From `init`, or of the update before.
          x: The batch, for the first stage: arrays with a leading axis of examples.
          targets: Likewise, for the loss.
          key: Random key, for stages that take one.

        Raises:
          ArgumentError: Examples do not divide over the microbatches, or arrays have
            unlike numbers of them.
        """
        self._check_batch(x=x, targets=targets)
        return self._update(state, x, targets, key)

    def forward(self, state: PipelineState, x: PyTree, key: Any = None) -> PyTree:
        """Return the results of the last stage for a batch, as futures.

        Args:
          state: From `init`, or of an update.
          x: The batch, for the first stage.
          key: Random key, for stages that take one.

        Raises:
          ArgumentError: Examples do not divide over the microbatches.
        """
        self._check_batch(x=x)
        return self._forward(state.params, x, key)

    def dataflow(
        self, state: PipelineState, x: PyTree, targets: PyTree = None, key: Any = None
    ) -> Dataflow:
        """Return the dataflow of an update, and run nothing.

        Its `moved_bytes` are the bytes that go from slice to slice.
        """
        self._check_batch(x=x, targets=targets)
        return self._update.dataflow(state, x, targets, key)

    def to_svg(self) -> str:
        """Return a picture of the schedule: a row for each slice, a box for each op."""
        spans = [
            Span(
                row=f"{each.slice}: {self._slices[each.slice]}",
                begin_s=each.start,
                end_s=each.end,
                name=f"{each.op.microbatch}",
                kind=each.op.kind,
            )
            for each in self.simulation.spans
        ]
        return spans_svg(spans, unit="forwards")

    def _check_batch(self, **trees: PyTree) -> None:
        pieces = math.lcm(*(layout.pieces for layout in self._layouts))
        count, sizes = self._microbatches * pieces, set()
        for name, tree in trees.items():
            for leaf in jax.tree.leaves(tree):
                size = (*tracing.shape_of(leaf).shape, 0)[0]
                if not size or size % count:
                    cut = f", each in {pieces} pieces" if pieces > 1 else ""
                    raise ArgumentError(
                        f"`{name}` must divide evenly over {self._microbatches} "
                        f"microbatches{cut}, got {size} examples. Use "
                        f"{count * max(1, size // count)}."
                    )
                sizes.add(size)
        if len(sizes) > 1:
            names = " and ".join(f"`{name}`" for name in trees)
            raise ArgumentError(
                f"{names} must have as many examples in each array, got "
                f"{sorted(sizes)}. Pass a row for each example."
            )

    def _trace_update(
        self, state: PipelineState, x: PyTree, targets: PyTree, key: Any
    ) -> PipelineUpdate:
        loss, count, sums = self._traced.gradients(state.params, x, targets, key)
        joint = self._joint_of(state)
        arguments = sums, count, *state
        results = joint(
            jax.tree.leaves(arguments), [stage.bind for stage in self._traced.stages]
        )
        structure = jax.tree.structure((sums, *state))
        gradients, params, optimizer = jax.tree.unflatten(structure, results)
        return PipelineUpdate(loss, gradients, PipelineState(params, optimizer))

    def _places(self, state: PipelineState) -> list[Placement]:
        """Return how each variable of a state lies."""
        whole = filled(state.params, self._shared)
        params, optimizer = placements(self._layouts, whole, state.optimizer)
        return jax.tree.leaves((without(params, self._shared), optimizer))

    def _joint_of(self, state: PipelineState) -> JointUpdate:
        """Return the update of all stages for a state, cut into ops of each."""
        like = jax.tree.map(tracing.shape_of, state)
        sums = jax.tree.map(tracing.sum_shape, like.params)
        arguments = sums, jax.ShapeDtypeStruct((), jnp.float32), *like
        homes, places = homes_of(state, state.params), self._places(state)
        count = len(jax.tree.leaves(state.params))
        outputs = [home or 0 for home in (*homes[:count], *homes)]
        cuts = [*(p.gradient for p in places[:count]), *(p.stored for p in places)]
        return JointUpdate(
            tracing.flat_update(self._tx, jax.tree.structure(arguments)),
            jax.tree.leaves(arguments),
            homes=[*homes[:count], len(self._on) - 1, *homes],
            outputs=outputs,
            specs=[
                self._layouts[at].spec(cut)
                for at, cut in zip(outputs, cuts, strict=True)
            ],
            stages=len(self._on),
        )

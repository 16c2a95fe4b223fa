"""The same training step twice: for replicator, and as an expert writes it by hand.

The model and its loss are shared, cross-replica norms included; what differs is who
lifts the step onto the replicas and reduces the gradients.
"""

import collections
from collections.abc import Iterator, Sequence

import jax
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicator
from benchmarks.tasks import Task
from replicator.base.types import Key, PyTree, StepFn
from replicator.inputs.placement import Placed

IN_FLIGHT = 4
"""Steps that a loop keeps dispatched, by hand as in replicator."""


def replicator_init(task: Task, optimizer: optax.GradientTransformation):
    """Return the `init_fn` for `rep.init` and `rep.run`."""

    def init_fn(key: Key) -> PyTree:
        model = task.init_model(key)
        return {"model": model, "opt": optimizer.init(task.params_of(model))}

    return init_fn


def replicator_step(
    task: Task, optimizer: optax.GradientTransformationExtraArgs
) -> StepFn:
    """Return the step for replicator; `optimizer` is from `rep.wrap_optimizer`."""

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (loss, model), grads = task.value_and_grad(state["model"], batch)
        params = task.params_of(model)
        updates, opt = optimizer.update(grads, state["opt"], params)
        model = task.with_params(model, optax.apply_updates(params, updates))
        return {"model": model, "opt": opt}, {"loss": loss}

    return step_fn


def hand_written_step(
    task: Task, tx: optax.GradientTransformation, mesh: Mesh, *, norm: bool = False
):
    """Return the step as an expert writes it, jitted over the mesh.

    It reports the loss; with `norm` also the gradient's norm, as a run does.
    """

    def step_fn(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (loss, model), grads = task.value_and_grad(state["model"], batch)
        grads, loss = lax.pmean((grads, loss), "replica")
        params = task.params_of(model)
        updates, opt = tx.update(grads, state["opt"], params)
        model = task.with_params(model, optax.apply_updates(params, updates))
        metrics = {"loss": loss}
        if norm:
            metrics["gradient_norm"] = optax.global_norm(grads)
        return {"model": model, "opt": opt}, metrics

    return on_every_replica(step_fn, mesh)


def on_every_replica(step_fn: StepFn, mesh: Mesh):
    """Jit `step_fn` over the mesh: state whole and donated, the batch cut."""
    whole, cut = PartitionSpec(), PartitionSpec("replica")
    return jax.jit(
        jax.shard_map(
            step_fn,
            mesh=mesh,
            in_specs=(whole, cut),
            out_specs=(whole, whole),
            check_vma=False,
        ),
        donate_argnums=0,
    )


def hand_written_state(
    task: Task, tx: optax.GradientTransformation, mesh: Mesh
) -> PyTree:
    """Return the first state, whole on every device."""

    def init(key: Key) -> PyTree:
        model = task.init_model(key)
        return {"model": model, "opt": tx.init(task.params_of(model))}

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(init, out_shardings=whole)(jax.random.key(0))


def placed_batch(
    rep: replicator.Replicator,
    batches: Sequence[PyTree],
    options: replicator.InputOptions,
) -> Placed:
    """Return what a compiled step takes in one call, on the devices."""
    with rep.batches(batches, options) as placed:
        return next(placed)


class OwnLoop:
    """The loop around a step: place a batch, dispatch, keep four steps in flight.

    Args:
      step: `step(state, batch) -> (state, metrics)`; takes over the state.
      state: The first state.
      batches: Global batches, without an end.
      sharding: Where a batch is put; None leaves that to `step`.

    Attributes:
      state: The state after the last call.
    """

    def __init__(
        self,
        step,
        state: PyTree,
        batches: Iterator[PyTree],
        *,
        sharding: NamedSharding | None = None,
    ) -> None:
        self._step = step
        self.state = state
        self._batches = batches
        self._sharding = sharding
        self._in_flight: collections.deque[PyTree] = collections.deque()

    def run(self, calls: int) -> None:
        """Make so many calls of the step, and wait until they are done."""
        for _ in range(calls):
            batch = next(self._batches)
            if self._sharding is not None:
                batch = jax.device_put(batch, self._sharding)
            self.state, metrics = self._step(self.state, batch)
            self._in_flight.append(metrics)
            if len(self._in_flight) >= IN_FLIGHT:
                jax.block_until_ready(self._in_flight.popleft())
        self._in_flight.clear()
        jax.block_until_ready(self.state)

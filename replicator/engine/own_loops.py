"""What an own loop needs of the replicas: state, steps, batches, evaluation.

It joins modules and decides nothing: `state` makes states, `make_step` lifts, `inputs`
feeds, `evaluate` counts. `replicator.Replicator` is this and a loop of ours.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, overload

import optax
from jax.sharding import Mesh

from replicator.base.host.compilation_cache import enable_compilation_cache
from replicator.base.host.fake_devices import size_cpu_pool
from replicator.base.mesh import replica_mesh
from replicator.base.types import Dataset, Device, InitFn, PyTree, StepFn
from replicator.distributed.report_progress import require_joined
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.debug_step import DebugStep
from replicator.engine.eager_calls import require_eager
from replicator.engine.evaluation.blocks import DEFAULT_BLOCK
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.engine.evaluation.predict import PredictFn, Prediction
from replicator.engine.layout import Layout
from replicator.engine.make_step import compiled_step, debug_step
from replicator.engine.replicated import ReplicatedLayout
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step import optimizer as optimizers
from replicator.engine.step.loss_scale import DynamicLossScale
from replicator.engine.step.optimizer_state import Reduction
from replicator.engine.step.state import init_state, placed_copy, run_keys
from replicator.errors import check_flags, check_function
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position
from replicator.inputs.prefetch import Prefetcher


class OwnLoops:
    """Lift functions of one replica onto many; see `Replicator` for arguments."""

    def __init__(
        self,
        num_replicas: int | None = None,
        *,
        devices: Sequence[Device] | None = None,
        reduction: Reduction = "fast",
        max_in_flight: int = DEFAULT_RUN_AHEAD,
        compilation_cache: bool = True,
    ) -> None:
        optimizers.check_reduction(reduction)
        check_flags(compilation_cache=compilation_cache)
        require_joined()
        size_cpu_pool()
        if compilation_cache:
            enable_compilation_cache()
        mesh = replica_mesh(num_replicas, devices=devices)
        self._layout: Layout = ReplicatedLayout(mesh)
        self._reduction: Reduction = reduction
        self._defaults = CompileOptions(
            max_in_flight=max_in_flight, reduction=reduction
        )
        # By function, so that evaluating every n steps compiles once.
        self._evaluation = functools.lru_cache(maxsize=16)(self.compile_evaluation)
        self._prediction = functools.lru_cache(maxsize=16)(self._compile_prediction)

    @property
    def mesh(self) -> Mesh:
        """The mesh; its only axis is `replica`."""
        return self._layout.mesh

    @property
    def layout(self) -> Layout:
        """How state and batches lie on the mesh."""
        return self._layout

    @property
    def num_replicas(self) -> int:
        """How many replicas a step runs on."""
        return self._layout.num_replicas

    def wrap_optimizer(
        self,
        tx: optax.GradientTransformation,
        *,
        name: str = "params",
        skip_nonfinite: bool = False,
        loss_scale: DynamicLossScale | None = None,
        accumulate: int = 1,
    ) -> optax.GradientTransformationExtraArgs:
        """Reduce gradients over replicas, then let `tx` update.

        See `replicator.wrap_optimizer` for arguments, result and errors; this one adds
        the replicator's `reduction`.
        """
        return optimizers.wrap_optimizer(
            tx,
            name=name,
            skip_nonfinite=skip_nonfinite,
            loss_scale=loss_scale,
            accumulate=accumulate,
            reduction=self._reduction,
        )

    def init(self, init_fn: InitFn, *, seed: int = 0) -> PyTree:
        """Make the state for an own loop, born on every device.

        Args:
          init_fn: `init_fn(key)` returns any pytree of arrays.
          seed: Of the key it gets; the same as in `run(seed=...)`.

        Returns:
          The state; `PerReplica` leaves have a leading replica axis.

        Raises:
          ArgumentError: `init_fn` is no function of a key, `seed` is no whole number,
            or JAX traces the call.
        """
        check_function("init_fn", init_fn, "key")
        require_eager("rep.init")
        key, _ = run_keys(seed)
        return init_state(init_fn, self._layout, key=key)

    def put(self, state: PyTree) -> PyTree:
        """Put a copy of a state on every device, for an own loop: to tune a model.

        Args:
          state: Any pytree of arrays, of JAX or of NumPy, from wherever; left as it
            is. `PerReplica` leaves have a leading replica axis, as in `result.state`.

        Returns:
          The state as `init` would have made it. It shares no memory with what was
          given: a step may take it over.

        Raises:
          ArgumentError: A leaf is no array, a `PerReplica` leaf has no row for each
            replica, or JAX traces the call.

        >>> state = rep.put({"params": params, "opt": optimizer.init(params)})
        """
        require_eager("rep.put")
        return placed_copy(state, self._layout)

    @overload
    def compile(
        self,
        step_fn: StepFn,
        *,
        accumulate: int = 1,
        steps_per_call: int = 1,
        checks: frozenset | None = None,
        debug: Literal[False] = False,
    ) -> CompiledStep: ...
    @overload
    def compile(
        self, step_fn: StepFn, *, accumulate: int = 1, debug: Literal[True]
    ) -> DebugStep: ...
    def compile(
        self,
        step_fn: StepFn,
        *,
        accumulate: int = 1,
        steps_per_call: int = 1,
        checks: frozenset | None = None,
        debug: bool = False,
    ) -> CompiledStep | DebugStep:
        """Lift `step_fn` onto all replicas: `state, metrics = step(state, batch)`.

        One call takes one global batch and makes exactly one update.

        Args:
          step_fn: What one replica does: `step_fn(state, batch[, key])` returns the new
            state and metrics.
          accumulate: Equal microbatches that the batch is cut into.
          steps_per_call: Updates per call; batches, keys and metrics then have a
            leading axis of that length.
          checks: `checkify` errors to look for, e.g. `checkify.user_checks`. Each call
            then waits for its result.
          debug: Run as one replica on the whole batch, without `jit` or `shard_map`.

        Returns:
          The step, compiled at its first call.

        Raises:
          ArgumentError: An argument is of another kind, a number is below 1, or
            `debug` is asked for with `steps_per_call` or `checks`.
        """
        check_function("step_fn", step_fn, "state, batch", "state, batch, key")
        check_flags(debug=debug)
        options = self._options(accumulate, steps_per_call, checks)
        if debug:
            return debug_step(step_fn, options, counted=False)
        return compiled_step(step_fn, self._layout, options, counted=False)

    def batches(
        self,
        dataset: Dataset,
        options: InputOptions | None = None,
        *,
        start: Position | None = None,
    ) -> Prefetcher:
        """Read a dataset ahead, onto the mesh, for an own loop.

        Args:
          dataset: An iterable of global batches, or `input_fn(context)`.
          options: How it is read, checked and placed.
          start: Where to begin: the `position` of the last batch that was used.

        Returns:
          An iterator of `Placed` batches that a compiled step takes; close it when
          done.
        """
        return open_input(dataset, self._layout, options=options, start=start)

    def compile_evaluation(
        self, eval_fn: EvalFn, *, block: int = DEFAULT_BLOCK
    ) -> Evaluation:
        """Lift `eval_fn` onto all replicas: `metrics = evaluation(state, dataset)`.

        Args:
          eval_fn: As in `evaluate`.
          block: Examples that it gets at a time, on any number of replicas.

        Returns:
          The evaluation, compiled at its first call.

        Raises:
          ArgumentError: `eval_fn` is no function of a state and a batch, or `block`
            is below 1.
        """
        return Evaluation(
            eval_fn,
            self._layout,
            block=block,
            max_in_flight=self._defaults.max_in_flight,
        )

    def evaluate(
        self,
        eval_fn: EvalFn,
        dataset: Dataset,
        *,
        state: PyTree,
        inputs: InputOptions | None = None,
        block: int = DEFAULT_BLOCK,
    ) -> dict[str, PyTree]:
        """Evaluate a state on every example of a dataset, each counted once.

        The result has the same bits on any number of replicas, and for any batches that
        the dataset comes in. Each function is compiled once.

        Args:
          eval_fn: `eval_fn(state, batch)` gets `block` examples and returns a dict of
            metrics: arrays with one row per example, which are averaged, or declared
            ones, weighted by `batch["mask"]`.
          dataset: An iterable of batches of any sizes, or `input_fn(context)`, that
            ends. It is read once.
          state: As from `init`, a compiled step or `run`; neither changed nor donated.
          inputs: How the dataset is read; see `Evaluation`.
          block: Examples that `eval_fn` gets at a time; bits depend on it.

        Returns:
          The metrics over all examples: Python numbers, and NumPy arrays where a metric
          is no scalar. `examples` says how many there were.

        Raises:
          ArgumentError: `eval_fn` returns what could not be counted exactly.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        # Here, too: what is no function may be nothing that a cache takes.
        check_function("eval_fn", eval_fn)
        evaluation = self._evaluation(eval_fn, block=block)
        return evaluation(state, dataset, inputs=inputs)

    def predict(
        self,
        predict_fn: PredictFn,
        dataset: Dataset,
        state: PyTree,
        *,
        inputs: InputOptions | None = None,
        block: int = DEFAULT_BLOCK,
    ) -> PyTree:
        """Return outputs for every example of a dataset, in its order.

        They have the same bits on any number of replicas, and for any batches that the
        dataset comes in; every process gets all of them. Each function is compiled
        once.

        Args:
          predict_fn: `predict_fn(state, batch)` gets `block` examples, as the dataset
            has them, and returns a pytree of arrays with one row per example. Some
            examples of the last blocks only fill up: their rows are left out.
          dataset: As in `evaluate`. Of an `input_fn` that reads in every process, the
            order is that in which replicas got the examples.
          state: As in `evaluate`.
          inputs: How the dataset is read; see `Evaluation`.
          block: Examples that `predict_fn` gets at a time; bits depend on it.

        Returns:
          What `predict_fn` returns, with NumPy leaves [examples, ...].

        Raises:
          ArgumentError: `predict_fn` returns something without a row per example, or
            speaks to other replicas.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        # Here, too: what is no function may be nothing that a cache takes.
        check_function("predict_fn", predict_fn)
        return self._prediction(predict_fn, block=block)(state, dataset, inputs=inputs)

    def _compile_prediction(self, predict_fn: PredictFn, *, block: int) -> Prediction:
        return Prediction(
            predict_fn,
            self._layout,
            block=block,
            max_in_flight=self._defaults.max_in_flight,
        )

    def _options(
        self, accumulate: int, steps_per_call: int, checks: frozenset | None
    ) -> CompileOptions:
        return dataclasses.replace(
            self._defaults,
            accumulate=accumulate,
            steps_per_call=steps_per_call,
            checks=checks,
        )

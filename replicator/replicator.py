"""One object for users: where replicas run, and how a step is lifted onto them.

It joins rooms and decides nothing: `state` gives birth, `steps` lifts, `compiled_step`
proves and compiles, `inputs` feeds, `loop` runs.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

from replicator import optimizer as optimizers
from replicator.checkpoint.retention import Retention
from replicator.compilation_cache import enable_compilation_cache
from replicator.compiled_step import CompiledStep, CompileOptions
from replicator.debug_step import DebugStep
from replicator.errors import ArgumentError
from replicator.evaluate import DEFAULT_BLOCK, EvalFn, Evaluation
from replicator.fake_devices import size_cpu_pool
from replicator.hooks import Every, Hook, every
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.prefetch import Prefetcher
from replicator.loop import LoopPlan, LoopResult
from replicator.loss_scale import DynamicLossScale
from replicator.mesh import replica_mesh
from replicator.optimizer_state import Reduction, optimizer_states
from replicator.protocols import Dataset, Device, InitFn, PyTree, StepFn
from replicator.run_ahead import DEFAULT_RUN_AHEAD
from replicator.state import RunState, init_run, init_state
from replicator.steps import count_steps, lift, repeat_steps
from replicator.training import Checkpoints, Records, train


class Replicator:
    """Run what one replica does on many devices.

    Args: num_replicas: How many devices to use; all by default. devices: Devices to
      choose from; JAX's own by default. reduction: `"ordered"` makes gradients add up
      in example order, so that bits do not
        depend on how many replicas there are; `"fast"` leaves the order to XLA.
      max_in_flight: Calls dispatched and not yet finished, at most; never above 16 on
        CPU.
      compilation_cache: Keep compiled programs in a private directory of this user.

    Raises:
      ArgumentError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        num_replicas: int | None = None,
        devices: Sequence[Device] | None = None,
        reduction: Reduction = "fast",
        max_in_flight: int = DEFAULT_RUN_AHEAD,
        compilation_cache: bool = True,
    ) -> None:
        optimizers.check_reduction(reduction)
        size_cpu_pool()
        if compilation_cache:
            enable_compilation_cache()
        self._mesh = replica_mesh(num_replicas, devices=devices)
        self._reduction: Reduction = reduction
        self._defaults = CompileOptions(
            max_in_flight=max_in_flight, reduction=reduction
        )
        # By function, so that evaluating every n steps compiles once.
        self._evaluation = functools.lru_cache(maxsize=16)(self.compile_evaluation)

    @property
    def mesh(self) -> Mesh:
        """The mesh; its only axis is `replica`."""
        return self._mesh

    @property
    def num_replicas(self) -> int:
        """How many replicas a step runs on."""
        return self._mesh.size

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
        """
        key, _ = jax.random.split(jax.random.key(seed))
        return init_state(init_fn, self._mesh, key=key)

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
          ArgumentError: A number is below 1, or `debug` is asked for with
            `steps_per_call` or `checks`.
        """
        options = self._options(accumulate, steps_per_call, checks)
        return self._lift(step_fn, options, debug=debug, counted=False)

    def batches(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> Prefetcher:
        """Read a dataset ahead, onto the mesh, for an own loop.

        Args:
          dataset: An iterable of global batches, or `input_fn(context)`.
          options: How it is read, checked and placed.

        Returns:
          An iterator of `Placed` batches that a compiled step takes; close it when
          done.
        """
        return open_input(dataset, self._mesh, options=options)

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
          ArgumentError: `block` is below 1.
        """
        return Evaluation(
            eval_fn,
            self._mesh,
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
        evaluation = self._evaluation(eval_fn, block=block)
        return evaluation(state, dataset, inputs=inputs)

    def run(
        self,
        step_fn: StepFn,
        dataset: Dataset,
        *,
        init_fn: InitFn,
        steps: int | None,
        seed: int = 0,
        accumulate: int = 1,
        steps_per_call: int = 1,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Every = 100,
        retention: Retention | None = None,
        hooks: Sequence[Hook] = (),
        inputs: InputOptions | None = None,
        write_every: int = 10,
        display: bool = True,
        on_nonfinite: Literal["raise", "ignore"] | None = None,
        checks: frozenset | None = None,
        debug: bool = False,
    ) -> LoopResult:
        """Train: read ahead, dispatch ahead, report one step late.

        Args:
          step_fn: What one replica does: `step_fn(state, batch[, key])` returns the new
            state and metrics. The key is `fold_in(fold_in(run's key, step),
            microbatch)`, equal on all replicas.
          dataset: An iterable of global batches, or `input_fn(context)`; one that can
            be iterated again is, until the steps are done.
          init_fn: `init_fn(key)` returns the first state.
          steps: Updates to make; None runs until the dataset ends.
          seed: Of the keys of `init_fn` and `step_fn`.
          accumulate: Equal microbatches that each global batch is cut into.
          steps_per_call: Updates per dispatch, with no change of meaning.
          directory: Where `metrics.jsonl`, TensorBoard events (if installed) and
            `run.json` go; None writes nothing.
          checkpoint_dir: Where the whole run is saved, and from where it goes on by
            itself, bit for bit; one directory per run.
          checkpoint_every: Steps between saves, or a schedule such as
            `hooks.every(seconds=600)`.
          retention: Which checkpoints stay; the last three by default.
          hooks: What else happens, after the built-in reports.
          inputs: How the dataset is read and checked; its `accumulate`,
            `steps_per_call` and `steps` are those of the run.
          write_every: Steps between written metrics.
          display: Whether progress is shown on standard error.
          on_nonfinite: Whether a metric that is NaN or infinite ends the run; by
            default it does, unless an optimizer skips such updates.
          checks: As in `compile`.
          debug: As in `compile`.

        Returns:
          The final state of the user, the last metrics, steps, examples and rates.

        Raises:
          ArgumentError: A number is out of range, or the dataset ended early.
          BatchError: A batch does not fit.
          NonFiniteError: A batch or a metric holds NaN or infinity.
          ReplicationError: The state may differ between replicas.
          StateError: `step_fn` returned another structure.
        """
        options = self._options(accumulate, steps_per_call, checks)
        state = init_run(init_fn, self._mesh, seed=seed)
        reading = dataclasses.replace(
            inputs or InputOptions(),
            accumulate=accumulate,
            steps_per_call=steps_per_call,
        )
        arguments = {
            "steps": steps,
            "accumulate": accumulate,
            "steps_per_call": steps_per_call,
            "num_replicas": self.num_replicas,
            "reduction": self._reduction,
            "inputs": dataclasses.asdict(reading),
        }
        return train(
            self._lift(step_fn, options, debug=debug, counted=True),
            state,
            dataset,
            mesh=self._mesh,
            plan=LoopPlan(
                steps=steps,
                steps_per_call=steps_per_call,
                on_nonfinite=on_nonfinite or _nonfinite_policy(state),
            ),
            reading=reading,
            records=Records(
                directory=directory,
                write_every=write_every,
                display=display,
                seed=seed,
                arguments=arguments,
            ),
            checkpoints=_checkpoints(checkpoint_dir, checkpoint_every, retention),
            hooks=hooks,
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

    def _lift(
        self, step_fn: StepFn, options: CompileOptions, *, debug: bool, counted: bool
    ) -> CompiledStep | DebugStep:
        if debug:
            _refuse_in_debug(options)
            update = lift(step_fn)
        else:
            update = lift(
                step_fn, accumulate=options.accumulate, reduction=self._reduction
            )
        if counted:
            update = count_steps(update)
        if debug:
            return DebugStep(update, accumulate=options.accumulate)
        if options.steps_per_call > 1:
            update = repeat_steps(update)
        return CompiledStep(update, self._mesh, options)


def run(
    step_fn: StepFn,
    dataset: Dataset,
    *,
    init_fn: InitFn,
    steps: int | None,
    **arguments: Any,
) -> LoopResult:
    """Train on all devices: `Replicator().run(...)`, which says what it takes."""
    return Replicator().run(step_fn, dataset, init_fn=init_fn, steps=steps, **arguments)


def _checkpoints(
    directory: str | os.PathLike[str] | None,
    when: int | Every,
    retention: Retention | None,
) -> Checkpoints | None:
    if directory is None:
        return None
    schedule = every(n_steps=when) if isinstance(when, int) else when
    return Checkpoints(
        directory=directory, when=schedule, retention=retention or Retention()
    )


def _nonfinite_policy(state: RunState) -> Literal["raise", "ignore"]:
    skips = any(each.skipped is not None for each in optimizer_states(state.user))
    return "ignore" if skips else "raise"


def _refuse_in_debug(options: CompileOptions) -> None:
    if options.steps_per_call > 1 or options.checks is not None:
        raise ArgumentError(
            "`debug` must be False with `steps_per_call` above 1 or `checks`, got "
            "True. Leave those out: in debug mode checks raise by themselves."
        )

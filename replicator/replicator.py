"""One object for users: where replicas run, how a step is lifted onto them, and a loop.

It joins modules and decides nothing: what a method does, another package has.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Literal, overload

import optax
from jax.sharding import Mesh

from replicator.base import tracebacks
from replicator.base.host.compilation_cache import enable_compilation_cache
from replicator.base.host.fake_devices import asked_cpu_devices, size_cpu_pool
from replicator.base.mesh import replica_mesh
from replicator.base.method_functions import as_function
from replicator.base.types import Dataset, Device, InitFn, Key, PyTree, StepFn
from replicator.checkpoint.pieces.copy_place import CopyPlace
from replicator.checkpoint.retention import Retention
from replicator.distributed.jax_group import require_joined
from replicator.engine import make_step
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.debug_step import DebugStep
from replicator.engine.evaluation.blocks import DEFAULT_BLOCK
from replicator.engine.evaluation.evaluate import EvalFn, Evaluation
from replicator.engine.evaluation.predict import PredictFn, Prediction
from replicator.engine.first_update.check import FirstUpdateCheck
from replicator.engine.inspection.inspection import Inspection
from replicator.engine.layout import Layout
from replicator.engine.require_eager import eager
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step import optimizer as optimizers
from replicator.engine.step.loss_scale import DynamicLossScale
from replicator.engine.step.optimizer_state import Reduction
from replicator.engine.step.state import first_state, placed_copy, run_keys
from replicator.errors import ArgumentError, check_flags, check_function
from replicator.hooks.protocol import Hook
from replicator.hooks.schedule import Every
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.position import Position
from replicator.inputs.prefetch import Prefetcher
from replicator.monitoring.phases import Phases
from replicator.strategies.builders import Builder
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import Strategy
from replicator.training.best_metric import Follow
from replicator.training.loop import LoopResult
from replicator.training.node import ProgramNode
from replicator.training.nonfinite.policy import OnMismatch, OnNonfinite
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import RunOptions
from replicator.training.run_spec import make_run_spec
from replicator.training.session import Session
from replicator.training.watchdog.limits import Limits
from replicator.tuning.choosing.chooser import Chooser
from replicator.tuning.choosing.decision import Decision


@tracebacks.short_tracebacks
class Replicator:
    """Run what one replica does on many devices.

    Args:
      num_replicas: Number of devices to use; all by default.
      devices: Devices to choose from; JAX's own by default.
      strategy: A strategy of `replicator.strategies`, by which a step and its state
        are spread; by default each device has a replica. `"auto"`: several are tried
        when a run begins; see `choose`. A function `(variables, devices)` that returns
        one is called when the first state is made.
      machine: A `strategies.Machine`, or a cluster's file or its text: it has the
        number of devices of a host, for `hybrid()` and rules that sum by hosts, and
        figures for `"auto"`. By default what `replicator launch --machine` was given.
      reduction: `"fast"` leaves the order in which gradients add up to XLA. `"ordered"`
        adds them in example order, in replicas × microbatches blocks: 8 × 1, 4 × 2 and
        2 × 4 give the same bits; 1 × 8 does for layers and convolutions, not attention.
      max_in_flight: Most calls dispatched and not finished; never above 16 on CPU.
      compilation_cache: Keep compiled programs in a private directory of this user.

    Raises:
      ArgumentError: An argument is out of range.
      DistributedError: This process is one of several, and has not joined them.
      TooLateError: JAX's own `initialize` made a group whose CPU devices would hang.
    """

    def __init__(
        self,
        num_replicas: int | None = None,
        *,
        devices: Sequence[Device] | None = None,
        strategy: Strategy | Builder | Literal["auto"] | None = None,
        machine: Machine | str | os.PathLike[str] | None = None,
        reduction: Reduction = "fast",
        max_in_flight: int = DEFAULT_RUN_AHEAD,
        compilation_cache: bool = True,
    ) -> None:
        tracebacks.check_environment()
        optimizers.check_reduction(reduction)
        check_flags(compilation_cache=compilation_cache)
        require_joined()
        size_cpu_pool(asked_cpu_devices())
        if compilation_cache:
            enable_compilation_cache()
        mesh = replica_mesh(num_replicas, devices=devices)
        self.decision = Decision(mesh, strategy, reduction, machine=machine)
        self._defaults = CompileOptions(
            max_in_flight=max_in_flight, reduction=reduction
        )
        # By function, so that evaluating every n steps compiles once.
        self._evaluation = functools.lru_cache(maxsize=16)(self.compile_evaluation)
        self._prediction = functools.lru_cache(maxsize=16)(Prediction)

    @property
    def mesh(self) -> Mesh:
        """The mesh; its only axis is `replica` unless the strategy partitions."""
        return self.layout.mesh

    @property
    def layout(self) -> Layout:
        """The layout of state and batches on the mesh."""
        return self.decision.layout

    @property
    def num_replicas(self) -> int:
        """Number of replicas that a step runs on."""
        return self.layout.num_replicas

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
        the replicator's `reduction` and its strategy's rules. Under a strategy that
        partitions, pass `accumulate` to `compile` instead.

        >>> optimizer = rep.wrap_optimizer(optax.sgd(0.1))
        >>> opt = optimizer.init({"w": jnp.zeros(3)})
        """
        self.decision.check_own_sums(accumulate)
        return optimizers.wrap_optimizer(
            tx,
            name=name,
            skip_nonfinite=skip_nonfinite,
            loss_scale=loss_scale,
            accumulate=accumulate,
            reduction=self._defaults.reduction,
            strategy=self.decision.rules,
        )

    @eager("rep.init")
    def init(self, init_fn: InitFn, *, seed: int = 0) -> PyTree:
        """Make the first state for a loop of your own, on every device.

        Args:
          init_fn: `init_fn(key)` returns any pytree of arrays.
          seed: Seed of its key; gives the same key as `run(seed=...)`.

        Returns:
          The state; `PerReplica` leaves have a replica axis, padded ones are `Padded`.

        Raises:
          ArgumentError: `init_fn` is not a function of a key, `seed` is not a whole
            number, or JAX traces the call.

        >>> rep.init(lambda key: {"w": jnp.zeros(3)})["w"].sharding.is_fully_replicated
        True
        """
        check_function("init_fn", init_fn, "key")
        key, _ = run_keys(seed)
        return first_state(init_fn, self.layout, key=key).born()

    @eager("rep.put")
    def put(self, state: PyTree) -> PyTree:
        """Copy a state to every device, for a loop of your own: to tune a model.

        Args:
          state: Any pytree of JAX or NumPy arrays, on any device; left as it is.
            `PerReplica` leaves have a leading replica axis, as in `result.state`.

        Returns:
          The state as `init` would have made it. It shares no memory with the
          argument: a step may donate it.

        Raises:
          ArgumentError: A leaf is not an array, a `PerReplica` leaf lacks a row for
            each replica, or JAX traces the call.

        >>> params = init_params(key)                    # or what a file holds
        >>> state = rep.put({"params": params, "opt": optimizer.init(params)})
        """
        return placed_copy(state, self.layout)

    @overload
    def compile(
        self,
        step_fn: StepFn,
        *,
        accumulate: int = 1,
        steps_per_call: int = 1,
        checks: frozenset | None = None,
        check_first_updates: bool = False,
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
        check_first_updates: bool = False,
        debug: bool = False,
    ) -> CompiledStep | DebugStep:
        """Lift `step_fn` onto all replicas: `state, metrics = step(state, batch)`.

        One call takes one global batch and makes exactly one update.

        Args:
          step_fn: Step of one replica: `step_fn(state, batch[, key])` returns the new
            state and metrics.
          accumulate: Number of equal microbatches that the batch is cut into.
          steps_per_call: Updates per call; batches, keys and metrics then have a
            leading axis of that length.
          checks: `checkify` errors to look for, e.g. `checkify.user_checks`. Each call
            then waits for its result.
          check_first_updates: Under a strategy that partitions, compare the first two
            updates of each program with those of one device: `step.checked_updates`
            holds the results.
          debug: Run as one replica on the whole batch, without `jit` or `shard_map`.

        Returns:
          The step, compiled at its first call.

        Raises:
          ArgumentError: An argument is of the wrong kind, a number is below 1, or
            `debug` is combined with `steps_per_call` or `checks`.

        >>> step = rep.compile(step_fn)
        >>> state, metrics = step(rep.init(init_fn), batch)
        """
        check_function("step_fn", step_fn, "state, batch", "state, batch, key")
        check_flags(debug=debug, check_first_updates=check_first_updates)
        options = dataclasses.replace(
            self._defaults,
            accumulate=accumulate,
            steps_per_call=steps_per_call,
            checks=checks,
        )
        if debug:
            return make_step.debug_step(step_fn, options, counted=False)
        check = FirstUpdateCheck() if check_first_updates else None
        return make_step.compiled_step(
            step_fn, self.layout, options, counted=False, phases=Phases(), check=check
        )

    def inspect(
        self,
        step: StepFn | CompiledStep,
        state: PyTree = None,
        batch: PyTree = None,
        key: Key | None = None,
        *,
        saves: bool = False,
    ) -> Inspection:
        """Show what a step sends, keeps and computes: it is compiled, and not run.

        Args:
          step: A `step_fn`, or the result of `compile`. If that was called before, and
            no other argument is given, its last compiled program is shown.
          state: Arrays, shapes, or the `init_fn(key)` that returns it.
          batch: One global batch: arrays, or `jax.ShapeDtypeStruct`s.
          key: A random key if `step_fn` takes one.
          saves: Whether to count the copy of the state that a run's save makes.

        Returns:
          Each collective with its kind, count, bytes, axes and the user's line, the
          memory of a device, and the arithmetic; prints as a table.

        Raises:
          ArgumentError: State or batch is missing and nothing was compiled; the step
            was made with `debug`; or a call of the step would raise it.
          BatchError: A call of the step would raise it.
          jax.errors.JaxRuntimeError: The step needs more memory than a device has.

        >>> rep.inspect(step_fn, init_fn, batch).counts()
        {'all-reduce replica': 1}
        """
        if not isinstance(step, CompiledStep | DebugStep):
            step = self.compile(step)
        return step.inspect(state, batch, key, saves=saves)

    def batches(
        self,
        dataset: Dataset,
        options: InputOptions | None = None,
        *,
        start: Position | None = None,
    ) -> Prefetcher:
        """Read a dataset ahead, onto the mesh, for a loop of your own.

        Args:
          dataset: An iterable of global batches, or `input_fn(context)`.
          options: Options of reading, checking and placing.
          start: Position to begin at: the `position` of the last batch that was used.

        Returns:
          Iterator of `Placed` batches for a compiled step; close it when done.

        >>> with rep.batches(dataset, replicator.InputOptions(epochs=1)) as batches:
        ...     sizes = [batch.examples for batch in batches]
        """
        return open_input(dataset, self.layout, options=options, start=start)

    def run(  # noqa: D417 (`RunOptions` describes the options)
        self,
        step_fn: StepFn,
        dataset: Dataset,
        *,
        init_fn: InitFn | None = None,
        init_state: PyTree = None,
        steps: int | None = None,
        seed: int = 0,
        accumulate: int = 1,
        auto_microbatch: bool = False,
        memory_limit_bytes: int | None = None,
        steps_per_call: int = 1,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Every = 100,
        retention: Retention | None = None,
        checkpoint_copy: CopyPlace = "device",
        memory_copy_every: int | Every | None = None,
        eval_fn: EvalFn | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        eval_every: int | Every | None = None,
        follow: Follow | None = None,
        hooks: Sequence[Hook] = (),
        step_timeout: float | Limits | None = None,
        inputs: InputOptions | None = None,
        write_every: int = 10,
        gradient_norm: bool = True,
        display: bool = True,
        profile: range | None = None,
        on_nonfinite: OnNonfinite | None = None,
        spikes: Spikes | None = None,
        check_replicas_every: int | Every | None = None,
        on_mismatch: OnMismatch = "raise",
        checks: frozenset | None = None,
        check_first_updates: bool | None = None,
        debug: bool = False,
        node: ProgramNode | None = None,
    ) -> LoopResult:
        """Train: read ahead, dispatch ahead, report one step late.

        The options are the fields of `replicator.options.RunOptions`, which describes
        each of them. The step: `accumulate`, `auto_microbatch`, `memory_limit_bytes`,
        `steps_per_call`, `checks`, `check_first_updates`, `debug`. Around it: `inputs`,
        `hooks`, `step_timeout`, `node`. Checkpoints: `checkpoint_*`, `retention`,
        `memory_copy_every`. Evaluation: `eval_*`, `follow`. Records: `directory`,
        `write_every`, `gradient_norm`, `display`, `profile`. Bad numbers:
        `on_nonfinite`, `spikes`. Flipped bits: `check_replicas_every`, `on_mismatch`.

        >>> result = rep.run(step_fn, dataset, init_fn=init_fn, steps=3)
        >>> result.step
        3

        Args:
          step_fn: Step of one replica: `step_fn(state, batch[, key])` returns the new
            state and metrics. The key is `fold_in(run's key, step)`, equal on all
            replicas and in all microbatches.
          dataset: An iterable of global batches, or `input_fn(context)`. An iterable
            that can be read again is, until all steps are done.
          steps: Updates to make; None makes one pass over the dataset.
          init_fn: `init_fn(key)` returns the first state.
          init_state: First state, as `put` takes it, instead of an `init_fn`.
          seed: Seed of the keys of `init_fn` and `step_fn`.
          checkpoint_dir: Directory, or URL in a bucket, where the whole run is saved,
            and where it resumes from without being asked, bit for bit; one per run.
          directory: Directory of metrics, `run.json` and the journal.

        Returns:
          The final state of the user, the last metrics, steps, examples and rates.

        Raises:
          ArgumentError: An argument is of a wrong kind or out of range, or the dataset
            ended early.
          BatchError: A batch does not fit.
          NonFiniteError: A batch or a metric holds NaN or infinity.
          PartitionError: One of the first updates differs from that of one device.
          Preempted: A signal asked the run to stop, and it is saved.
          ReplicaMismatchError: Devices hold different bits of the same leaf.
          ReplicationError: The state may differ between replicas.
          StateError: `step_fn` returned another structure.
        """
        options = RunOptions(
            init_fn=init_fn,
            init_state=init_state,
            steps=steps,
            seed=seed,
            accumulate=accumulate,
            auto_microbatch=auto_microbatch,
            memory_limit_bytes=memory_limit_bytes,
            steps_per_call=steps_per_call,
            directory=directory,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            retention=retention,
            checkpoint_copy=checkpoint_copy,
            memory_copy_every=memory_copy_every,
            eval_fn=eval_fn,
            eval_dataset=eval_dataset,
            eval_every=eval_every,
            follow=follow,
            hooks=hooks,
            step_timeout=step_timeout,
            inputs=inputs,
            write_every=write_every,
            gradient_norm=gradient_norm,
            display=display,
            profile=profile,
            on_nonfinite=on_nonfinite,
            spikes=spikes,
            check_replicas_every=check_replicas_every,
            on_mismatch=on_mismatch,
            checks=checks,
            check_first_updates=check_first_updates,
            debug=debug,
            node=node,
        )
        check_function("step_fn", step_fn, "state, batch", "state, batch, key")
        if dataset is None:
            raise ArgumentError(
                "`dataset` must be an iterable of batches or a callable, got NoneType. "
                "Pass the batches; use `rep.session` to take them from a queue."
            )
        with self.session_by(step_fn, dataset, options) as session:
            for batch in session.batches():
                session.step(batch)
        return session.result

    def session(
        self,
        step_fn: StepFn | None = None,
        dataset: Dataset | None = None,
        *,
        init_fn: InitFn | None = None,
        init_state: PyTree = None,
        steps: int | None = None,
        seed: int = 0,
        accumulate: int = 1,
        auto_microbatch: bool = False,
        memory_limit_bytes: int | None = None,
        steps_per_call: int = 1,
        directory: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | Every = 100,
        retention: Retention | None = None,
        checkpoint_copy: CopyPlace = "device",
        memory_copy_every: int | Every | None = None,
        eval_fn: EvalFn | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        eval_every: int | Every | None = None,
        follow: Follow | None = None,
        hooks: Sequence[Hook] = (),
        step_timeout: float | Limits | None = None,
        inputs: InputOptions | None = None,
        write_every: int = 10,
        gradient_norm: bool = True,
        display: bool = True,
        profile: range | None = None,
        on_nonfinite: OnNonfinite | None = None,
        spikes: Spikes | None = None,
        check_replicas_every: int | Every | None = None,
        on_mismatch: OnMismatch = "raise",
        checks: frozenset | None = None,
        check_first_updates: bool | None = None,
        debug: bool = False,
        node: ProgramNode | None = None,
    ) -> Session:
        """Return all of `run` but its loop, for a loop of your own.

        `run` is a session and a `for`; `Session` has the methods that the loop calls.
        Arguments are those of `run`. Leave `step_fn` out if the loop has steps of its
        own, and `dataset` if batches come from elsewhere: their position is not saved.

        >>> with rep.session(step_fn, dataset, init_fn=init_fn, steps=3) as session:
        ...     losses = [session.step(batch)["loss"] for batch in session.batches()]

        Returns:
          A session; open it in a `with` statement.

        Raises:
          ArgumentError: As `run`; or an option needs the `step_fn` or the dataset that
            was left out.
        """
        options = RunOptions(
            init_fn=init_fn,
            init_state=init_state,
            steps=steps,
            seed=seed,
            accumulate=accumulate,
            auto_microbatch=auto_microbatch,
            memory_limit_bytes=memory_limit_bytes,
            steps_per_call=steps_per_call,
            directory=directory,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            retention=retention,
            checkpoint_copy=checkpoint_copy,
            memory_copy_every=memory_copy_every,
            eval_fn=eval_fn,
            eval_dataset=eval_dataset,
            eval_every=eval_every,
            follow=follow,
            hooks=hooks,
            step_timeout=step_timeout,
            inputs=inputs,
            write_every=write_every,
            gradient_norm=gradient_norm,
            display=display,
            profile=profile,
            on_nonfinite=on_nonfinite,
            spikes=spikes,
            check_replicas_every=check_replicas_every,
            on_mismatch=on_mismatch,
            checks=checks,
            check_first_updates=check_first_updates,
            debug=debug,
            node=node,
        )
        return self.session_by(step_fn, dataset, options)

    def session_by(
        self, step_fn: StepFn | None, dataset: Dataset | None, options: RunOptions
    ) -> Session:
        """Return a session whose options are one object.

        >>> chosen = options.RunOptions(init_fn=init_fn, steps=3)
        >>> session = rep.session_by(step_fn, dataset, chosen)

        Args:
          step_fn: As in `session`.
          dataset: As in `session`.
          options: All other options.

        Raises:
          ArgumentError: As `session`.
        """
        spec = make_run_spec(
            step_fn, dataset, options, self.decision, self._defaults, self._evaluation
        )
        return Session(spec)

    def compile_evaluation(
        self, eval_fn: EvalFn, *, block: int = DEFAULT_BLOCK
    ) -> Evaluation:
        """Lift `eval_fn` onto all replicas: `metrics = evaluation(state, dataset)`.

        Args:
          eval_fn: As in `evaluate`.
          block: Examples per call of it; rounded up to divide over the devices.

        Returns:
          The evaluation, compiled at its first call.

        Raises:
          ArgumentError: `eval_fn` is not a function of a state and a batch, or `block`
            is below 1.

        >>> evaluation = rep.compile_evaluation(eval_fn, block=32)
        >>> losses = evaluation(init_params(key), dataset)
        """
        most = self._defaults.max_in_flight
        return Evaluation(eval_fn, self.layout, block=block, max_in_flight=most)

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

        The result has the same bits on any number of replicas, and for any division of
        the dataset into batches. Each function is compiled once.

        >>> rep.evaluate(eval_fn, dataset, state=init_params(key))["examples"]
        96

        Args:
          eval_fn: `eval_fn(state, batch)` gets `block` examples and returns a dict of
            metrics: arrays with one row per example, which are averaged, or declared
            ones, weighted by `batch["mask"]`.
          dataset: Finite iterable of batches of any sizes, or `input_fn(context)`.
          state: As from `init`, a compiled step or `run`; neither changed nor donated.
          inputs: Options of reading the dataset; see `Evaluation`.
          block: Examples per call of `eval_fn`; bits depend on it.

        Returns:
          The metrics over all examples: Python numbers, and NumPy arrays for metrics
          that are not scalars. `examples` is the number of examples.

        Raises:
          ArgumentError: `eval_fn` returns something that cannot be counted exactly.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        # Checked before the cache, which takes hashable keys only.
        check_function("eval_fn", eval_fn)
        return self._evaluation(eval_fn, block=block)(state, dataset, inputs=inputs)

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

        They have the same bits on any number of replicas, and for any division of the
        dataset into batches; every process gets all of them. Each function is compiled
        once.

        >>> def predict_fn(params, batch):
        ...     return batch["x"] @ params["w"] + params["b"]
        >>> rep.predict(predict_fn, dataset, init_params(key)).shape
        (96,)

        Args:
          predict_fn: `predict_fn(state, batch)` gets `block` examples, as the dataset
            has them, and returns a pytree of arrays with one row per example. Rows of
            examples that only fill the last blocks up are left out.
          dataset: As in `evaluate`. If an `input_fn` reads in every process, the order
            is that in which replicas got the examples.
          state: As in `evaluate`.
          inputs: Options of reading the dataset; see `Evaluation`.
          block: Examples per call of `predict_fn`; bits depend on it.

        Returns:
          The tree of `predict_fn`, with NumPy leaves [examples, ...].

        Raises:
          ArgumentError: `predict_fn` returns something without a row per example, or
            calls a collective.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        check_function("predict_fn", predict_fn)
        options = {"block": block, "max_in_flight": self._defaults.max_in_flight}
        prediction = self._prediction(predict_fn, self.layout, **options)
        return prediction(state, dataset, inputs=inputs)


run = as_function(Replicator.run, Replicator)
choose = as_function(Chooser.choose, functools.partial(Chooser, Replicator))

"""Choose a strategy for a step: `replicator.choose`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicator.base.mesh import replica_mesh
from replicator.base.number_lists import lists_as_arrays
from replicator.base.tracebacks import short_tracebacks
from replicator.base.types import InitFn, PyTree, StepFn
from replicator.engine.first_update.one_device import on_host
from replicator.engine.replicated import ReplicatedLayout
from replicator.engine.sharded_step import CompileOptions
from replicator.errors import ArgumentError, check_function
from replicator.inputs.placement import placed_shapes
from replicator.strategies.machine import Machine
from replicator.strategies.rule import Partition
from replicator.strategies.strategy import Strategy
from replicator.tuning.choosing.choice import Choice
from replicator.tuning.choosing.decision import Decision
from replicator.tuning.choosing.search import Choosing, ChoosingOptions
from replicator.tuning.choosing.subject import Subject, SubjectFile
from replicator.tuning.problem import ProblemFile


@short_tracebacks
class Chooser:
    """Chooses strategies for replicators that `make` makes.

    Args:
      make: `Replicator`.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def choose(
        self,
        step_fn: StepFn | str,
        init_fn: InitFn | None = None,
        batch: PyTree = None,
        *,
        replicator: Any = None,
        devices: Sequence[Any] | None = None,
        machine: Machine | None = None,
        candidates: Sequence[Strategy] | None = None,
        tensor_rules: Mapping[str, Partition] | None = None,
        lossy: bool = False,
        trials: int = 8,
        accumulate: int = 1,
        memory_limit_bytes: int | None = None,
        limit_s: float = 600.0,
        seed: int = 0,
    ) -> Choice:
        """Find the fastest strategy for a step on these devices, and say why.

        Strategies that divide and fit are compiled, the model's best first; one update
        of each is compared with that of the first of data parallel, zero1 and fsdp that
        fits; then they are timed in turns. One that fails is left out, with its reason.

        >>> choice = replicator.choose(step_fn, init_fn, batch, trials=2)
        >>> choice.chosen.status
        'chosen'
        >>> rep = choice.replicator

        Args:
          step_fn: Step of one replica, as `compile` takes it. Or `"FILE:FUNCTION"`, a
            problem as `replicator plan` takes it: another process then imports the
            file, where it would get pickled functions.
          init_fn: `init_fn(key)` returns the first state; None for that of a file.
          batch: One global batch; for a file by default random numbers of its shapes.
          replicator: A `Replicator(strategy="auto")` to decide for. Optimizers that it
            wrapped obey rules for sums, so these are candidates, too.
          devices: Devices to choose for; all by default, or those of `replicator`.
          machine: Their links and figures; by default as JAX sees them.
          candidates: Strategies to choose from; by default all that make sense. More
            than fit into `limit_s` are refused once the first is compiled.
          tensor_rules: Rules of the model for `tensor_parallel`, which is tried then.
          lossy: Whether gradients may travel in narrow forms; with `replicator`.
          trials: Most strategies to time; 0 decides by the model alone.
          accumulate: Number of microbatches of an update.
          memory_limit_bytes: Memory of a device; as it reports it by default.
          limit_s: Seconds for all of it; then the best so far is chosen. On fake CPU
            devices one candidate that compiles or runs for a quarter of it fails. On
            accelerators this process compiles, and nothing ends a compiler that hangs.
          seed: Seed of the first state.

        Returns:
          The choice: print it for the table; `choice.replicator` has the strategy.

        Raises:
          ArgumentError: An argument breaks its rule, or no candidate works.
          BatchError: `batch` is no batch.
          DeviceMemoryError: None fits; names the nearest, and a change that fits.
        """
        options = ChoosingOptions(
            machine=machine,
            candidates=candidates,
            tensor_rules=tensor_rules,
            lossy=lossy,
            trials=trials,
            memory_limit_bytes=memory_limit_bytes,
            limit_s=limit_s,
        )
        lifting = CompileOptions(accumulate=accumulate)
        if isinstance(step_fn, str):
            _require_no_functions(step_fn, init_fn, replicator)
            file = SubjectFile(
                problem=ProblemFile.from_text(step_fn),
                make_replicator=self._make,
                batch=None if batch is None else _checked_batch(batch, devices),
                options=lifting,
                seed=seed,
            )
            subject = file.subject(devices)
        else:
            check_function("step_fn", step_fn, "state, batch", "state, batch, key")
            check_function("init_fn", init_fn, "key")
            decision = _open_decision(replicator, devices, options)
            assert decision.devices is not None, "the devices are here"
            subject = Subject(
                step_fn=step_fn,
                init_fn=init_fn,
                batch=_checked_batch(batch, list(decision.devices.devices.flat)),
                decision=decision,
                options=lifting,
                seed=seed,
            )
        choice = choose_for(subject, options)
        if replicator is None:
            mesh = subject.decision.devices
            assert mesh is not None, "the devices are here"
            on = list(mesh.devices.flat)
            replicator = self._make(strategy=choice.strategy, devices=on)
        return dataclasses.replace(choice, replicator=replicator)


def _require_no_functions(step_fn: str, init_fn: InitFn | None, rep: Any) -> None:
    for name, given in (("init_fn", init_fn), ("replicator", rep)):
        if given is not None:
            raise ArgumentError(
                f"`{name}` must be left out with {step_fn!r}, whose function gets a "
                f"replicator and returns the step, got {given!r:.80}. Leave it out."
            )


def _open_decision(
    replicator: Any, devices: Sequence[Any] | None, options: ChoosingOptions
) -> Decision:
    if replicator is None:
        if options.lossy:
            raise ArgumentError(
                "`replicator` must be given with `lossy=True`, got None: only "
                "optimizers that it wrapped send narrow forms. Pass one with "
                '`strategy="auto"`.'
            )
        return Decision(replica_mesh(devices=devices), None, "fast")
    decision = getattr(replicator, "decision", None)
    is_one = isinstance(decision, Decision)
    if not is_one or decision.is_made:
        got = repr(replicator)
        if is_one:
            under = decision.layout.describe().get("name", "data_parallel")
            got = f"one under {under}"
        raise ArgumentError(
            '`replicator` must be one with `strategy="auto"` that is not decided yet, '
            f"got {got}. Leave it out, and use `choice.replicator`."
        )
    if devices is not None:
        raise ArgumentError(
            "`devices` must be left out with a `replicator`, which has its own, got "
            f"{len(devices)}. Pass them to `Replicator` itself."
        )
    return decision


def _checked_batch(batch: PyTree, devices: Sequence[Any] | None) -> PyTree:
    """Return a global batch on the host.

    Raises:
      BatchError: It is none.
    """
    batch = lists_as_arrays(batch, name="batch")
    one = replica_mesh(1, devices=devices)
    placed_shapes(batch, ReplicatedLayout(one))
    return on_host(batch)


def choose_for(
    subject: Subject,
    options: ChoosingOptions,
    note: Callable[[str], None] = lambda text: None,
) -> Choice:
    """Choose for a subject, and decide for its `Replicator`, if that is open.

    Args:
      subject: The step.
      options: Options.
      note: Takes a line on what is done next.

    Raises:
      ArgumentError: As `Choosing`.
      DeviceMemoryError: Nothing fits.
    """
    devices, decision = subject.decision.devices, subject.decision
    assert devices is not None, "the devices are here"
    choosing = Choosing(subject, devices, options, note)
    search = choosing.search()
    [chosen] = search.all_of("chosen")
    if chosen.strategy.kind == "partitions":
        assert choosing.work is not None, "the search has begun"
        bound = chosen.strategy.made_for(choosing.work.variables)
        search = search.with_(chosen.name, strategy=bound)
    choice = Choice(
        candidates=search.candidates,
        chosen=search.of(chosen.name),
        machine=choosing.machine.name,
        num_devices=devices.size,
        trials=options.trials,
        is_here=choosing.is_here,
    )
    if not decision.is_made:
        decision.make(chosen.strategy, choice.as_json())
    return choice

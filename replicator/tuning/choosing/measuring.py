"""Compile a step under a strategy, compare one update of it, and time it: here.

Each answer is plain data, and a failure an answer, too: `CandidateFailed`. One state is
there at a time. Programs stay, so that strategies can be timed in turns.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from replicator.base.flat_tree import FlatTree, whole
from replicator.base.mesh import spans_processes
from replicator.base.padded import unpadded
from replicator.base.types import PyTree, StepFn
from replicator.distributed import same_everywhere
from replicator.engine.check_step import trace_checked
from replicator.engine.first_update.comparison import differences, law
from replicator.engine.first_update.one_device import (
    UpdateInputs,
    compared_results,
    nudged,
    on_host,
    results_of,
)
from replicator.engine.inspection.inspection import inspection_of
from replicator.engine.layout import Layout
from replicator.engine.make_step import make_layout
from replicator.engine.memory import MemoryNeed
from replicator.engine.program_cost import program_cost, traced_work
from replicator.engine.program_key import program_key
from replicator.engine.sharded_step import (
    CompileOptions,
    joined_metrics,
    one_replica,
    shard_step,
)
from replicator.engine.sharding_constraints.one_replica import traced_alone
from replicator.engine.step.state import (
    FirstState,
    first_state,
    given_state,
    placed_copy,
    run_keys,
)
from replicator.engine.step.transforms import lift
from replicator.errors import ReplicatorError, takes
from replicator.inputs.placement import place, placed_shapes
from replicator.strategies.choose import CandidateFailed, Checked, Timed
from replicator.strategies.cost import Features
from replicator.strategies.strategy import Strategy
from replicator.strategies.variables import variables_of
from replicator.tuning.choosing.candidates import Work
from replicator.tuning.choosing.subject import Subject

_STEPS = 3  # of a turn, after one that warms up
_NUDGES = 4
_TIMES_ITSELF = 3.0  # as the check of first updates
_LONGEST_REASON = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStrategy:
    """What compiling a step under a strategy showed.

    Attributes:
      program: Key of the program.
      need: Memory of a device; None if the backend does not report it.
      features: Work of a step on one device.
      seconds: Time that it took.
    """

    program: str
    need: MemoryNeed | None
    features: Features
    seconds: float = 0.0


class _Ready(NamedTuple):
    """A compiled step under a strategy, with what it takes to run it."""

    layout: Layout
    first: FirstState
    run: jax.stages.Compiled
    found: CompiledStrategy


class _Standard(NamedTuple):
    """One update of the reference: inputs, results, and how these are compared."""

    given: UpdateInputs
    before: list
    expected: list
    compared: list


class Measurer:
    """Answers what there is to know of a step under a strategy, on devices of here.

    Args:
      subject: The step.
      devices: The devices, as replicas.
    """

    def __init__(self, subject: Subject, devices: Mesh) -> None:
        self._subject, self._devices = subject, devices
        self._options = subject.options
        needs_key = not takes(subject.step_fn, 2)
        _, for_steps = run_keys(subject.seed)
        self._key = for_steps if needs_key else None
        self._ready: dict[str, _Ready] = {}
        self._programs: dict[str, CompiledStrategy] = {}
        self._standards: dict[str, _Standard] = {}

    def work(self) -> Work:
        """Trace the step of one replica, and return what it computes; nothing runs."""
        subject = self._subject
        for_init, _ = run_keys(subject.seed)
        state = (
            jax.eval_shape(lambda: jax.tree.map(jnp.asarray, subject.init_state))
            if subject.init_fn is None
            else jax.eval_shape(subject.init_fn, for_init)
        )
        return work_of(subject.step_fn, state, subject.batch, self._key)

    def compile(
        self, name: str, strategy: Strategy, *, accumulate: int | None = None
    ) -> CompiledStrategy | CandidateFailed:
        """Compile the step under a strategy; a program that was compiled is not again.

        Args:
          name: Name of the strategy.
          strategy: The strategy.
          accumulate: Number of microbatches; the subject's by default.
        """
        options = self._options
        if accumulate is not None:
            options = dataclasses.replace(options, accumulate=accumulate)
        try:
            return self._compile(name, strategy, options)
        except Exception as failure:  # of the step, the strategy or the compiler
            return CandidateFailed(name=name, why=reason(failure))

    def check(self, name: str, reference: str) -> Checked | CandidateFailed:
        """Compare one update of a strategy with that of another, from one state."""
        try:
            return self._check(name, reference)
        except Exception as failure:
            return CandidateFailed(name=name, why=reason(failure))

    def time(self, name: str) -> Timed | CandidateFailed:
        """Return the least seconds of a step in a few of them, from a fresh state."""
        try:
            return Timed(name=name, seconds=self._time(self._ready[name]))
        except Exception as failure:
            return CandidateFailed(name=name, why=reason(failure))

    def _compile(
        self, name: str, strategy: Strategy, options: CompileOptions
    ) -> CompiledStrategy:
        began_s, subject = time.monotonic(), self._subject
        layout = make_layout(
            self._devices,
            strategy,
            reduction=options.reduction,
            processes=same_everywhere,
        )
        with subject.decision.under(layout):
            first = self._first(layout)
            program = shard_step(
                lift(
                    subject.step_fn,
                    accumulate=options.accumulate,
                    reduction=options.reduction,
                ),
                layout,
                options,
            )
            batch = placed_shapes(subject.batch, layout, accumulate=options.accumulate)
            traced = trace_checked(
                program,
                layout,
                options,
                state=first.shapes,
                batch=batch,
                key=self._key,
            )
            lowered = traced.lower()
        key = program_key(lowered)
        if key in self._programs:
            return self._programs[key]
        compiled = lowered.compile()
        found = inspection_of(
            compiled,
            cost=program_cost(traced.jaxpr, compiled),
            layout=layout,
            state=first.shapes,
            copies=options.state_copies,
            steps_per_call=1,
        )
        answer = CompiledStrategy(
            program=key,
            need=found.memory,
            features=found.features(),
            seconds=time.monotonic() - began_s,
        )
        if options == self._options:
            self._programs[key] = answer
            self._ready[name] = _Ready(layout, first, compiled, answer)
        return answer

    def _first(self, layout: Layout) -> FirstState:
        subject = self._subject
        if subject.init_fn is None:
            return given_state(subject.init_state, layout, name="init_state")
        for_init, _ = run_keys(subject.seed)
        return first_state(subject.init_fn, layout, key=for_init)

    def _batch(self, layout: Layout, batch: PyTree) -> PyTree:
        return place(batch, layout, accumulate=self._options.accumulate)

    def _updated(self, ready: _Ready, given: UpdateInputs) -> list:
        """Return the results of one update, on the host."""
        state = placed_copy(given.state, ready.layout)
        batch = self._batch(ready.layout, given.batch)
        outputs = ready.run(FlatTree.of(state), batch, given.key)
        return results_of(whole(outputs.state), joined_metrics(outputs))

    def _check(self, name: str, reference: str) -> Checked:
        ready = self._ready[name]
        if spans_processes(self._devices):
            return Checked(name=name, result="ungated", why="several processes")
        if any(each["compress"] for each in ready.layout.describe().get("rules", ())):
            return Checked(name=name, result="ungated", why="narrow numbers differ")
        if reference not in self._standards:
            self._standards = {reference: self._standard(self._ready[reference])}
        standard = self._standards[reference]
        found = self._updated(ready, standard.given)
        if len(found) != len(standard.expected):
            return Checked(name=name, result="ungated", why="its state is another")
        apart = differences(
            found, standard.expected, standard.before, standard.compared
        )
        bound = max(law(ready.layout.mesh), law(self._ready[reference].layout.mesh))
        if max(apart.values(), default=0.0) <= bound:
            return Checked(name=name, result="same")
        allowed = self._allowed(self._ready[reference], standard, bound)
        worst = max(apart, key=lambda group: apart[group] / allowed[group])
        why = f"`{worst}` is off by {apart[worst]:.1e} of its norm"
        is_rounding = apart[worst] <= allowed[worst]
        return Checked(
            name=name, result="rounding" if is_rounding else "differs", why=why
        )

    def _standard(self, ready: _Ready) -> _Standard:
        state = ready.first.born()
        given = on_host(UpdateInputs(unpadded(state), self._subject.batch, self._key))
        del state
        replica = one_replica(
            lift(self._subject.step_fn, reduction=self._options.reduction),
            CompileOptions(),
        )
        traced, outputs = traced_alone(replica, given)
        return _Standard(
            given=given,
            before=results_of(given.state, ()),
            expected=self._updated(ready, given),
            compared=compared_results(traced, outputs, given),
        )

    def _allowed(
        self, ready: _Ready, standard: _Standard, bound: float
    ) -> dict[str, float]:
        """Return by how much each group moves with other roundings of the inputs."""
        given = standard.given
        allowed: dict[str, float] = {}
        for seed in range(_NUDGES):
            state, batch = nudged((given.state, given.batch), seed)
            found = self._updated(ready, UpdateInputs(state, batch, given.key))
            old, new = standard.before, results_of(state, ())
            for number, pair in enumerate(zip(old, new, strict=True)):
                each = standard.compared[number]
                if each is not None and each.moves:
                    found[number] = found[number] - (pair[1] - pair[0])
            itself = differences(
                found, standard.expected, standard.before, standard.compared
            )
            for group, off in itself.items():
                most = max(_TIMES_ITSELF * off, allowed.get(group, bound))
                allowed[group] = most
        return allowed

    def _time(self, ready: _Ready) -> float:
        batch = self._batch(ready.layout, self._subject.batch)
        state = FlatTree.of(ready.first.born())
        seconds = []
        for _ in range(1 + _STEPS):
            began_s = time.monotonic()
            state = jax.block_until_ready(ready.run(state, batch, self._key).state)
            seconds.append(time.monotonic() - began_s)
        return min(seconds[1:])


def work_of(step_fn: StepFn, state: PyTree, batch: PyTree, key: PyTree) -> Work:
    """Trace a step of one replica, and return what it computes; nothing runs.

    Args:
      step_fn: The step.
      state: Its state, in shapes.
      batch: One global batch, or its shapes.
      key: Random key of the step, or its shape; None if it takes none.
    """
    update = one_replica(lift(step_fn), CompileOptions())
    traced, _ = traced_alone(update, [state, batch, key])
    found = traced_work(traced)
    leaves = jax.tree.leaves(batch)
    return Work(
        variables=variables_of(state),
        examples=np.shape(leaves[0])[0],
        batch_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        flops=found.flops,
        product_bytes=found.product_bytes,
    )


def reason(failure: BaseException) -> str:
    """Return one line that says why something failed.

    >>> reason(ValueError("no"))
    'ValueError: no'
    """
    text = " ".join(str(failure).split())
    if not isinstance(failure, ReplicatorError):
        text = f"{type(failure).__name__}: {text}"
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."

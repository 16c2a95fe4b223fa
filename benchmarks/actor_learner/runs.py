"""The ways of working that are compared, and a window of each at full speed.

All are one program: its processes are there all the time, compiled and warm, and all
but those of one way wait before a shut gate.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import replicator.launchpad_bridge as lp
from benchmarks.actor_learner import agent
from benchmarks.actor_learner.counters import Counters, Reading
from benchmarks.actor_learner.setup import Setup
from benchmarks.actor_learner.window import Window

_LOOK_S = 0.01
_LONGEST_S = 300.0


class Way:
    """One way of working."""

    def __init__(
        self,
        add_nodes: "AddNodes",
        setup: Setup,
        path: Path,
        *,
        acts: bool = True,
        learns: bool = True,
    ) -> None:
        """Remember it.

        Args:
          add_nodes: Adds its nodes to a program.
          setup: How large it is.
          path: Of the file of its counts, which is made.
          acts: Whether it takes environment steps.
          learns: Whether it takes batches.
        """
        self.setup = setup
        self._add_nodes = add_nodes
        self._acts, self._learns = acts, learns
        self._counters = Counters(path, setup.actors + 1)
        self._name = path.stem

    def add_to(self, program: lp.Program) -> None:
        """Add its nodes."""
        self._add_nodes(program, self.setup, self._counters, self._name)

    def measure(self, run: lp.Run, seconds: float, *, updates: int = 2) -> Window:
        """Let it work, and look at it for a while once it has its full speed.

        Where it learns the window begins and ends with an update.

        Args:
          run: Of the program.
          seconds: Length of the window.
          updates: How many are made before it begins, and unrolls of an actor.
        """
        self._counters.open_gate(True)
        try:
            self._warm_up(run, updates)
            before = self._at_update(run)
            time.sleep(seconds)
            after = self._at_update(run)
        finally:
            self._counters.open_gate(False)
        time.sleep(0.3)  # what is under way comes to its end
        used_s = np.subtract(after.processor_s, before.processor_s)
        return Window(
            seconds=after.at_s - before.at_s,
            acted=after.acted - before.acted,
            trained=(after.updates - before.updates) * self.setup.steps_per_update,
            stepping_s=after.stepping_s - before.stepping_s,
            actors_s=float(used_s[:-1].sum()),
            learner_s=float(used_s[-1]),
        )

    def _warm_up(self, run: lp.Run, updates: int) -> None:
        acted, done = self._counters.most_acted, self._counters.updates + updates
        acted += updates * self.setup.environments * self.setup.unroll_length
        if self._acts:
            _wait(run, lambda: self._counters.most_acted >= acted)
        if self._learns:
            _wait(run, lambda: self._counters.updates >= done)

    def _at_update(self, run: lp.Run) -> Reading:
        updates = self._counters.updates
        if self._learns:
            _wait(run, lambda: self._counters.updates > updates)
        return self._counters.read()


AddNodes = Callable[[lp.Program, Setup, Counters, str], None]


@contextlib.contextmanager
def launched(ways: list[Way]) -> Iterator[lp.Run]:
    """Run the processes of all ways while the block lasts."""
    program = lp.Program("actor_learner")
    for way in ways:
        way.add_to(program)
    launcher = lp.Processes(terminal="output_to_files")
    with lp.launch(program, launcher) as run:
        yield run


def acting_alone(
    program: lp.Program, setup: Setup, counters: Counters, name: str
) -> None:
    """Add as many bare loops of environments and policy as there are actors."""
    with program.group(name, resources=_one_thread()):
        for index in range(setup.actors):
            program.add_node(lp.PyNode(agent.act_alone, setup, counters, index))


def learning_alone(
    program: lp.Program, setup: Setup, counters: Counters, name: str
) -> None:
    """Add a bare loop of updates."""
    program.add_node(lp.PyNode(agent.learn_alone, setup, counters), label=name)


def in_turn(program: lp.Program, setup: Setup, counters: Counters, name: str) -> None:
    """Add one process that acts for all actors, then learns, and so on."""
    whole = dataclasses.replace(
        setup, actors=1, environments=setup.actors * setup.environments
    )
    program.add_node(lp.PyNode(agent.act_then_learn, whole, counters), label=name)


def taking(program: lp.Program, setup: Setup, counters: Counters, name: str) -> None:
    """Add the whole data plane, with a learner that drops what it takes."""
    node = lp.CourierNode(agent.Taker, setup, counters)
    taker = program.add_node(node, label=name)
    _add_actors(program, taker, setup, counters, name)


def learning(program: lp.Program, setup: Setup, counters: Counters, name: str) -> None:
    """Add the real thing: actors and a replicated learner."""
    node = lp.ReplicatedLearnerNode(
        agent.step_fn,
        agent.init_fn,
        steps=None,
        batch_size=setup.batch_size,
        replicas=1,
        display=False,
        hooks=[agent.Updates(counters, setup.actors)],
    )
    learner = program.add_node(node, label=name)
    _add_actors(program, learner, setup, counters, name)


def _add_actors(
    program: lp.Program,
    learner: lp.CourierHandle,
    setup: Setup,
    counters: Counters,
    name: str,
) -> None:
    make = _MakeEnvironment(setup, counters)
    with program.group(f"{name}_actor", resources=_one_thread()):
        for index in range(setup.actors):
            node = lp.PyClassNode(
                lp.Actor,
                *(make, agent.policy, agent.initial_core, learner),
                index=index,
                unroll_length=setup.unroll_length,
            )
            program.add_node(node)


@dataclasses.dataclass(frozen=True)
class _MakeEnvironment:
    setup: Setup
    counters: Counters

    def __call__(self, index: int) -> agent.CountedEnvironments:
        return agent.CountedEnvironments(self.setup, self.counters, index)


def _one_thread() -> lp.Resources:
    """Return what keeps the policies of several processes from fighting for cores.

    `NPROC` is the size of XLA's pool of threads; no flag of XLA's makes it smaller.
    """
    return lp.Resources(env={"NPROC": "1"})


def _wait(run: lp.Run, condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _LONGEST_S
    while not condition():
        if run.failure is not None or time.monotonic() > until_s:
            run.wait(0.1)
            raise RuntimeError("A program that is measured does not go on.")
        time.sleep(_LOOK_S)

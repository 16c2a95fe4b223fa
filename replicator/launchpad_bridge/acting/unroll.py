"""Act for some steps, and make trajectories of them.

An `Actor` of a program and a loop in one process use the same function, and get the
same bits, where actors take turns:

    act = LocalInference(policy, seed=0, index=0)
    act.use(variables)
    acting = start(environment, initial_core, seed=environment_seed(0, 0))
    while True:
        unrolled = unroll(environment, act, acting, length=20)
        acting = unrolled.acting
        ...                                       # learn from `unrolled.trajectories`

A trajectory is one row: leaves [n, length + 1, ...] of observations, [n, length, ...]
of actions. Consecutive ones overlap by an observation: the last of one is the
first of the next.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from replicator.base.trees import describe, first_difference, named_leaves
from replicator.base.types import PyTree
from replicator.errors import ArgumentError, check_count
from replicator.launchpad_bridge.acting.environments import (
    EnvironmentFailedError,
    Step,
    VectorEnvironment,
    first_step,
)
from replicator.launchpad_bridge.acting.snapshots import pack, unpack


class Act(Protocol):
    """Chooses actions: with variables of its own, or by calls of a server."""

    def __call__(
        self, observation: PyTree, first: np.ndarray, core: PyTree, steps: int
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return actions, extras and the next core, leaves [n, ...].

        Args:
          observation: Leaves [n, ...].
          first: bool [n]; where True, the core is reset before it is used.
          core: Recurrent state, leaves [n, ...].
          steps: Steps taken before by these environments; selects the random key.
        """
        ...


class Acting(NamedTuple):
    """State of n environments and their policy, between two unrolls.

    Attributes:
      step: Latest step.
      core: Recurrent state, leaves [n, ...]; an empty tuple for none.
      steps: Number of steps taken so far.
      returns: float64 [n], sums of rewards of the episodes that go on.
      ages: int32 [n], steps taken in these episodes.
    """

    step: Step
    core: PyTree
    steps: int
    returns: np.ndarray
    ages: np.ndarray


class Unrolled(NamedTuple):
    """Result of an unroll.

    Attributes:
      trajectories: `observation`, `first`, `last` and `age` [n, length + 1, ...], the
        steps taken in the episode; `action`, `reward`, `discount` and `extras`
        [n, length, ...] of the transitions between them; `core` [n, ...] before the
        first of them.
      episodes: Returns of the episodes that ended, in the order in which they did.
      acting: State to go on from.
    """

    trajectories: dict[str, PyTree]
    episodes: list[float]
    acting: Acting


def start_number(name: str, *, version: int, attempt: int) -> int:
    """Return a number that differs between all starts of actors of a run.

    Args:
      name: Name of the actor.
      version: Version of its first variables: a learner that goes on from its
        checkpoint begins with a later one.
      attempt: Number of this start of its worker, in this launch of the program.

    Returns:
      1 to 2**31 - 1, the same for the same arguments.

    >>> one = start_number("actor/0", version=0, attempt=0)
    >>> one == start_number("actor/0", version=500, attempt=0)
    False
    """
    digest = hashlib.sha256(repr((name, version, attempt)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1 or 1


def environment_seed(seed: int, index: int, *, number: int = 0, start: int = 0) -> int:
    """Return the seed by which an actor resets its environments, 0 to 2**31 - 1.

    Args:
      seed: Seed of the run, 0 or more.
      index: Index of the actor, 0 or more.
      number: Number of the trajectory, if each begins with a reset.
      start: `start_number`, if another start of the actor must have other episodes.

    >>> environment_seed(0, 0) == environment_seed(0, 1)
    False
    """
    [drawn] = np.random.SeedSequence((seed, index, number, start)).generate_state(1)
    return int(drawn) >> 1


def start(
    environment: VectorEnvironment,
    initial_core: Callable[[int], PyTree],
    *,
    seed: int,
    steps: int = 0,
) -> Acting:
    """Begin new episodes.

    Args:
      environment: Environments to reset.
      initial_core: Returns the recurrent state of so many environments.
      seed: Seed of the reset.
      steps: Steps that the policy has taken before.

    Raises:
      EnvironmentFailedError: The environment raised.
    """
    try:
        step = environment.reset(seed)
    except Exception as error:
        raise _failed("reset", steps, error) from error
    size = environment.size
    ages = np.zeros(size, np.int32)
    return Acting(step, initial_core(size), steps, np.zeros(size), ages)


def unroll(
    environment: VectorEnvironment,
    act: Act,
    acting: Acting,
    length: int,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Unrolled | None:
    """Take `length` steps in each environment.

    Args:
      environment: Environments in the state of `acting`.
      act: Chooses the actions.
      acting: Result of `start`, or of the unroll before.
      length: Number of steps.
      is_stopped: Called before each step; True ends the unroll.

    Returns:
      Trajectories, in memory of their own; None if it was stopped.

    Raises:
      ArgumentError: `length` is less than 1, or `act` does not return a row for each
        environment.
      EnvironmentFailedError: The environment raised, or returned a step of another form
        than `Step`, or than the one before; gives the number of steps.
    """
    check_count("length", length)
    step, core = acting.step, acting.core
    _check_step(step, environment.size, acting.steps)
    seen = _Rows(length + 1, (step.observation, step.first, step.last))
    gained = _Rows(length, (step.reward, step.discount))
    done: _Rows | None = None
    for t in range(length):
        if is_stopped():
            return None
        seen.write(t, (step.observation, step.first, step.last))
        steps = acting.steps + t
        action, extras, core = act(step.observation, step.first, core, steps)
        action = jax.tree.map(np.array, action)  # some environments clip it in place
        if done is None:
            _check_acted({"action": action, "extras": extras}, environment.size)
            done = _Rows(length, (action, extras))
        done.write(t, (action, extras))
        try:
            step = environment.step(action)
        except Exception as error:
            raise _failed("step", steps, error) from error
        if seen.differs((step.observation, step.first, step.last)) or gained.differs(
            (step.reward, step.discount)
        ):
            _check_same(acting.step, step, steps)
        gained.write(t, (step.reward, step.discount))
    seen.write(length, (step.observation, step.first, step.last))
    assert done is not None, "`length` is at least 1"
    observation, first, last = seen.tree()
    (reward, discount), (actions, extras) = gained.tree(), done.tree()
    returns, episodes = _episodes(acting.returns, reward, last)
    age = _ages(acting.ages, first)
    trajectories = {
        "observation": observation,
        "first": first,
        "last": last,
        "age": age,
        "action": actions,
        "reward": reward,
        "discount": discount,
        "extras": extras,
        "core": jax.tree.map(np.asarray, acting.core),
    }
    acting = Acting(step, core, acting.steps + length, returns, age[:, -1].copy())
    return Unrolled(trajectories, episodes, acting)


def pack_acting(environment: VectorEnvironment, acting: Acting) -> bytes:
    """Return the state of environments and policy as bytes.

    Args:
      environment: Environments with `can_snapshot`, in the state of `acting`.
      acting: State between two unrolls.
    """
    core = [np.asarray(leaf) for leaf in jax.tree.leaves(acting.core)]
    counted = acting.steps, acting.returns, acting.ages
    return pack((environment.snapshot(), core, *counted))


def unpack_acting(
    environment: VectorEnvironment,
    initial_core: Callable[[int], PyTree],
    packed: bytes,
) -> Acting:
    """Restore the state that `pack_acting` returned.

    Args:
      environment: Made by the same arguments; it is restored.
      initial_core: See `start`.
      packed: Result of `pack_acting`.
    """
    state, leaves, steps, returns, *counted = unpack(packed)
    structure = jax.tree.structure(initial_core(environment.size))
    core = jax.tree.unflatten(structure, leaves)
    # Older snapshots do not have them.
    (ages,) = counted or [np.zeros(environment.size, np.int32)]
    return Acting(environment.restore(state), core, steps, returns, ages)


class _Rows:
    """Memory for a tree over time: leaves [n, length, ...] of leaves [n, ...]."""

    def __init__(self, length: int, like: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves = [
            np.empty((leaf.shape[0], length, *leaf.shape[1:]), leaf.dtype)
            for leaf in map(np.asarray, leaves)
        ]

        self._forms = [(row[:, 0].shape, row.dtype) for row in self._leaves]

    def differs(self, tree: PyTree) -> bool:
        """Return whether a tree has another form, and would be cast on writing."""
        leaves, structure = jax.tree.flatten(tree)
        forms = [
            (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
            for leaf in leaves
        ]
        return forms != self._forms or structure != self._structure

    def write(self, t: int, tree: PyTree) -> None:
        """Copy the values of one time step."""
        for row, leaf in zip(self._leaves, jax.tree.leaves(tree), strict=True):
            row[:, t] = leaf

    def tree(self) -> Any:
        return jax.tree.unflatten(self._structure, self._leaves)


def _episodes(
    returns: np.ndarray, reward: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, list[float]]:
    """Return the sums of rewards that go on, and those that ended, in order.

    Args:
      returns: [n], sums before.
      reward: [n, T], of the transition t to t + 1.
      last: [n, T + 1], whether an episode ends at t.
    """
    returns, episodes = returns.copy(), []
    for t in range(reward.shape[1]):
        returns += reward[:, t]
        ended = last[:, t + 1]
        if ended.any():
            episodes += returns[ended].tolist()
            returns[ended] = 0.0
    return returns, episodes


def _ages(ages: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the steps taken in each episode, int32 [n, T + 1].

    Args:
      ages: [n], at the first time.
      first: [n, T + 1], whether an episode starts at t.
    """
    found = np.empty(first.shape, np.int32)
    found[:, 0] = ages
    for t in range(1, first.shape[1]):
        found[:, t] = np.where(first[:, t], 0, found[:, t - 1] + 1)
    return found


def _check_step(step: Step, size: int, steps: int) -> None:
    """Raise if a first step does not have the form of `Step`."""
    _check_same(first_step(step.observation, size), step, steps)
    for name, leaf in named_leaves({"observation": step.observation}):
        if np.shape(leaf)[:1] != (size,):
            wrong = f"`{name}` must be of {size} environments, got {describe(leaf)}"
            raise _unlike(wrong, steps)


def _check_acted(acted: PyTree, size: int) -> None:
    """Raise if the results of a policy lack a row for each environment."""
    for name, leaf in named_leaves(acted):
        if np.shape(leaf)[:1] != (size,):
            raise ArgumentError(
                f"`policy` must return a row for each of {size} environments, got "
                f"`{name}` {describe(leaf)}. Repeat it: `jnp.full(first.shape, value)`."
            )


def _check_same(expected: Step, step: Step, steps: int) -> None:
    """Raise if a step has another form; name the leaf that differs."""
    wrong = first_difference(expected._asdict(), step._asdict())
    if wrong is not None:
        raise _unlike(wrong, steps)


def _unlike(wrong: str, steps: int) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        "`environment` must return steps of one form, bool and float32 of each "
        f"environment, got another after {steps} steps: {wrong}. Fix the environment, "
        "or convert its steps."
    )


def _failed(doing: str, steps: int, error: Exception) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"`environment.{doing}` must not raise, got {type(error).__name__} after "
        f"{steps} steps: {error}. Fix the environment, or restart the actor."
    )

"""Make the rows of a replay table out of unrolls, on the actor's side.

A window of so many transitions slides over the steps of each environment, and ends
early where its episode ends. Here are the windows of three transitions that
`n_step(3, ...)` makes of an episode of four, whose last observation is o4:

    o0 ── o1 ── o2 ── o3 ── o4
    ├───────────────┤             o0, r1 + γ r2 + γ² r3, γ³, o3
          ├───────────────┤       o1, r2 + γ r3 + γ² r4, γ³ d, o4
                ├─────────┤       o2, r3 + γ r4,         γ² d, o4
                      ├───┤       o3, r4,                γ d,  o4

with d 0 where the episode terminated, and 1 where it was cut by time: then a learner
bootstraps from its own last observation. The step after it, which begins the next
episode, is in no row. A window that an unroll leaves unfinished waits for the next.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError, check_count, check_number

_STEPS = ("observation", "first", "last", "age", "action", "reward", "discount")


class Places(NamedTuple):
    """Windows in the steps of several environments.

    Attributes:
      environment: int [items], the environment of each.
      start: int [items], its first observation.
      end: int [items], its last observation.
    """

    environment: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """A function that makes items of unrolls; see `n_step` and `sequences`.

    Attributes:
      length: Number of transitions of an item.
      period: Number of steps from one item's start to the next one's.
      least: Number of transitions that one has at least, but for the first of an
        episode: what is shorter has nothing that is not in the item before.
      rows_of: Returns the rows, leaves [items, ...], at places of some steps.
    """

    length: int
    period: int
    least: int
    rows_of: Callable[[dict[str, PyTree], Places], dict[str, PyTree]]

    def __call__(
        self, trajectories: dict[str, PyTree], waiting: Any = None, *, ends: bool
    ) -> tuple[dict[str, PyTree] | None, Any]:
        """Make the items that are whole.

        Args:
          trajectories: Result of `unroll`.
          waiting: Steps that wait: the second result for the unroll before; None where
            there was none.
          ends: Whether no unroll goes on from this one: items are cut at its end, as
            they are where an episode was cut by time.

        Returns:
          The items, leaves [items, ...], None if there are none; and what waits for the
          next unroll: plain data, and arrays of their own.
        """
        steps = {name: trajectories[name] for name in (*_STEPS, "extras")}
        starts = np.ones(steps["reward"].shape, bool)
        if waiting is not None:
            joined = functools.partial(np.concatenate, axis=1)
            steps = jax.tree.map(lambda *leaf: joined(leaf), waiting["steps"], steps)
            starts = joined((waiting["starts"], starts))
        size = starts[0].size
        starts &= ~steps["last"][:, :-1] & (steps["age"][:, :-1] % self.period == 0)
        end, is_whole = _ends(steps["last"], self.length)
        is_whole |= ends
        taken = end - np.arange(size)
        is_item = is_whole & starts
        is_item &= (taken >= self.least) | (steps["age"][:, :-1] == 0)
        environment, start = np.nonzero(is_item)
        rows = None
        if len(start):
            places = Places(environment, start, end[environment, start])
            rows = self.rows_of(steps, places)
        if ends:
            return rows, None
        kept = slice(max(0, size - self.length + 1), size)
        tail = jax.tree.map(lambda leaf: np.copy(leaf[:, kept]), steps)
        return rows, {"steps": tail, "starts": (starts & ~is_whole)[:, kept]}


def n_step(n: int, *, discount: float) -> Items:
    """Make transitions of n steps; the `items` of an `Actor`.

    Args:
      n: Number of steps; an item has fewer where its episode ends sooner.
      discount: γ of the agent, per step: 0 to 1.

    Returns:
      A function that makes rows of unrolls: `observation` and `action`; `reward`, the
      sum of the k rewards that followed, each discounted to the first; `discount`, γ^k
      times the environment's k discounts: 0 where the episode terminated;
      `next_observation`, k steps later; `extras` of the action.

    Raises:
      ArgumentError: `n` is less than 1, or `discount` not from 0 to 1.

    >>> import jax.numpy as jnp
    >>> from replicator.launchpad_bridge.acting import LocalInference, start, unroll
    >>> from replicator.launchpad_bridge.acting import from_gymnasium_envs
    >>> import gymnasium
    >>> environment = from_gymnasium_envs([lambda: gymnasium.make("CartPole-v1")])
    >>> def policy(variables, observation, first, core, key):
    ...     return jnp.zeros(len(first), int), {}, core
    >>> act = LocalInference(policy, seed=0, index=0)
    >>> unrolled = unroll(
    ...     environment, act, start(environment, lambda n: (), seed=0), length=4)
    >>> rows, _ = n_step(3, discount=0.5)(unrolled.trajectories, ends=False)
    >>> rows["reward"], rows["discount"]
    (array([1.75, 1.75], dtype=float32), array([0.125, 0.125], dtype=float32))
    """
    check_count("n", n)
    check_number("discount", discount)
    if not 0 <= discount <= 1:
        raise ArgumentError(
            f"`discount` must be from 0 to 1, got {discount}. Use 0.99."
        )
    rows_of = functools.partial(_transitions, length=n, discount=discount)
    return Items(length=n, period=1, least=1, rows_of=rows_of)


def sequences(*, length: int, overlap: int = 0) -> Items:
    """Make overlapping sequences of episodes; the `items` of an `Actor`.

    The first starts with its episode, and the last is filled up where the episode ends:
    by its last observation and action again, with a mask. Kapturowski et al. 2019,
    "Recurrent experience replay in distributed reinforcement learning", §2.3; a policy
    that stores its recurrent state returns it in `extras`.

    Args:
      length: Number of transitions.
      overlap: Number of transitions that one shares with the next.

    Returns:
      A function that makes rows of unrolls: `observation` and `first`
      [items, length + 1, ...]; `action`, `reward`, `discount` (the environment's) and
      `extras` [items, length, ...]; `mask` bool [items, length], False where it is
      filled up: there rewards and discounts are 0.

    Raises:
      ArgumentError: `length` is less than 1, or `overlap` not from 0 to below it.

    >>> items = sequences(length=80, overlap=40)
    >>> items.period
    40
    """
    check_count("length", length)
    check_count("overlap", overlap, "Use 0.", least=0)
    if overlap >= length:
        raise ArgumentError(
            f"`overlap` must be below `length`, got {overlap} of {length}. Use "
            f"{length // 2}."
        )
    return Items(
        length=length,
        period=length - overlap,
        least=overlap + 1,
        rows_of=functools.partial(_sequences, length=length),
    )


def joined_rows(rows: PyTree, new: PyTree) -> PyTree:
    """Return rows and those after them, leaves [items, ...]; None is no rows."""
    if rows is None or new is None:
        return new if rows is None else rows
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), rows, new)


def split_rows(rows: PyTree, count: int) -> tuple[PyTree, PyTree]:
    """Return the first rows, and those after them, None if there are none.

    >>> split_rows({"reward": np.arange(3)}, 2)
    ({'reward': array([0, 1])}, {'reward': array([2])})
    """
    if count == len(rows["reward"]):  # as they are: a table names a leaf of other rows
        return rows, None
    first = jax.tree.map(lambda leaf: leaf[:count], rows)
    return first, jax.tree.map(lambda leaf: leaf[count:], rows)


def _ends(last: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the window from each step ends, and whether it is whole by then.

    Args:
      last: bool [n, T + 1], whether an episode ends there.
      length: Number of transitions in a window.

    Returns:
      int and bool [n, T].
    """
    size = last.shape[1] - 1
    time = np.arange(size + 1)
    ends = np.where(last, time, size + length)  # beyond any window, where there is none
    episode = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, -2::-1]
    end = np.minimum(episode, time[:-1] + length)
    return np.minimum(end, size), end <= size


def _transitions(
    steps: dict[str, PyTree], places: Places, *, length: int, discount: float
) -> dict[str, PyTree]:
    environment, start, end = places
    time, inside = _times(places, length)
    row = environment[:, None]
    per_step = np.float32(discount) * steps["discount"][row, time]
    discounts = np.cumprod(np.where(inside, per_step, np.float32(1)), axis=1)
    before = np.ones_like(discounts)
    before[:, 1:] = discounts[:, :-1]
    observed = steps["observation"]
    return {
        "observation": _taken(observed, environment, start),
        "action": _taken(steps["action"], environment, start),
        "reward": (before * steps["reward"][row, time] * inside).sum(axis=1),
        "discount": discounts[:, -1],
        "next_observation": _taken(observed, environment, end),
        "extras": _taken(steps["extras"], environment, start),
    }


def _sequences(
    steps: dict[str, PyTree], places: Places, *, length: int
) -> dict[str, PyTree]:
    time, inside = _times(places, length)
    row = places.environment[:, None]
    seen = np.minimum(
        places.start[:, None] + np.arange(length + 1), places.end[:, None]
    )
    return {
        "observation": _taken(steps["observation"], row, seen),
        "first": steps["first"][row, seen],
        "action": _taken(steps["action"], row, time),
        "reward": steps["reward"][row, time] * inside,
        "discount": steps["discount"][row, time] * inside,
        "mask": inside,
        "extras": _taken(steps["extras"], row, time),
    }


def _times(places: Places, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of each window, the last again behind its end; and a mask."""
    time = places.start[:, None] + np.arange(length)
    end = places.end[:, None]
    return np.minimum(time, end - 1), time < end


def _taken(tree: PyTree, environment: np.ndarray, time: np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[environment, time], tree)

"""A program: a step for one replica, and the same update written by hand.

The oracle takes the whole global batch on one device and knows nothing of replicas. It
knows of microbatches only where examples meet inside one (batch norm), and of replicas
only where the program itself says so (`PerReplica` state).
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from replicator import Replicator
from replicator.base.types import PyTree

Init = Callable[[Any], PyTree]
Step = Callable[..., tuple[PyTree, PyTree]]
Parts = tuple[Init, Step]


class Setting(NamedTuple):
    """The cut of one global batch."""

    replicas: int
    microbatches: int

    def __str__(self) -> str:
        """Write it as `2x4`: replicas, then microbatches."""
        return f"{self.replicas}x{self.microbatches}"


ALL = tuple(Setting(*each) for each in [(1, 1), (1, 4), (2, 2), (4, 1), (8, 4)])
WHOLE = tuple(each for each in ALL if each.microbatches == 1)
CUT = tuple(each for each in ALL if each.microbatches > 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Same:
    """The program's state and metrics are the oracle's.

    Attributes:
      tolerance: Of how far a leaf moved; float64 rounding and its growth by default.
    """

    tolerance: float = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """The program is refused before it runs.

    Attributes:
      by: The class of the error, by name, or one that it inherits from.
      word: What its message says.
    """

    by: str
    word: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned:
    """The program runs, and says that it is not what was meant.

    Attributes:
      by: The class of the warning, by name.
      word: What its message says.
    """

    by: str
    word: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One training program.

    Attributes:
      name: Its ideas, joined by `-`.
      ours: Returns `init_fn` and `step_fn` for a replicator.
      batch: Returns the global batch of an update, by its number: NumPy leaves.
      oracle: Returns the same two in plain jax and optax; None where none is needed.
      expect: What is to happen.
      settings: Where it is run, at most.
      updates: How many are compared.
      wide: Whether 64-bit types are on.
      keyed: Whether the steps take a random key.
      drive: Who cuts microbatches and joins updates: `compile(accumulate=)`, a loop of
        one's own that hands over one microbatch per call, a reader that pads what is
        uneven, `compile(steps_per_call=)`, or `compile` anew after each update, with
        the state as a file has it.
      options: Of the `Replicator`.
      meets: Whether examples meet in a collective: a warning is due where there are
        several microbatches.
      prepare: What is done to the placed state before the first update.
      around: What all of it runs in, the oracle excepted.
    """

    name: str
    ours: Callable[..., Parts]
    batch: Callable[[int], Mapping[str, Any]]
    oracle: Callable[[Setting], Parts] | None = None
    expect: Same | Refused | Warned = Same()
    settings: tuple[Setting, ...] = ALL
    updates: int = 3
    wide: bool = True
    keyed: bool = False
    drive: Literal["compile", "own", "padded", "joined", "resumed"] = "compile"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meets: bool = False
    prepare: Callable[[PyTree], PyTree] = lambda state: state
    around: Callable[[], AbstractContextManager] = nullcontext


def plain(
    tx: Any, *, skip_nonfinite: bool = False, loss_scale: Any = None, **options: Any
) -> Any:
    """Stand for `wrap_optimizer` in an oracle: nothing to reduce, all else by hand."""
    del options
    if not skip_nonfinite and loss_scale is None:
        return tx
    return _scaled(optax.with_extra_args_support(tx), loss_scale)


def _scaled(tx: Any, loss_scale: Any) -> optax.GradientTransformation:
    """Unscale gradients; leave out, and count, an update that is not finite."""

    def wide(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree
        )

    def init(params):
        state = {"inner": tx.init(wide(params)), "skipped": jnp.zeros((), jnp.int32)}
        if loss_scale is None:
            return state
        scale = {"value": jnp.float32(loss_scale.initial), "good": jnp.int32(0)}
        return state | {"scale": scale}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = state["scale"]["value"] if "scale" in state else 1.0
        unscaled = jax.tree.map(lambda g: g / factor, wide(grads))
        finite = jnp.all(
            jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(unscaled)])
        )
        updates, inner = tx.update(unscaled, state["inner"], wide(params))
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), inner, state["inner"]
        )
        skipped = state["skipped"] + jnp.where(finite, 0, 1).astype(jnp.int32)
        after = {"inner": kept, "skipped": skipped}
        if "scale" in state:
            after["scale"] = _rescaled(state["scale"], finite, loss_scale)
        updates = jax.tree.map(
            lambda u, g: jnp.where(finite, u, 0).astype(g.dtype), updates, grads
        )
        return updates, after

    transform: Any = update  # optax types states more narrowly than it treats them
    return optax.GradientTransformation(init, transform)


def _rescaled(scale: PyTree, finite: Any, rule: Any) -> PyTree:
    good = jnp.where(finite, scale["good"] + 1, 0)
    grow = good == rule.growth_interval
    value = jnp.where(grow, scale["value"] * rule.factor, scale["value"])
    value = jnp.where(finite, value, scale["value"] / rule.factor)
    return {"value": value, "good": jnp.where(grow, 0, good)}


def pair(make: Callable, ours: Callable, oracle: Callable) -> dict[str, Any]:
    """Fill in `ours` and `oracle` from an `init_fn` that both share.

    Args:
      make: `make(wrap)` returns `init_fn` and whatever optimizers the steps need.
      ours: `ours(*optimizers)` returns the replicated step.
      oracle: `oracle(setting, *optimizers)` returns the plain one.
    """

    def of_replicator(rep: Replicator, setting: Setting) -> Parts:
        del setting
        init, *optimizers = make(rep.wrap_optimizer)
        return init, ours(*optimizers)

    def of_oracle(setting: Setting) -> Parts:
        init, *optimizers = make(plain)
        return init, oracle(setting, *optimizers)

    return {"ours": of_replicator, "oracle": of_oracle}

"""Explain errors of Python and flax in a user's function of one replica."""

import contextlib
import re
from collections.abc import Iterator

import jax

from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree
from replicator.errors import StateError

_MOST = 20
# Errors of Python and JAX for `batch["x"]` if the batch is a tuple, or an array.
_LOOK_UP = re.compile(
    "indices must be integers|not subscriptable|is not valid as|string indexing"
)


@contextlib.contextmanager
def names_noted(state: PyTree, batch: PyTree) -> Iterator[None]:
    """List the arguments of a function of one replica on a failed look-up.

    Args:
      state: Its state, whose own keys are listed, not those below.
      batch: Its batch, whose leaves are listed with one replica's shapes.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, NameError) as failure:
        if not _is_look_up(failure, state, batch):
            raise
        leaves = [
            f"`{path}` {describe(leaf)}" if path else describe(leaf)
            for path, leaf in named_leaves(batch)
        ]
        name = "an array" if hasattr(batch, "shape") else f"a `{type(batch).__name__}`"
        kind = "" if isinstance(batch, dict) else f" is {name} and"
        failure.add_note(f"The batch of one replica{kind} holds {_listed(leaves)}.")
        if isinstance(state, dict):
            keys = [f"`{key}`" for key in state]
            failure.add_note(f"The state holds {_listed(keys)}. Use one of these.")
        raise


def _is_look_up(failure: Exception, state: PyTree, batch: PyTree) -> bool:
    """Return whether a step looked up a name that its arguments could have."""
    match failure:
        case KeyError():
            return True
        case NameError():
            names = [each for each in (state, batch) if isinstance(each, dict)]
            return any(failure.name in each for each in names)
        case AttributeError():
            return isinstance(failure.obj, dict)
    return _LOOK_UP.search(str(failure)) is not None


@contextlib.contextmanager
def explained(state: PyTree, batch: PyTree) -> Iterator[None]:
    """Explain what fails in a function of one replica: see the others of this file.

    Args:
      state: Its state.
      batch: Its batch.
    """
    with modules_explained(), names_noted(state, batch):
        try:
            yield
        except (TypeError, ValueError, IndexError) as failure:
            if note := _note(failure):
                failure.add_note(note)
            raise


def _note(failure: Exception) -> str | None:
    """Return what to do about an error of JAX, optax or flax in a step."""
    if isinstance(failure, jax.errors.UnexpectedTracerError):
        return "Return values from the step, as metrics; do not keep them outside."
    if isinstance(failure, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        return _TRACED
    return next((note for text, note in _NOTES.items() if text in str(failure)), None)


_TRACED = (
    "Values are traced in a step: branch by `jnp.where` or `lax.cond`. To see them, "
    "compile the step with `debug=True`."
)
_NOTES = {
    "'OptimizerState'": "It is the state of a wrapped optimizer: call the `update` of "
    "`rep.wrap_optimizer(tx)`, not that of `tx`.",
    "grad requires real": "Differentiate by floats alone; of a module of flax NNX, "
    "which counts its random keys, by `replicator.nnx.value_and_grad`.",
    "pytree structure error": "Both trees must have the same structure: compare "
    "`jax.tree.structure(tree)` of each.",
}


@contextlib.contextmanager
def modules_explained() -> Iterator[None]:
    """Raise our own error in place of flax's about a module that a step writes to.

    Raises:
      StateError: The step wrote to a module that is not its own.
    """
    try:
        yield
    except Exception as failure:
        if "different trace level" not in str(failure):
            raise
        why = re.split(" \\(http|, got ", str(failure))[0]
        raise StateError(
            "`step_fn` must return a changed module in the state, got a write to one "
            f"that is not its own ({why}). Keep `model` in the state, and write:"
            f"{_MODULE_STEP}"
        ).with_traceback(failure.__traceback__) from None


_MODULE_STEP = """
    (loss, model), grads = replicator.nnx.value_and_grad(loss_fn)(state["model"], batch)
    updates, opt = optimizer.update(grads, state["opt"], params_of(model))
    model = with_params(model, optax.apply_updates(params_of(model), updates))
    return {"model": model, "opt": opt}, {"loss": loss}"""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return (", ".join(names[:_MOST]) or "nothing") + more

"""Add to a failed look-up the names that exist: leaves of a batch, keys of a state."""

import contextlib
import re
from collections.abc import Iterator

from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree

_MOST = 20
# Errors of Python and JAX for `batch["x"]` if the batch is a tuple, or an array.
_LOOK_UP = re.compile(r"indices must be integers|not subscriptable|is not valid as")


@contextlib.contextmanager
def names_noted(state: PyTree, batch: PyTree) -> Iterator[None]:
    """List the arguments of a function of one replica on a failed look-up.

    Args:
      state: Its state, whose own keys are listed, not those below.
      batch: Its batch, whose leaves are listed with one replica's shapes.
    """
    try:
        yield
    except (KeyError, TypeError) as failure:
        if isinstance(failure, TypeError) and not _LOOK_UP.search(str(failure)):
            raise
        leaves = [
            f"`{path}` {describe(leaf)}" if path else describe(leaf)
            for path, leaf in named_leaves(batch)
        ]
        kind = "" if isinstance(batch, dict) else f" is a `{type(batch).__name__}` and"
        failure.add_note(f"The batch of one replica{kind} holds {_listed(leaves)}.")
        if isinstance(state, dict):
            keys = [f"`{key}`" for key in state]
            failure.add_note(f"The state holds {_listed(keys)}.")
        raise


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return (", ".join(names[:_MOST]) or "nothing") + more

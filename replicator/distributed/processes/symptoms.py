"""Read from its last lines why a process failed: because of a peer, or for good.

When a process dies, the collectives of its peers fail within milliseconds, and each
peer has an error of its own. Only its text shows that it is not the cause. Other errors
would come again: a run goes on bit for bit, also into the same NaN.
"""

import re
from collections.abc import Sequence

_PEER_IS_GONE = re.compile(
    rb"Gloo \S+ failed"
    rb"|JAX distributed service detected fatal errors"
    rb"|Failed to send RPC to coordination service"
    rb"|(closed|reset) by peer"
    rb"|remote process exited"  # NCCL
    rb"|but one has died or left"  # agreement.py
)
_COMES_AGAIN = re.compile(
    rb"^replicator\.errors\.(NonFiniteError|SpikeError): "
    rb"|must be joined by each process"
)


def is_symptom(last_lines: Sequence[bytes]) -> bool:
    """Return whether a process failed because a peer is gone.

    Args:
      last_lines: Last lines of its standard error.

    >>> is_symptom([b"Gloo AllReduce failed: Connection reset by peer"])
    True
    """
    return any(_PEER_IS_GONE.search(line) for line in last_lines)


def comes_again(last_lines: Sequence[bytes]) -> bool:
    """Return whether a process would fail the same way if it were started again.

    Args:
      last_lines: Last lines of its standard error.

    >>> comes_again([b"replicator.errors.NonFiniteError: `loss` must be finite."])
    True
    """
    return any(_COMES_AGAIN.search(line) for line in last_lines)

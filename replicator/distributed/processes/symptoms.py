"""Tell by its last words why a process failed: for another, or for good.

When a process dies, the collectives of its peers fail within milliseconds, and each
peer has an error of its own. Only its text says that it is not the cause. Other errors
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
    rb"|must be joined by each process that `replicator launch` starts"
)


def is_symptom(last_words: Sequence[bytes]) -> bool:
    """Return whether a process's last words say that a peer is gone.

    Args:
      last_words: The last lines of its standard error.
    """
    return any(_PEER_IS_GONE.search(line) for line in last_words)


def comes_again(last_words: Sequence[bytes]) -> bool:
    """Return whether a process's last words say that to start it again is of no use.

    Args:
      last_words: The last lines of its standard error.
    """
    return any(_COMES_AGAIN.search(line) for line in last_words)

"""Tell a process that failed from one that fell because another had failed.

When a process dies, the collectives of its peers fail within milliseconds, and each
peer has an error of its own. Only its text says that it is not the cause.
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


def is_symptom(last_words: Sequence[bytes]) -> bool:
    """Return whether a process's last words say that a peer is gone.

    Args:
      last_words: The last lines of its standard error.
    """
    return any(_PEER_IS_GONE.search(line) for line in last_words)

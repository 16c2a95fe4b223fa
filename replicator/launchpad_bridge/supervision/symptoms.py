"""Tell a node that failed from one that fell because another one had.

When a node dies, calls to it fail within milliseconds, and each caller has an error of
its own. Who is noticed first is luck: what kind of error it is says who is the cause.
"""

from replicator.errors import (
    CallCancelledError,
    ConnectionLostError,
    RemoteError,
    ServerStoppedError,
)

_PEER_IS_GONE = (CallCancelledError, ConnectionLostError, ServerStoppedError)
_NAMES = frozenset(cls.__name__ for cls in _PEER_IS_GONE)
_LONGEST_CHAIN = 32


def is_symptom(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, says that another node is gone.

    Args:
      error: What a node raised, here or in another process.
    """
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return False
        if isinstance(error, _PEER_IS_GONE):
            return True
        if isinstance(error, RemoteError) and error.type_name in _NAMES:
            return True
        error = error.__cause__
    return False

"""`lp.batched_handler`: `rpc.batched_handler` with Launchpad's arguments."""

import datetime
from collections.abc import Callable
from typing import Any

from replicator.rpc.batching.batching import BatchedHandler
from replicator.rpc.batching.batching import batched_handler as rpc_batched_handler


def batched_handler(
    batch_size: int,
    max_parallelism: int = 1,
    timeout: float | datetime.timedelta = 0.2,
    pad_batch: bool = False,
    *,
    isolate_errors: bool = True,
) -> Callable[[Callable[..., Any]], BatchedHandler]:
    """Let up to `batch_size` concurrent calls of a method be one call of it.

    Arrays get a new first axis, numbers become arrays, all else lists; the result is
    split over the callers. Give the node as many threads as a batch has calls:
    `courier_kwargs={"thread_pool_size": batch_size}`.

    Args:
      batch_size: Number of calls in a full batch, which runs at once.
      max_parallelism: Number of batches that may run at the same time.
      timeout: Longest wait of a batch for more calls: seconds, or a `timedelta`.
      pad_batch: Repeat the first call up to `batch_size`: one shape, one compilation.
      isolate_errors: When the function raises, call it again with each call alone.

    Returns:
      A decorator of a method in a class, or wrapper of a bound one in a constructor.

    Raises:
      ArgumentError: A number is out of range.
    """
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    return rpc_batched_handler(
        batch_size,
        max_parallelism=max_parallelism,
        timeout_s=timeout,
        pad_batch=pad_batch,
        isolate_errors=isolate_errors,
    )

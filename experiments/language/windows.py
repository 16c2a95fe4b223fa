"""Cut one long sequence of tokens into windows: shuffled to train, in order to test."""

from collections.abc import Iterator

import grain
import numpy as np

from experiments.pipeline_batches import pipeline_batches
from replicator.errors import ArgumentError, check_whole
from replicator.inputs import InputContext


def train_input_fn(
    context: InputContext,
    tokens: np.ndarray,
    *,
    global_batch: int,
    length: int,
    seed: int,
) -> grain.IterDataset:
    """Yield full batches for ever: windows, shuffled anew in each epoch.

    Args:
      context: Which pipeline reads.
      tokens: More than a window.
      global_batch: Windows per update.
      length: Tokens that are predicted in each.
      seed: Of the order.

    Returns:
      An endless dataset of {"tokens": int32 [b, length + 1], "mask": float32
      [b, length]}; the latter is 0 where the last window of the text is filled up.

    Raises:
      ArgumentError: There are fewer tokens than in a window.
    """
    windows = grain.MapDataset.source(_Windows(tokens, length)).seed(seed).shuffle()
    return pipeline_batches(windows.repeat(), context, global_batch=global_batch)


def held_out_batches(
    tokens: np.ndarray, *, batch: int, length: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield windows that predict each token once, but the first.

    Windows overlap by half: what is predicted has that much before it.

    Args:
      tokens: More than a window.
      batch: Windows at a time; the last are fewer.
      length: Tokens before and after which a window ends.

    Yields:
      {"tokens": int32 [b, length + 1], "mask": float32 [b, length]}; the latter is 1
      where a token is counted.

    Raises:
      ArgumentError: There are fewer tokens than in a window.
    """
    _check_length(tokens, length)
    last = len(tokens) - length - 1
    starts = [*range(0, last, length // 2), last]
    seen, rows = 1, []
    for start in starts:
        counted = np.arange(start + 1, start + length + 1) >= seen
        rows.append((tokens[start : start + length + 1], counted))
        seen = start + length + 1
        if len(rows) == batch or start == last:
            cut, counts = map(np.stack, zip(*rows, strict=True))
            yield {"tokens": cut.astype(np.int32), "mask": counts.astype(np.float32)}
            rows = []


class _Windows:
    """Tokens as windows side by side, each with the token before it."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        _check_length(tokens, length)
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // self._length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._length
        window = self._tokens[start : start + self._length + 1].astype(np.int32)
        missing = self._length + 1 - len(window)
        counts = np.arange(self._length) < self._length - missing
        return {
            "tokens": np.pad(window, (0, missing)),
            "mask": counts.astype(np.float32),
        }


def _check_length(tokens: np.ndarray, length: int) -> None:
    check_whole("length", length)
    if not 2 <= length < len(tokens):
        raise ArgumentError(
            f"`length` must be at least 2 and below the {len(tokens)} tokens of the "
            f"text, got {length}. Use 128, and more text."
        )

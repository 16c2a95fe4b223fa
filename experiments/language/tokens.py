"""Byte-level byte pairs: a tokenizer trained or read, and documents packed by it.

Sennrich et al. 2016, §3.2, over bytes (Radford et al. 2019, §2.2). Install the extra
`lm`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from replicator.errors import ArgumentError

# What stands between documents: of GPT-2, Llama 3, Llama 2.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
_LEAST = 257  # all bytes, and the end of a text
_AT_ONCE = 1024  # documents


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train a tokenizer on documents.

    Args:
      documents: Text to train on.
      vocabulary: Number of tokens, the end of a text included; fewer if the text has no
        more pairs.

    Raises:
      ArgumentError: The vocabulary has no room for all bytes.
    """
    if vocabulary < _LEAST:
        raise ArgumentError(
            f"`--vocabulary` must be at least {_LEAST}, all bytes and the end of a "
            f"text, got {vocabulary}. Use {_LEAST} or more."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_ENDS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def read_tokenizer(path: Path, *, flag: str = "tokenizer") -> Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
      ArgumentError: There is none, or it cannot be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain ones
        raise ArgumentError(
            f"`--{flag}` must hold a tokenizer of the library `tokenizers`, got "
            f"{path}: {error}. Save one by `Tokenizer.save`."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse a tokenizer that is not of a model's size.

    Raises:
      ArgumentError: It has more tokens than the model, or fewer.
    """
    if (size := tokenizer.get_vocab_size()) != vocabulary:
        raise ArgumentError(
            f"`tokenizer.json` must have {vocabulary} tokens, as the model has, got "
            f"{size}. Use the one that the model was trained with."
        )


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the token that stands between documents.

    Raises:
      ArgumentError: The tokenizer has none.
    """
    known = (tokenizer.token_to_id(end) for end in _ENDS)
    if (found := next((each for each in known if each is not None), None)) is None:
        raise ArgumentError(
            f"`tokenizer.json` must have one of {', '.join(_ENDS)}, got none. Add one "
            "to its special tokens."
        )
    return found


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Return the tokens of all documents, int32 [n], the end of a text before each."""
    end, parts = end_of_text(tokenizer), []
    for start in range(0, len(documents), _AT_ONCE):
        some = list(documents[start : start + _AT_ONCE])
        for found in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            parts.append(np.asarray([end, *found.ids], np.int32))
    return np.concatenate(parts)

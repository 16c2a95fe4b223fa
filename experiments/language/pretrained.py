"""Read and write models in the files that others use: safetensors and two of JSON.

`config.json`, `tokenizer.json`, and `model.safetensors` or several files with an index,
as `transformers` of Hugging Face reads and writes them, in the layouts of
`experiments/language/layouts.py`. Install the extra `lm`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from experiments.language.layouts import arguments_of, config_of, layout_of
from experiments.language.tokens import end_of_text
from models.transformer import Transformer
from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.nnx import params_of

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBERED = "model-{:05d}-of-{:05d}.safetensors"
_NAMED = 3  # tensors that a message lists
# What is computed, or the same as another, and in the files of some versions.
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def read_arguments(directory: Path) -> dict[str, Any]:
    """Return the arguments of `Transformer` for the model in a folder.

    Raises:
      ArgumentError: It has no `config.json`, or that of another kind of model.
    """
    try:
        return arguments_of(json.loads((directory / CONFIG).read_text()))
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise ArgumentError(
            f"`--init_from` must be a folder with a whole {CONFIG}, got {directory}: "
            f"{error}. Name one that `save_pretrained` or `--export` wrote."
        ) from error


def read_params(directory: Path, model: Transformer) -> PyTree:
    """Read the weights of a model.

    Args:
      directory: With one file of safetensors, or several and their index.
      model: Of the same arguments; shapes will do (`nnx.eval_shape`).

    Returns:
      NumPy arrays in float32, named as by `params_of`.

    Raises:
      ArgumentError: There are no weights, or those of another model.
    """
    files = _files_in(directory)
    expected = dict(layout_of(model).parts(model))
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, np.float32), params_of(model)
    )
    shapes: dict[str, list[int]] = {}
    for path in files:
        with safe_open(path, framework="np") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    names = {_standard(name, expected): name for name in shapes}
    wanted = {name: list(part.take(params).shape) for name, part in expected.items()}
    _require_same({name: shapes[own] for name, own in names.items()}, wanted, directory)
    for path in files:
        with safe_open(path, framework="np") as file:
            for own in file.keys():  # noqa: SIM118
                if part := expected.get(_standard(own, expected)):
                    part.put(params, file.get_tensor(own))
    return params


def require_new(directory: Path) -> None:
    """Refuse a folder that holds a model, or anything else.

    Raises:
      ArgumentError: It does.
    """
    if directory.exists() and (directory.is_file() or any(directory.iterdir())):
        raise ArgumentError(
            f"`--export` must be a folder that is empty or not there, got {directory}, "
            "which holds files. Name another, or remove it."
        )


def write_model(
    model: Transformer,
    directory: Path,
    *,
    tokenizer: Tokenizer | None = None,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write a model, whole or not at all.

    Args:
      model: Its arrays may lie in pieces on the devices of this process.
      directory: Empty, or not there.
      tokenizer: Written beside it; None writes none.
      file_bytes: Bytes of weights after which another file begins.

    Raises:
      ArgumentError: The folder is not empty, or no layout holds the model.
      OSError: The files cannot be written.
    """
    require_new(directory)
    end = None if tokenizer is None else end_of_text(tokenizer)
    config, params = config_of(model, end=end), jax.device_get(params_of(model))
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files: list[dict[str, np.ndarray]] = [{}]
    for name, part in layout_of(model).parts(model):
        tensor = np.ascontiguousarray(part.take(params))
        if files[-1] and _bytes_of(files[-1]) + tensor.nbytes > file_bytes:
            files.append({})
        files[-1][name] = tensor
    (partial / CONFIG).write_text(json.dumps(config, indent=2))
    _write_weights(partial, files)
    for path in partial.glob("*.safetensors"):
        shutil.copymode(partial / CONFIG, path)  # which its library lets no other read
    if tokenizer is not None:
        tokenizer.save(str(partial / TOKENIZER))
    os.replace(partial, directory)


def _write_weights(directory: Path, files: list[dict[str, np.ndarray]]) -> None:
    # Readers that use torch look for the format.
    about = {"format": "pt"}
    if len(files) == 1:
        save_file(files[0], directory / _WEIGHTS, about)
        return
    places: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = _NUMBERED.format(number, len(files))
        save_file(tensors, directory / name, about)
        places |= dict.fromkeys(tensors, name)
    index = {
        "metadata": {"total_size": sum(map(_bytes_of, files))},
        "weight_map": places,
    }
    (directory / _INDEX).write_text(json.dumps(index, indent=2))


def _bytes_of(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _files_in(directory: Path) -> list[Path]:
    if (index := directory / _INDEX).exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
    else:
        names = {_WEIGHTS}
    files = [directory / name for name in sorted(names)]
    if missing := [path.name for path in files if not path.exists()]:
        raise ArgumentError(
            f"`--init_from` must be a folder with weights, got {directory} without "
            f"{missing[0]}. Copy all of its files."
        )
    return files


def _standard(name: str, expected: Mapping[str, Any]) -> str:
    """Return a tensor's name with the prefix that some files leave out."""
    prefixed = f"transformer.{name}"
    return prefixed if prefixed in expected else name


def _require_same(
    found: Mapping[str, list[int]], wanted: Mapping[str, list[int]], directory: Path
) -> None:
    problems = [f"`{name}` is missing" for name in wanted if name not in found]
    for name, shape in found.items():
        if name not in wanted:
            if not name.endswith(_NOT_WEIGHTS) and name != "lm_head.weight":
                problems.append(f"`{name}` is unknown")
        elif shape != wanted[name]:
            problems.append(f"`{name}` has shape {shape}, not {wanted[name]}")
    if problems:
        more = len(problems) - _NAMED
        listed = ", ".join(problems[:_NAMED]) + (
            f" and {more} more" if more > 0 else ""
        )
        raise ArgumentError(
            f"`--init_from` must hold the weights of its {CONFIG}, got others in "
            f"{directory}: {listed}. Use files that were saved together."
        )

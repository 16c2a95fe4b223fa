"""Hold the decoder against `transformers`, and its files against their own bits.

    python -m benchmarks.weights

For each kind of model in `kept`, which `make_kept.py` made once: logits of its weights
against the kept ones; and these weights written again, in one file and in several,
whole and cut by fsdp over eight devices. The last line is one JSON object; `failures`
counts logits that differ by more than 1e-4, and files with another bit.
"""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

import replicator
from experiments.language import pretrained
from models.transformer import Transformer
from replicator import strategies
from replicator.nnx import with_params

KEPT = Path(__file__).parent / "kept"
TOLERANCE = 1e-4
_DEVICES = 8
_ONE_FILE, _SEVERAL = 10**9, 4000  # bytes


def read_model(directory: Path) -> Transformer:
    """Return the model in a folder."""
    arguments = pretrained.read_arguments(directory)
    model = Transformer(**arguments, rngs=nnx.Rngs(0))
    return with_params(model, pretrained.read_params(directory, model))


def tensors_in(directory: Path) -> Mapping[str, np.ndarray]:
    """Return all tensors of a model's files, by their names."""
    files = map(load_file, sorted(directory.glob("model*.safetensors")))
    return dict(itertools.chain.from_iterable(each.items() for each in files))


def same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Return whether two sets of tensors have the same names, shapes and bits."""
    return one.keys() == other.keys() and all(
        each.shape == other[name].shape and each.tobytes() == other[name].tobytes()
        for name, each in one.items()
    )


def logit_difference(directory: Path, model: Transformer) -> float:
    """Return the largest difference from the kept logits."""
    kept = load_file(directory / "values.safetensors")
    return float(np.abs(jax.jit(model)(kept["tokens"]) - kept["logits"]).max())


def changed_files(directory: Path, model: Transformer) -> Iterator[str]:
    """Yield the ways of writing a model that do not give the same bits again."""
    rep = replicator.Replicator(strategy=strategies.fsdp(whole_below_bytes=0))
    models = {"whole": model, "cut": rep.put({"model": model})["model"]}
    kept = tensors_in(directory)
    for how, size in itertools.product(models, (_ONE_FILE, _SEVERAL)):
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "model"
            pretrained.write_model(models[how], written, file_bytes=size)
            again = pretrained.read_params(written, model)
            whole = with_params(model, again)
            pretrained.write_model(whole, Path(folder) / "again")
            if not same_bits(tensors_in(written), kept):
                yield f"{how}, {size} bytes a file: other bits out"
            if not same_bits(tensors_in(Path(folder) / "again"), kept):
                yield f"{how}, {size} bytes a file: other bits in"


def main() -> None:
    began, failures, differences = time.monotonic(), 0, []
    if "REPLICATOR_FAKE_DEVICES" not in os.environ:
        replicator.fake_devices(_DEVICES)
    for directory in sorted(path for path in KEPT.iterdir() if path.is_dir()):
        model = read_model(directory)
        differences.append(logit_difference(directory, model))
        changed = list(changed_files(directory, model))
        failures += len(changed) + (not differences[-1] <= TOLERANCE)
        shown = "; ".join(changed) or "bits as they were"
        print(f"{directory.name}: logits differ by {differences[-1]:.1e}; {shown}")
    found = {
        "failures": failures,
        "kinds": len(differences),
        "largest_difference": max(differences),
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Encode the shards of zarr arrays, and read regions of them, by TensorStore.

The arrays are zarr 3 with the codec `sharding_indexed`; each chunk and each index of a
shard has a CRC-32C, so that a flipped bit raises. Between chunks and index, where no
reader of zarr looks, is a mark of the shard's place: a file of another place is not
taken for it. A shard is encoded in memory and written by the caller, who thus knows its
bytes: to a disk or to a bucket alike.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replicator.base.host.strict_json import strict_json
from replicator.checkpoint.pieces.grid import Box, Shape, cells, whole_box
from replicator.checkpoint.pieces.plan import StoredArray

METADATA_NAME = "zarr.json"
GROUP = strict_json({"zarr_format": 3, "node_type": "group", "attributes": {}})
"""Content of the file that makes a folder of arrays a group of zarr."""

_STORED = frozenset(
    (
        *("bool", "int2", "int4", "int8", "uint8", "int16", "uint16", "int32"),
        *("uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128", "float4_e2m1fn", "float8_e3m4"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"),
        "float8_e5m2fnuz",
    )
)
_MISREAD = re.compile(r"[\\\ud800-\udfff]")  # the last are not valid text
_numbers = itertools.count()


def stored_dtype(dtype: np.dtype) -> str:
    """Return the dtype that values are stored as: their own, or unsigned integers.

    >>> stored_dtype(np.dtype("float32"))
    'float32'
    """
    return dtype.name if dtype.name in _STORED else f"uint{8 * dtype.itemsize}"


def array_metadata(array: StoredArray, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of an array, as JSON: the content of its `zarr.json`.

    >>> array = StoredArray(name="0", dtype="int8", shape=(4,), shard=(4,), chunk=(2,))
    >>> array_metadata(array, {"path": "w"})["shape"]
    [4]
    """
    checked = [_codec("bytes", endian="little"), _codec("crc32c")]
    sharding = _codec(
        "sharding_indexed",
        chunk_shape=list(array.chunk),
        codecs=checked,
        index_codecs=checked,
        index_location="end",
    )
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype,
        "chunk_grid": _codec("regular", chunk_shape=list(array.shard)),
        "chunk_key_encoding": _codec("default", separator="."),
        "fill_value": _fill_value(array.dtype),
        "codecs": [sharding],
        "attributes": dict(attributes),
    }


def shard_name(index: Shape) -> str:
    """Return the name of a shard in the folder of its array.

    >>> shard_name((0, 3))
    'c.0.3'
    """
    return ".".join(("c", *map(str, index)))


def encode_shard(array: StoredArray, block: np.ndarray, place: str) -> bytes:
    """Return the content of a shard.

    Args:
      array: The array.
      block: Values of the shard; fewer at the array's end.
      place: Path of the shard in the checkpoint.

    Raises:
      ValueError: TensorStore cannot encode it.
    """
    alone_at = {"driver": "memory", "path": f"{next(_numbers)}/"}
    alone = StoredArray(
        name=array.name,
        dtype=array.dtype,
        shape=block.shape,
        shard=array.shard,
        chunk=array.chunk,
    )
    memory = _tensorstore().KvStore.open(alone_at, context=_context()).result()
    name = shard_name((0,) * block.ndim)
    if block.dtype.name != array.dtype:
        block = block.view(array.dtype)
    try:
        opened = _open(alone, alone_at)
        opened.write(block, can_reference_source_data_indefinitely=True).result()
        content = memoryview(memory.read(name).result().value)
    finally:
        memory.write(name, None).result()
    end = len(content) - _index_bytes(array)
    return b"".join((content[:end], _mark(place), content[end:]))


def read_nowait(
    array: StoredArray, kvstore: Mapping[str, Any], box: Box
) -> Callable[[], np.ndarray]:
    """Begin to read a region of an array; return a function that waits for it.

    Args:
      array: The array.
      kvstore: Folder of all arrays, as a specification of TensorStore.
      box: The region.

    Returns:
      A function that returns the region; it raises ValueError if a shard is missing,
      damaged, or of another place.
    """
    folder = {**kvstore, "path": f"{kvstore['path']}{array.name}/"}
    ends = _read_ends(array, folder, box)
    values = _open(array, folder)[box.within(whole_box(array.shape))].read()

    def wait() -> np.ndarray:
        region = values.result()
        for place, end in ends.items():
            if not end.result().value.startswith(_mark(place)):
                raise ValueError(f"`{place}` is a shard of another place")
        return region

    return wait


def problem(failure: Exception) -> str:
    """Return an error of TensorStore without the request in it.

    >>> problem(ValueError("DATA_LOSS: digest mismatch [source locations='a']"))
    'DATA_LOSS: digest mismatch'
    """
    return re.split(r" \[(?:tensorstore_spec|source locations)=", str(failure))[0]


@contextlib.contextmanager
def file_kvstore(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a folder of the file system as a specification of TensorStore.

    It takes a backslash for a slash, and no path that is not valid text: for these a
    link stands in.
    """
    path = path.absolute()
    with contextlib.ExitStack() as stack:
        if _MISREAD.search(str(path)):
            usual = tempfile.gettempdir()
            place = "/tmp" if _MISREAD.search(usual) else usual
            made = tempfile.TemporaryDirectory(prefix="replicator-", dir=place)
            link = Path(stack.enter_context(made), "checkpoint")
            link.symlink_to(path.parent)
            path = link / path.name
        yield {"driver": "file", "path": f"{path}/"}


def _read_ends(
    array: StoredArray, folder: Mapping[str, Any], box: Box
) -> dict[str, Any]:
    """Begin to read mark and index of each shard that meets a region, by its place."""
    files = _tensorstore().KvStore.open(dict(folder), context=_context()).result()
    end = slice(-len(_mark("")) - _index_bytes(array), None)
    names = [shard_name(index) for index, _ in cells(box, array.shard)]
    place = "/".join(folder["path"].split("/")[-3:-1])
    return {f"{place}/{name}": files.read(name, byte_range=end) for name in names}


def _mark(place: str) -> bytes:
    return hashlib.blake2b(place.encode(), digest_size=16).digest()


def _index_bytes(array: StoredArray) -> int:
    """Return the size of a shard's index: two numbers for each chunk, and a CRC."""
    chunks = (a // b for a, b in zip(array.shard, array.chunk, strict=True))
    return 16 * math.prod(chunks) + 4


def _open(array: StoredArray, kvstore: Mapping[str, Any]) -> Any:
    spec = {
        "driver": "zarr3",
        "kvstore": dict(kvstore),
        "metadata": array_metadata(array, {}),
        # Zeros are stored as other values are, so that a shard that is missing raises.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    # With the metadata given, no file of it is read: no process waits for another.
    arguments = {"open": True, "assume_metadata": True, "context": _context()}
    return _tensorstore().open(spec, **arguments).result()


def _codec(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


def _fill_value(dtype: str) -> Any:
    if dtype == "bool":
        return False
    return [0, 0] if dtype.startswith("complex") else 0


@functools.cache
def _context() -> Any:
    # Without a cache: memory must not grow from save to save.
    return _tensorstore().Context({"cache_pool": {"total_bytes_limit": 0}})


def _tensorstore() -> Any:
    """Return the module; runs without checkpoints never load it."""
    import tensorstore

    return tensorstore

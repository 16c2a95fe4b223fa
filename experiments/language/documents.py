"""Read documents: files of a folder, a dataset of Hugging Face on disk, or records.

About one in twenty is held out, by a hash of its name or place, so that it stays on its
side when others come; or all of another folder is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import grain

from experiments.stdlib_text import is_held_out, read_files
from replicator.errors import ArgumentError

Source = Literal["files", "hf", "grain"]

_COLUMN = "text"


def read_documents(
    text: str, *, source: Source, held_out: str = ""
) -> tuple[list[str], list[str]]:
    """Read all documents.

    Args:
      text: Folder or file; Python's standard library if empty.
      source: `"files"` of UTF-8 in a folder; `"hf"`: what `save_to_disk` of Hugging
        Face's `datasets` wrote, its column `text`; `"grain"`: ArrayRecord files, whose
        records are UTF-8.
      held_out: Folder or file of the same kind that is held out whole; if empty, some
        documents of `text` are.

    Returns:
      Documents to train on, and those that are held out.

    Raises:
      ArgumentError: There is no text for one of the two, or a file is not UTF-8.
      ImportError: `datasets` is needed, and not installed.
    """
    if not text:
        train, test = read_files()
        return _decoded(train), _decoded(test)
    read = _READERS[source]
    named = list(_not_empty("text", text, read))
    if held_out:
        test = [each for _, each in _not_empty("held_out", held_out, read)]
        return [each for _, each in named], test
    parts: tuple[list[str], list[str]] = ([], [])
    for name, each in named:
        parts[is_held_out(name)].append(each)
    if not all(parts):
        raise ArgumentError(
            "`--held_out` must name text to test on where `--text` has few documents, "
            f"got '' for {len(named)} in {text}. Name a folder."
        )
    return parts


def _decoded(files: Iterable[bytes]) -> list[str]:
    return [file.decode(errors="replace") for file in files]


def _not_empty(
    flag: str, place: str, read: Callable[[Path], Iterator[tuple[str, str]]]
) -> Iterator[tuple[str, str]]:
    found = False
    for name, text in read(Path(place)):
        if text.strip():
            found = True
            yield name, text
    if not found:
        raise ArgumentError(
            f"`--{flag}` must hold text, got {place}, where none was found. Name a "
            "folder with files of UTF-8, or see `--source`."
        )


def _files(root: Path) -> Iterator[tuple[str, str]]:
    paths = [root] if root.is_file() else sorted(root.rglob("*"))
    for path in paths:
        name = path.relative_to(root.parent if root.is_file() else root).as_posix()
        if not path.is_file() or "/." in f"/{name}":
            continue
        try:
            yield name, path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ArgumentError(
                f"`--text` must be files of UTF-8, got {path}. Move it elsewhere."
            ) from error


def _dataset(root: Path) -> Iterator[tuple[str, str]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise ImportError(
            "`--source=hf` must have datasets, got none installed. "
            "Run `pip install 'jax-replicator[hf]'`."
        ) from missing
    try:
        found: Any = datasets.load_from_disk(str(root))
    except FileNotFoundError:
        return
    if isinstance(found, dict):
        raise ArgumentError(
            f"`--text` must be one split of a dataset, got {root} with "
            f"{', '.join(found)}. Use {root / next(iter(found))}."
        )
    if _COLUMN not in found.column_names:
        raise ArgumentError(
            f"`--text` must be a dataset with a column `{_COLUMN}`, got {root} with "
            f"{', '.join(found.column_names)}. Rename one by `rename_column`."
        )
    for index, row in enumerate(found):
        yield str(index), row[_COLUMN]


def _records(root: Path) -> Iterator[tuple[str, str]]:
    paths = [root] if root.is_file() else sorted(root.glob("*.array_record*"))
    if paths:
        names = [str(path) for path in paths]
        records: Any = grain.sources.ArrayRecordDataSource(names)
        for index in range(len(records)):
            yield str(index), records[index].decode()


_READERS: Mapping[Source, Callable[[Path], Iterator[tuple[str, str]]]] = {
    "files": _files,
    "hf": _dataset,
    "grain": _records,
}

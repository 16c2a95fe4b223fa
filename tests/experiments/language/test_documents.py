import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from experiments.language.documents import read_documents
from experiments.stdlib_text import is_held_out
from replicator.errors import ArgumentError

TEXTS = [f"document {number}" for number in range(60)]


def files(folder):
    for number, text in enumerate(TEXTS):
        (folder / "part").mkdir(exist_ok=True)
        (folder / "part" / f"{number}.txt").write_text(text)
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "empty.txt").write_text(" \n")


def records(folder):
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()


def dataset(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder))


KINDS = {"files": files, "grain": records, "hf": dataset}


@pytest.mark.parametrize("source", KINDS)
def test_every_document_is_either_learned_or_held_out(source, tmp_path):
    KINDS[source](tmp_path)
    train, held_out = read_documents(str(tmp_path), source=source)
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 0 < len(held_out) < len(train)


@pytest.mark.parametrize("source", KINDS)
def test_a_folder_of_its_own_is_held_out_whole(source, tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        KINDS[source](tmp_path / name)
    train, held_out = read_documents(
        str(tmp_path / "train"), source=source, held_out=str(tmp_path / "test")
    )
    assert sorted(train) == sorted(held_out) == sorted(TEXTS)


@pytest.mark.slow
def test_without_a_folder_it_is_the_standard_library():
    train, held_out = read_documents("", source="files")
    assert any("class ArgumentParser" in text for text in [*train, *held_out])


@pytest.mark.parametrize("source", KINDS)
def test_a_folder_without_text_is_refused(source, tmp_path):
    if source == "hf":
        pytest.importorskip("datasets")
    with pytest.raises(ArgumentError, match=r"^`--text` must hold text, got .*found"):
        read_documents(str(tmp_path), source=source)


def test_too_few_documents_to_hold_some_out_are_refused(tmp_path):
    name = next(f"{n}.txt" for n in range(40) if not is_held_out(f"{n}.txt"))
    (tmp_path / name).write_text("one")
    with pytest.raises(ArgumentError, match=r"^`--held_out` must name text.* for 1 in"):
        read_documents(str(tmp_path), source="files")


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ArgumentError, match=r"must be files of UTF-8, got .*picture"):
        read_documents(str(tmp_path), source="files")


def test_a_dataset_of_several_splits_or_without_text_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    other = datasets.Dataset.from_dict({"body": TEXTS})
    other.save_to_disk(str(tmp_path / "other"))
    datasets.DatasetDict({"train": other}).save_to_disk(str(tmp_path / "both"))

    with pytest.raises(ArgumentError, match=r"a column `text`, got .* with body"):
        read_documents(str(tmp_path / "other"), source="hf")
    with pytest.raises(ArgumentError, match=r"one split of a dataset.*both/train"):
        read_documents(str(tmp_path / "both"), source="hf")

import numpy as np
import pytest

from experiments.stdlib_text import (
    gzip_bits,
    is_held_out,
    read_text,
    shared,
)
from replicator.errors import ArgumentError


@pytest.fixture
def sources(tmp_path):
    """Forty files, of which some are held out, and some are no sources."""
    for number in range(40):
        (tmp_path / f"m{number}.py").write_text(f"x = {number}\n")
    for name in ("tests/test_m.py", "site-packages/other.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("nothing of it is read\n")
    return tmp_path


def test_every_source_is_either_learned_or_held_out(sources):
    train, held_out = (bytes(text).decode() for text in read_text(sources))
    found = sorted((train + held_out).splitlines())

    assert found == sorted(f"x = {number}" for number in range(40))
    assert 0 < len(held_out) < len(train)


def test_a_file_stays_on_its_side_when_others_come(sources):
    _, before = read_text(sources)
    (sources / "another.py").write_text("x = 40\n")
    _, after = read_text(sources)

    assert set(bytes(before).splitlines()) <= set(bytes(after).splitlines())


@pytest.mark.parametrize(("alike", "stays"), [(20, False), (5, False), (1, True)])
def test_a_file_that_is_like_one_to_train_on_is_not_held_out(sources, alike, stays):
    common = [f"a line that two files have, number {n}\n" for n in range(20)]
    own = [f"a line that one file has, number {n}\n" for n in range(20 - alike)]
    names = [f"n{number}.py" for number in range(200)]
    out = next(name for name in names if is_held_out(name))
    (sources / out).write_text("".join(common[:alike] + own))
    learned = next(name for name in names if not is_held_out(name))
    (sources / learned).write_text("".join(common))
    train, held_out = (bytes(text) for text in read_text(sources))
    assert (common[0].encode() in held_out) == stays
    assert "".join(common).encode() in train


@pytest.mark.slow
def test_of_the_standard_library_no_file_that_is_held_out_is_one_that_is_learned():
    train, held_out = (bytes(text) for text in read_text())
    assert shared(held_out, {line.strip() for line in train.splitlines()}) < 0.1
    assert 150_000 < len(held_out) < len(train) / 10


def test_gzip_has_seen_the_end_of_what_was_learned():
    rng = np.random.default_rng(0)
    learned, other = rng.integers(256, size=(2, 4096)).astype(np.uint8)
    assert gzip_bits(learned, learned=learned) < 0.2
    assert gzip_bits(other, learned=learned) == pytest.approx(8, abs=0.1)


def test_a_directory_without_sources_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="`sources` must be a directory with"):
        read_text(tmp_path / "nowhere")

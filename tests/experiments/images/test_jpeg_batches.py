"""Decoding, cropping and batches, of JPEGs that are written for real."""

import functools

import numpy as np
import pytest
from absl import flags
from PIL import Image

from experiments.images.damaged_files import DamagedFiles
from experiments.images.jpeg_batches import JpegBatches, crop_box, images_per_s
from experiments.images.jpegs import open_jpegs
from replicator.errors import ArgumentError
from replicator.inputs import InputContext
from tests.helpers import replicated_layout
from tests.inputs.helpers import read, values

SIZE = 16
ALONE = InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "JPEG", quality=100)


@pytest.fixture
def folder(tmp_path):
    """Twelve images to train on and ten to test; image i has brightness 20 · i."""
    for split, size in (("train", 12), ("val", 10)):
        for index in range(size):
            pixels = np.full((24, 24, 3), 20 * index, np.uint8)
            save(tmp_path / split / str(index % 2) / f"{index:02}.jpg", pixels)
    return tmp_path


def batches_of(folder, *, allowed=0, **options):
    options = {"resolution": SIZE, "crop_area": 0.5, "flip": False} | options
    damaged = DamagedFiles(folder / "damaged.jsonl", allowed=allowed)
    return JpegBatches(jpegs=open_jpegs(folder), damaged=damaged, **options)


def train_batches(batches, *, steps, global_batch=12, seed=0):
    stream = iter(batches.train_input_fn(ALONE, global_batch=global_batch, seed=seed))
    return [next(stream) for _ in range(steps)]


def numbers(batch):
    """Return the numbers of the images, by their brightness."""
    return np.rint(batch["image"].mean(axis=(1, 2, 3)) / 20).astype(int).tolist()


def damage(path):
    path.write_bytes(path.read_bytes()[:200])


def test_batches_are_bytes_of_the_network_s_resolution(folder):
    (batch,) = train_batches(batches_of(folder), steps=1)

    assert (batch["image"].shape, batch["image"].dtype) == ((12, 16, 16, 3), np.uint8)
    assert (batch["label"].shape, batch["label"].dtype) == ((12,), np.int32)
    assert [number % 2 for number in numbers(batch)] == batch["label"].tolist()


def test_each_epoch_is_every_image_in_another_order(folder):
    first, second = map(numbers, train_batches(batches_of(folder), steps=2))

    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_grey_images_are_read_as_coloured_ones(folder):
    save(folder / "train" / "0" / "00.jpg", np.full((24, 24), 0, np.uint8))
    assert sorted(numbers(*train_batches(batches_of(folder), steps=1))) == list(
        range(12)
    )


@pytest.mark.parametrize("mode", ["per_host", "per_replica"])
def test_two_pipelines_yield_what_one_does(mode, folder):
    batches = batches_of(folder)
    input_fn = functools.partial(batches.train_input_fn, global_batch=8, seed=3)
    alone = values(read(input_fn, replicated_layout(1), limit=4))
    both = values(read(input_fn, replicated_layout(2), limit=4, mode=mode))

    for one, other in zip(alone, both, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])


@pytest.fixture
def parsed_flags():
    """Flags as in a command: the processes of grain read them."""
    flags.FLAGS.mark_as_parsed()
    yield
    flags.FLAGS.unparse_flags()


@pytest.mark.slow
def test_processes_decode_what_threads_do(folder, parsed_flags):
    alone = train_batches(batches_of(folder), steps=3, global_batch=8)
    apart = train_batches(batches_of(folder, workers=2), steps=3, global_batch=8)
    for one, other in zip(alone, apart, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])


def test_the_place_of_a_damaged_image_is_taken_by_the_next(folder, capsys):
    damage(folder / "train" / "1" / "05.jpg")
    batches = batches_of(folder, allowed=1)
    found = train_batches(batches, steps=3)

    expected = sorted([*({*range(12)} - {5}), 7])
    assert [sorted(numbers(batch)) for batch in found] == [expected] * 3
    assert batches.damaged.names() == [str(folder / "train" / "1" / "05.jpg")]
    assert capsys.readouterr().err.count("damaged, left out: ") == 1


def test_each_whole_test_image_counts_once(folder):
    damage(folder / "val" / "0" / "02.jpg")
    batches = batches_of(folder, allowed=1)
    found = list(batches.eval_input_fn(ALONE, global_batch=4))
    seen = [
        number
        for batch in found
        for number, weight in zip(numbers(batch), batch["mask"], strict=True)
        if weight
    ]

    assert sorted(seen) == sorted({*range(10)} - {2})
    assert sum(len(batch["mask"]) for batch in found) == 10


def test_more_damaged_images_than_allowed_are_an_error_that_names_the_last(folder):
    damage(folder / "train" / "1" / "05.jpg")
    message = (
        r"`--skip_damaged` must be at least 1, the number of damaged JPEGs so far, got "
        r"0; the last is \S+train/1/05\.jpg \(.+\)\. Mend or delete it, or allow more"
    )
    with pytest.raises(ArgumentError, match=message):
        train_batches(batches_of(folder), steps=1)


def test_a_set_that_is_all_damaged_ends_instead_of_searching(folder):
    for path in (folder / "train").rglob("*.jpg"):
        damage(path)
    with pytest.raises(ArgumentError, match="12 to train on that are all damaged"):
        train_batches(batches_of(folder, allowed=100), steps=1)


def test_a_test_sees_the_middle(folder):
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[2:30, 18:46] = 240  # seven eighths of the shorter side
    save(folder / "val" / "0" / "00.jpg", pixels)
    batch = next(iter(batches_of(folder).eval_input_fn(ALONE, global_batch=1)))

    assert batch["image"][0, 1:-1, 1:-1].min() > 220


def test_flips_mirror_about_half_of_the_images(folder):
    pixels = np.zeros((24, 24, 3), np.uint8)
    pixels[:, 12:] = 240
    for path in (folder / "train").rglob("*.jpg"):
        save(path, pixels)
    found = train_batches(batches_of(folder, flip=True, crop_area=0.99), steps=20)
    mirrored = [image[8, 2, 0] > 120 for batch in found for image in batch["image"]]

    assert 90 <= sum(mirrored) <= 150  # of 240, seed 0


def test_crops_lie_within_the_image_and_keep_their_share():
    rng = np.random.default_rng(0)
    boxes = np.array([crop_box(60, 40, rng, crop_area=0.3) for _ in range(500)])
    left, top, right, bottom = boxes.T
    shares = (right - left) * (bottom - top) / (60 * 40)

    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= 60
    assert bottom.max() <= 40
    assert 0.3 <= shares.min() < 0.4
    assert 0.8 < shares.max() <= 1


def test_an_image_too_narrow_for_a_crop_gives_its_middle():
    rng = np.random.default_rng(0)
    assert crop_box(400, 10, rng, crop_area=1.0) == (195, 0, 205, 10)


def test_the_rate_of_a_pipeline_counts_images(folder):
    stream = batches_of(folder).train_input_fn(ALONE, global_batch=4, seed=0)
    assert images_per_s(stream, seconds=0.05) > 0

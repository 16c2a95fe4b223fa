"""Where pixels of images go in a picture of them."""

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

from experiments.images.pictures import save_picture, tiled
from tests.writers.test_writers import records


@pytest.fixture
def images():
    """Two rows of three images of 4x5 pixels, each of another grey."""
    greys = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3, 1, 1, 1)
    return np.broadcast_to(greys, (2, 3, 4, 5, 1))


def test_each_image_has_its_place_and_white_before_it(images):
    picture = tiled(images)
    assert (picture.shape, picture.dtype) == ((2 * 5, 3 * 6, 1), np.uint8)
    for row in range(2):
        for column in range(3):
            tile = picture[5 * row : 5 * row + 5, 6 * column : 6 * column + 6, 0]
            assert np.all(tile[0] == 255)
            assert np.all(tile[:, 0] == 255)
            assert np.all(tile[1:, 1:] == round(255 * (3 * row + column) / 5))


def test_what_is_beyond_black_and_white_is_cut():
    pixels = np.array([-7.0, -1.0, 0.0, 1.0, 7.0]).reshape(1, 1, 1, 5, 1)
    np.testing.assert_array_equal(tiled(pixels)[1, 1:, 0], [0, 0, 128, 255, 255])


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_file_is_enlarged_by_whole_pixels(tmp_path, channels, mode):
    images = np.random.default_rng(0).uniform(-1, 1, (2, 3, 4, 5, channels))
    path = tmp_path / "new" / "samples.png"
    save_picture(images, path)
    with Image.open(path) as file:
        assert file.mode == mode
        pixels = np.asarray(file).reshape(file.height, file.width, channels)
    factor = pixels.shape[1] // 18
    assert factor > 1
    np.testing.assert_array_equal(pixels[::factor, ::factor], tiled(images))


def test_words_stand_on_white_beside_the_rows_and_above_the_columns(tmp_path, images):
    save_picture(images, tmp_path / "plain.png")
    save_picture(
        images, tmp_path / "words.png", rows=["within 2", "0"], columns=["a", "", "b"]
    )
    plain, words = (
        np.asarray(Image.open(tmp_path / name)) for name in ("plain.png", "words.png")
    )
    top, left = np.subtract(words.shape, plain.shape)
    np.testing.assert_array_equal(words[top:, left:], plain)
    dark = words < 128
    half, third = plain.shape[0] // 2, plain.shape[1] // 3
    before, above = dark[top:, :left], dark[:top, left:]
    assert before[:half].sum() > before[half:].sum() > 0
    parts = [above[:, third * part : third * (part + 1)].any() for part in range(3)]
    assert parts == [True, False, True]
    assert not dark[:top, :left].any()


def test_tensorboard_gets_it_under_the_name_of_the_file(tmp_path, images):
    save_picture(images, tmp_path / "samples.png", step=7)
    [file] = (tmp_path / "tensorboard").iterdir()
    [event] = [
        event
        for event in map(Event.FromString, records(file.read_bytes()))
        if event.HasField("summary")
    ]
    [value] = event.summary.value
    assert (event.step, value.tag) == (7, "samples")
    assert (value.image.height, value.image.width) == tiled(images).shape[:2]


def test_without_a_step_tensorboard_gets_nothing(tmp_path, images):
    save_picture(images, tmp_path / "samples.png")
    assert [path.name for path in tmp_path.iterdir()] == ["samples.png"]

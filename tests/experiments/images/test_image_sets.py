"""Sets of images: TFDS files that are written for real, and the digits."""

import dataclasses
import doctest
import functools
import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from experiments.digits import digits_arrays
from experiments.images import image_sets
from experiments.images.image_sets import open_image_set, real_images
from replicator.errors import ArgumentError
from replicator.inputs import InputContext
from tests.helpers import replicated_layout
from tests.inputs.helpers import read, values

CLASSES = tfds.features.ClassLabel(num_classes=4)
PNG = tfds.features.Image(shape=(None, None, 3), encoding_format="png")
RAW = tfds.features.Tensor(shape=(8, 8, 3), dtype=np.uint8)
READ = """
import sys
from experiments.images import image_sets
from experiments.images.image_sets import open_image_set

images, _ = open_image_set("png", resolution=8, data_dir=sys.argv[1]).arrays("train")
print(len(images), "tensorflow" in sys.modules)
"""


def noise(split, size):
    rng = np.random.default_rng(len(split))
    return rng.integers(256, size=(size, 8, 8, 3), dtype=np.uint8)


IMAGES = {"train": noise("train", 12), "test": noise("test", 5)}


class _Set(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes images under a name and version; label i is that of image i modulo 4."""

    url_infos = None  # nothing is downloaded

    def __init__(self, name, version, features, images, **options):
        self.name, self.VERSION = name, tfds.core.Version(version)
        self._features, self._images = features, images
        super().__init__(**options)

    def _info(self):
        features = tfds.features.FeaturesDict(self._features)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self._images}

    def _generate_examples(self, split):
        feature = self._features["image"]
        for index, pixels in enumerate(self._images[split]):
            image = pixels.astype(feature.np_dtype)
            if isinstance(feature, tfds.features.Image):
                image = Image.fromarray(image)  # an array would take TensorFlow
            example = {"image": image, "label": index % 4}
            yield index, {name: example[name] for name in self._features}


def write(root, name, *, image=RAW, label=CLASSES, version="1.0.0", images=IMAGES):
    features = {"image": image} | ({} if label is None else {"label": label})
    places = {"data_dir": root, "file_format": "array_record"}
    _Set(name, version, features, images, **places).download_and_prepare()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    tfds.disable_progress_bar()
    write(root, "png", image=PNG)
    write(root, "raw")
    return root


@pytest.fixture(scope="module")
def digits():
    return open_image_set("digits", resolution=16)


def open_tiny(data_dir, name="png", **options):
    return open_image_set(name, **{"resolution": 8, "data_dir": data_dir} | options)


def one_pipeline():
    return InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)


def train_batches(images, *, steps, global_batch=12, seed=0):
    stream = iter(
        images.train_input_fn(one_pipeline(), global_batch=global_batch, seed=seed)
    )
    return [next(stream) for _ in range(steps)]


def as_bytes(image):
    return np.rint((image + 1) * 127.5).astype(np.uint8).tobytes()


@pytest.mark.parametrize("name", ["png", "raw"])
def test_a_set_on_disk_is_read_by_its_name(name, data_dir):
    images = open_tiny(data_dir, name)
    pixels, labels = images.arrays("train")

    assert (images.num_classes, images.channels, images.augment) == (4, 3, "flip")
    assert (pixels.dtype, labels.dtype) == (np.float32, np.int32)
    assert sorted(labels) == sorted(index % 4 for index in range(12))
    written = {each.tobytes() for each in IMAGES["train"]}
    assert {as_bytes(each) for each in pixels} == written


def test_the_test_split_is_another(data_dir):
    pixels, _ = open_tiny(data_dir).arrays("test")
    assert {as_bytes(each) for each in pixels} == {
        each.tobytes() for each in IMAGES["test"]
    }


def test_a_limit_reads_the_first_examples(data_dir):
    images = open_tiny(data_dir)
    np.testing.assert_array_equal(
        images.arrays("train", limit=5)[0], images.arrays("train")[0][:5]
    )


@pytest.mark.slow
def test_reading_needs_no_tensorflow(data_dir):
    command = [sys.executable, "-c", READ, str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "12 False\n", done.stderr


def test_images_are_cropped_to_the_square_in_their_middle(tmp_path):
    wide = np.zeros((1, 8, 24, 3), np.uint8)
    wide[:, :, 8:16] = 255
    feature = tfds.features.Tensor(shape=(8, 24, 3), dtype=np.uint8)
    write(tmp_path, "wide", image=feature, images={"train": wide, "test": wide})

    pixels, _ = open_tiny(tmp_path, "wide").arrays("train")
    np.testing.assert_array_equal(pixels, np.ones((1, 8, 8, 3), np.float32))


def test_the_newest_version_is_read(tmp_path):
    for version, size in (("2.0.0", 2), ("10.0.0", 10)):
        images = {"train": noise("train", size), "test": noise("test", 1)}
        write(tmp_path, "raw", version=version, images=images)
    assert len(open_tiny(tmp_path, "raw").sources["train"]) == 10


def test_validation_stands_for_test_where_there_are_both(tmp_path):
    sizes = {"train": 1, "validation": 2, "test": 3}
    images = {split: noise(split, size) for split, size in sizes.items()}
    write(tmp_path, "raw", images=images)
    assert len(open_tiny(tmp_path, "raw").sources["test"]) == 2


def test_digits_are_resized_between_black_and_white(digits):
    images, labels = digits.arrays("train")

    assert (images.shape, images.dtype) == ((1437, 16, 16, 1), np.float32)
    assert (images.min(), images.max()) == (-1.0, 1.0)
    assert labels.tolist() == digits_arrays("train")[1].tolist()
    assert (digits.num_classes, digits.augment) == (10, "shift")


def test_digits_at_their_own_resolution_are_unchanged():
    images, _ = open_image_set("digits", resolution=8).arrays("test")
    expected, _ = digits_arrays("test")
    np.testing.assert_allclose(images.reshape(-1, 64), 2 * expected - 1, atol=1e-6)


def test_batches_have_the_promised_form(digits):
    (batch,) = train_batches(digits, steps=1)

    assert batch["image"].shape == (12, 16, 16, 1)
    assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("mode", ["per_host", "per_replica"])
@pytest.mark.parametrize("name", ["png", "digits"])
def test_two_pipelines_yield_what_one_does(name, mode, data_dir, digits):
    images = digits if name == "digits" else open_tiny(data_dir)
    input_fn = functools.partial(images.train_input_fn, global_batch=8, seed=3)
    alone = values(read(input_fn, replicated_layout(1), limit=4))
    both = values(read(input_fn, replicated_layout(2), limit=4, mode=mode))

    for one, other in zip(alone, both, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        np.testing.assert_array_equal(one["label"], other["label"])


def test_flips_mirror_about_half_of_the_images(data_dir):
    originals = {each.tobytes() for each in IMAGES["train"]}
    mirrored = {each[:, ::-1].tobytes() for each in IMAGES["train"]}
    batches = train_batches(open_tiny(data_dir), steps=20)
    seen = [as_bytes(each) for batch in batches for each in batch["image"]]

    assert set(seen) == originals | mirrored
    assert 90 <= sum(each in mirrored for each in seen) <= 150  # of 240, seed 0


def test_shifts_move_digits_sideways_by_up_to_two_pixels_of_sixteen(digits):
    still = open_image_set("digits", resolution=16, augment="none")
    moved, unmoved = (
        np.concatenate([batch["image"] for batch in train_batches(each, steps=20)])
        for each in (digits, still)
    )
    padded = np.pad(unmoved, ((0, 0), (0, 0), (2, 2), (0, 0)), constant_values=-1)
    shifts = [
        {left for left in range(5) if np.array_equal(one, other[:, left : left + 16])}
        for one, other in zip(moved, padded, strict=True)
    ]

    assert all(len(each) == 1 for each in shifts)
    assert set.union(*shifts) == {0, 1, 2, 3, 4}


def test_augmentation_depends_on_the_seed_and_the_place_alone(digits):
    def images(seed):
        return train_batches(digits, steps=1, seed=seed)[0]["image"]

    np.testing.assert_array_equal(images(1), images(1))
    assert not np.array_equal(images(1), images(2))


def test_each_epoch_is_every_example_changed_anew(data_dir):
    images = open_tiny(data_dir)
    first, second = (
        {as_bytes(each) for each in batch["image"]}
        for batch in train_batches(images, steps=2)
    )
    labels = [sorted(b["label"]) for b in train_batches(images, steps=2)]

    assert labels[0] == labels[1]
    assert first != second


REFUSED = {
    "unknown": (
        {"name": "cifar10"},
        r"`name` must be 'digits' or a TFDS set that is on disk, got 'cifar10'; in "
        r"\S+ there is png, raw\. Run `tfds build cifar10 --file_format=array_record "
        r"--data_dir=\S+`\.",
    ),
    "resolution": (
        {"name": "png", "resolution": 20},
        r"`resolution` must be one of 8, 16, 32, 64, 128, 256, got 20\. Use 16 for "
        r"digits, 32 for `cifar10`\.",
    ),
    "augment": (
        {"name": "png", "augment": "crop"},
        r"`augment` must be one of 'flip', 'shift', 'none', got 'crop'\. Use one of "
        r"these\.",
    ),
    "no_text": (
        {"name": 3},
        r"`name` must be a string, got 3\. Pass a `str`\.",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(options, message, data_dir):
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        open_tiny(data_dir, **options)


def test_an_empty_folder_of_data_sets_is_said_to_be_one(tmp_path):
    with pytest.raises(ArgumentError, match=r"there is none\. Run `tfds build mnist "):
        open_tiny(tmp_path, "mnist")


@pytest.mark.parametrize(
    ("features", "found"),
    [
        ({"label": None}, r"`image` \(Tensor\)"),
        ({"label": tfds.features.Scalar(np.int64)}, r"`label` \(Scalar\)"),
        ({"image": tfds.features.Tensor(shape=(8, 8, 3), dtype=np.int32)}, "Tensor"),
    ],
    ids=["no_label", "no_classes", "not_bytes"],
)
def test_a_set_of_other_features_is_refused(features, found, tmp_path):
    write(tmp_path, "odd", **features)
    with pytest.raises(ArgumentError, match=f"with features.*got 'odd' with .*{found}"):
        open_tiny(tmp_path, "odd")


def test_a_set_without_a_held_out_split_is_refused(tmp_path):
    write(tmp_path, "odd", images={"train": noise("train", 1)})
    with pytest.raises(ArgumentError, match=r"got 'odd' with `train`\. Use one"):
        open_tiny(tmp_path, "odd")


def test_a_set_in_another_format_is_refused(tmp_path):
    write(tmp_path, "odd")
    info = tmp_path / "odd" / "1.0.0" / "dataset_info.json"
    # To write others takes TensorFlow; they are refused before they are opened.
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(ArgumentError, match=r"whose files in .* are tfrecord\. Run"):
        open_tiny(tmp_path, "odd")


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(image_sets) == (0, 3)


def test_a_batch_that_does_not_divide_is_refused(digits):
    context = InputContext(pipeline_index=0, num_pipelines=2, num_replicas=2)
    with pytest.raises(ArgumentError, match="`global_batch` must divide evenly"):
        digits.train_input_fn(context, global_batch=7, seed=0)


def test_images_to_show_are_those_of_their_class_and_white_where_there_are_none():
    digits = open_image_set("digits", resolution=8)
    few = {"train": [digits.sources["train"][i] for i in range(30)]}
    image_set = dataclasses.replace(digits, sources={**digits.sources, **few})
    images, labels = image_set.arrays("train")
    shown = real_images(image_set, 10, 9)
    assert shown.shape == (10, 9, 8, 8, 1)
    for label in range(10):
        own = images[labels == label][:9]
        np.testing.assert_array_equal(shown[label, : len(own)], own)
        assert np.all(shown[label, len(own) :] == 1)

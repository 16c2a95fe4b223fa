"""JPEGs by class: folders and TFDS files that are written for real."""

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from experiments.images.digit_jpegs import DAMAGED, digit_jpegs
from experiments.images.jpegs import open_jpegs
from replicator.errors import ArgumentError
from tests.experiments.images.test_image_sets import IMAGES, PNG, write


def save(path, *, color=(0, 0, 0), size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, "JPEG")


def save_classes(root, split, **counts):
    for name, count in counts.items():
        (root / split / name).mkdir(parents=True)
        for index in range(count):
            save(root / split / name / f"{index}.JPEG")


def test_labels_are_the_places_of_the_classes_in_their_order(tmp_path):
    save_classes(tmp_path, "train", zebra=2, ant=1)
    save_classes(tmp_path, "val", zebra=1, ant=1)
    images = open_jpegs(tmp_path)

    assert images.num_classes == 2
    assert [each.label for each in images.sources["train"]] == [0, 1, 1]
    assert images.sources["test"][1].name == str(tmp_path / "val/zebra/0.JPEG")


def test_files_that_are_no_jpegs_are_no_images(tmp_path):
    save_classes(tmp_path, "train", ant=1)
    save_classes(tmp_path, "test", ant=1)
    (tmp_path / "train/ant/notes.txt").write_text("read me")

    assert len(open_jpegs(tmp_path).sources["train"]) == 1


def test_the_files_of_a_tfds_set_stay_encoded(tmp_path):
    tfds.disable_progress_bar()
    write(tmp_path, "png", image=PNG)
    images = open_jpegs(tmp_path / "png" / "1.0.0")
    sources = images.sources

    assert images.num_classes == 4
    assert {split: len(each) for split, each in sources.items()} == {
        "train": 12,
        "test": 5,
    }
    assert sources["train"][3].data.startswith(b"\x89PNG")
    assert sources["train"][3].name == "train[3]"


def test_a_tfds_set_of_arrays_is_refused(tmp_path):
    write(tmp_path, "raw", images={split: IMAGES[split] for split in IMAGES})
    with pytest.raises(ArgumentError, match="must be a set of encoded images, got"):
        open_jpegs(tmp_path / "raw" / "1.0.0", argument="--data")


def test_the_digits_are_jpegs_of_32_pixels_with_three_damaged_ones(tmp_path):
    folder = digit_jpegs(data_dir=tmp_path)
    images = open_jpegs(folder)
    train, test = images.sources["train"], images.sources["test"]
    broken = {str(folder / name) for name in DAMAGED}

    assert (len(train), len(test), images.num_classes) == (1437 + 2, 360 + 1, 10)
    assert {each.name for each in (*train, *test)} >= broken
    with Image.open(
        next(each.name for each in train if each.name not in broken)
    ) as one:
        assert (one.size, one.format, np.asarray(one).max() > 200) == (
            *((32, 32), "JPEG", True),
        )


def no_split(root):
    save_classes(root, "train", ant=1)


def no_classes(root):
    save_classes(root, "train", ant=1)
    save(root / "val" / "0.jpg")


def empty_class(root):
    save_classes(root, "train", ant=1, bee=0)
    save_classes(root, "val", ant=1, bee=1)


def other_classes(root):
    save_classes(root, "train", ant=1, bee=1)
    save_classes(root, "val", ant=1)


BAD = {
    no_split: r"`--data` must be a folder with `train` and `val`, .*with train\. Name",
    no_classes: r"must have a folder of JPEGs for each class in `val`, got none in ",
    empty_class: r"must have JPEGs of each class, got none in \S+train/bee\. Add some",
    other_classes: r"same classes in each split, got bee in `train` alone, 1 of 2\. Co",
}


@pytest.mark.parametrize(
    ("make", "message"), BAD.items(), ids=[each.__name__ for each in BAD]
)
def test_images_laid_out_otherwise_are_refused(make, message, tmp_path):
    make(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        open_jpegs(tmp_path, argument="--data")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"got \S+nowhere with nothing\. Name"):
        open_jpegs(tmp_path / "nowhere", argument="--data")

import functools
import subprocess
import sys

import numpy as np
import pytest

from experiments.digits import (
    build_digits,
    digits_arrays,
    digits_source,
    eval_input_fn,
    train_input_fn,
)
from replicator.inputs import InputContext
from tests.helpers import replicated_layout
from tests.inputs.helpers import read, values

# Any use of the network fails, so that a build which needs it fails too.
BUILD = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("the network was used")

socket.socket.connect = socket.getaddrinfo = refuse
from experiments.digits import digits_source

print(len(digits_source("train", data_dir=sys.argv[1])), "tensorflow" in sys.modules)
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("datasets")


def _one_pipeline(replicas=8):
    return InputContext(pipeline_index=0, num_pipelines=1, num_replicas=replicas)


def test_building_needs_neither_network_nor_tensorflow(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert done.stdout == "1437 False\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["uci_digits"]


def test_a_process_that_finishes_second_leaves_the_files_of_the_first(tmp_path):
    digits_source("train", data_dir=tmp_path)
    written = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    build_digits(tmp_path)

    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == written
    assert len(digits_source("test", data_dir=tmp_path)) == 360


def test_the_splits_hold_every_digit_once(data_dir):
    train, test = (
        digits_source(split, data_dir=data_dir) for split in ("train", "test")
    )
    labels = [example["label"] for source in (train, test) for example in source]

    assert (len(train), len(test)) == (1437, 360)
    # The class counts that the data set's authors give for these 1,797 images.
    assert np.bincount(labels).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_the_splits_share_no_image_that_occurs_once(data_dir):
    images = [
        example["image"].tobytes()
        for split in ("train", "test")
        for example in digits_source(split, data_dir=data_dir)
    ]

    assert len(set(images)) == 1797


def test_batches_have_the_promised_form(data_dir):
    batch = next(
        iter(train_input_fn(_one_pipeline(), global_batch=64, data_dir=data_dir))
    )

    assert batch["image"].shape == (64, 8, 8, 1)
    assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int32)
    assert (batch["image"].min(), batch["image"].max()) == (0.0, 1.0)


def test_the_arrays_of_a_split_are_its_examples_in_order(data_dir):
    images, labels = digits_arrays("test", data_dir=data_dir)
    source = digits_source("test", data_dir=data_dir)

    assert (images.shape, images.dtype) == ((360, 64), np.float32)
    assert labels.tolist() == [example["label"] for example in source]
    np.testing.assert_array_equal(16 * images[7], source[7]["image"].ravel())


def test_each_epoch_is_every_example_in_another_order(data_dir):
    examples = iter(
        train_input_fn(_one_pipeline(), global_batch=479, data_dir=data_dir)
    )
    first, second = (
        np.concatenate([next(examples)["image"] for _ in range(3)]) for _ in range(2)
    )
    train = {e["image"].tobytes() for e in digits_source("train", data_dir=data_dir)}

    for epoch in (first, second):
        pixels = (epoch * 16).astype(np.uint8)
        assert {image.tobytes() for image in pixels} == train
    assert not np.array_equal(first, second)


def test_a_seed_is_an_order(data_dir):
    def labels(seed):
        data = train_input_fn(
            _one_pipeline(), global_batch=64, seed=seed, data_dir=data_dir
        )
        return next(iter(data))["label"].tolist()

    assert labels(1) == labels(1) != labels(2)


@pytest.mark.parametrize("mode", ["per_host", "per_replica"])
def test_the_order_does_not_depend_on_replicas_or_pipelines(mode, data_dir):
    input_fn = functools.partial(train_input_fn, global_batch=32, data_dir=data_dir)
    alone = values(read(input_fn, replicated_layout(1), steps=3))
    many = values(read(input_fn, replicated_layout(8), steps=3, mode=mode))

    for one, other in zip(alone, many, strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])
        np.testing.assert_array_equal(one["label"], other["label"])


@pytest.mark.parametrize("mode", ["per_host", "per_replica"])
def test_an_evaluation_counts_each_test_example_once(mode, data_dir, layout):
    input_fn = functools.partial(eval_input_fn, global_batch=64, data_dir=data_dir)
    items = read(input_fn, layout, mode=mode, epochs=1)
    labels = [item["label"][item["mask"] == 1] for item in values(items)]
    expected = [e["label"] for e in digits_source("test", data_dir=data_dir)]

    assert sum(item.examples for item in items) == 360
    assert np.concatenate(labels).tolist() == expected

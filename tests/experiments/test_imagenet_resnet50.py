"""The command on images that are written for real, and what it refuses."""

import json

import jax
import jax.numpy as jnp
import pytest
from PIL import Image

from experiments.imagenet_resnet50 import Config, filled, main, make_optimizer
from replicator.errors import ArgumentError
from tests.experiments.command import found_by

DAMAGED = ("train/1/5.jpg", "val/0/3.jpg")


@pytest.fixture
def folder(tmp_path):
    """Two classes, black and white, of eight images each; one of each split damaged."""
    for split in ("train", "val"):
        for label, brightness in enumerate((0, 255)):
            (tmp_path / split / str(label)).mkdir(parents=True)
            for index in range(8):
                path = tmp_path / split / str(label) / f"{index}.jpg"
                Image.new("RGB", (40, 36), (brightness,) * 3).save(path)
    for name in DAMAGED:
        (tmp_path / name).write_bytes(b"no image")
    return tmp_path


def test_what_is_left_open_is_what_the_images_need(tmp_path):
    own, digits = filled(Config(data=str(tmp_path))), filled(Config())

    assert (own.resolution, own.width, own.flip) == (224, 64, "yes")
    assert (own.skip_damaged, own.minutes) == (0, 0)
    assert (digits.resolution, digits.width, digits.flip) == (32, 16, "no")
    assert (digits.skip_damaged, digits.minutes) == (3, 6.0)


def test_what_is_given_stays():
    found = filled(Config(width=32, flip="yes"))
    assert (found.width, found.flip) == (32, "yes")


@pytest.mark.parametrize("name", ["momentum", "lars"])
def test_kernels_decay_and_norms_and_biases_do_not(name, standard_promotion):
    config = filled(Config(optimizer=name, weight_decay=0.1, warmup_epochs=0.0))
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    optimizer = make_optimizer(config, steps=10, images=1000)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)

    assert (updates["kernel"] < 0).all()
    assert (updates["scale"] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"`--skip_damaged` must be at least 1, .* \S+train/1/5\.jpg \(8 bytes"),
        ({"global_batch": 9}, r"`--global_batch` must divide evenly over 8"),
        ({"data": "nowhere"}, r"`--data` must be a folder with `train` and `val`"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name(options, message, folder):
    own = {"data": str(folder), "directory": str(folder / "run"), "global_batch": 16}
    with pytest.raises(ArgumentError, match=message):
        main(Config(**own | options))


def run(folder, *flags):
    return found_by(
        "imagenet_resnet50",
        *(f"--data={folder}", f"--directory={folder / 'run'}", "--skip_damaged=2"),
        *("--resolution=32", "--depth=18", "--width=2", "--epochs=1"),
        *("--global_batch=8", *flags),
        devices=2,
    )


@pytest.mark.slow
def test_damaged_files_are_left_out_and_each_other_one_counts(folder):
    found = run(folder, "--optimizer=lars", "--workers=2")

    assert (found["damaged"], found["held_out"], found["steps"]) == (2, 15, 2)
    assert found["images_per_s"] > 0
    lines = (folder / "run" / "damaged.jsonl").read_text().splitlines()
    names = {json.loads(line)["file"] for line in lines}
    assert names == {str(folder / name) for name in DAMAGED}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_that_is_saved_goes_on_in_bfloat16_under_another_strategy(folder):
    kept = [f"--checkpoint_dir={folder / 'kept'}", "--epochs=2", "--dtype=bfloat16"]
    first = run(folder, *kept, "--minutes=1e-3")
    found = run(folder, *kept, "--strategy=fsdp")

    assert first["steps"] < 4
    assert (found["steps"], found["strategy"]) == (4, "fsdp")

"""The command end to end, tiny, and what it refuses before anything is trained."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments import run_folder
from experiments.biggan import FREE, Config, run
from experiments.images.image_sets import open_image_set
from replicator.errors import ArgumentError
from replicator.inputs import InputContext
from tests.experiments.command import found_by

TINY = ["--channels=1", "--standing=1", "--global_batch=16", "--progress_every=2"]
PICTURES = ["progress", "samples", "interpolations", "truncation"]
KEYS = {
    "sample_accuracy",
    "by_class",
    "fid",
    "fid_halves",
    "inception_score",
    "nearest",
    "nearest_held_out",
    "truncation",
    "trained_s",
    "seconds",
}


OWN = ["--bfloat16", "--attention=8", "--discriminator_steps=2", "--accumulate=2"]


def command(directory, *flags):
    return found_by("biggan", f"--directory={directory}", *TINY, *flags, devices=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps: its folder, and its last line."""
    directory = tmp_path_factory.mktemp("biggan")
    return directory, command(directory, "--steps=2", *OWN)


@pytest.mark.slow
def test_the_command_trains_draws_and_judges(trained):
    directory, judged = trained
    assert judged.keys() >= KEYS
    assert 0 <= judged["sample_accuracy"] <= 1
    assert len(judged["by_class"]) == 10
    assert judged["truncation"].keys() == {"2.0", "1.0", "0.5", "0.1"}
    for name in PICTURES:
        with Image.open(directory / f"{name}.png") as picture:
            assert picture.width > 100
    assert list((directory / "tensorboard").iterdir())


@pytest.mark.slow
def test_it_goes_on_from_its_checkpoint(trained):
    directory, _ = trained
    command(directory, "--steps=4", *OWN, "--truncation=0.7")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "step" in record]
    assert max(steps) == 4


@pytest.fixture
def config(tmp_path):
    return Config(directory=str(tmp_path / "run"), data_dir=str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"dataset": "nope"}, "there is none. Run `tfds build nope"),
        ({"resolution": 24}, "`resolution` must be one of .*, got 24"),
        ({"resolution": 8}, r"`resolution` must be one of \[16, .*\], got 8"),
        ({"latent": 25}, "`latent` must be a multiple of 3 at 16 pixels.*Use 27"),
        ({"attention": 5}, "`attention` must be None or one of"),
        ({"truncation": -1.0}, "`--truncation` must be at least 0 and finite"),
        ({"strategy": "nope"}, "`--strategy` must be one of data_parallel, zero1"),
        ({"accumulate": 3}, "`--global_batch` must divide evenly over 24 microb"),
        ({"inception": "no.pth"}, "`--inception` must be empty for digits, got no.pth"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_there_is_a_folder(
    config, choices, message
):
    with pytest.raises(ArgumentError, match=message):
        run(dataclasses.replace(config, **choices))
    assert not Path(config.directory).exists()


@pytest.mark.parametrize(
    "change",
    [{"generator_rate": 1e-3}, {"stats": "replica"}, {"accumulate": 2}],
    ids=str,
)
def test_a_run_with_other_settings_is_not_gone_on_from(config, change):
    run_folder.claim(config.directory, config, free=FREE)
    (run_folder.checkpoints_of(config.directory) / "000000000007").mkdir(parents=True)
    [(name, value)] = change.items()
    with pytest.raises(ArgumentError, match=f"`--{name}` must be .* got {value}"):
        run(dataclasses.replace(config, **change))


@pytest.mark.parametrize("label", [10, -1])
def test_examples_of_none_of_the_classes_are_refused(label):
    digits = open_image_set("digits", resolution=8)
    wrong = {**digits.sources["train"][0], "label": np.int32(label)}
    sources = {"train": [wrong] * 4, "test": [wrong] * 4}
    image_set = dataclasses.replace(digits, sources=sources)
    one = InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)
    message = f"labels from 0 to 9, got {label} in `digits`"
    with pytest.raises(ArgumentError, match=message):
        next(iter(image_set.train_input_fn(one, global_batch=4, seed=0)))
    with pytest.raises(ArgumentError, match=message):
        image_set.arrays("test")

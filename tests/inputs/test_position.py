"""Another run goes on with the very next example, whatever the dataset is."""

import json
import logging

import grain
import numpy as np
import pytest

from replicator.errors import BatchError
from replicator.inputs import InputOptions, open_input
from replicator.inputs.position import Position, position_from_json
from replicator.mesh import replica_mesh

BATCH = 8


def numbered(count):
    """Batches of consecutive numbers; the last may be short."""
    numbers = np.arange(count, dtype=np.float32)
    return [{"x": numbers[at : at + BATCH]} for at in range(0, count, BATCH)]


class Loader:
    """An iterable whose passes differ: nobody can know what the next one yields."""

    def __init__(self, count):
        self._batches = numbered(count)
        self._passes = 0

    def __iter__(self):
        self._passes += 1
        return iter([{"x": b["x"] + self._passes * 1000} for b in self._batches])


def grain_map(count):
    examples = [{"x": np.float32(number)} for number in range(count)]
    return grain.MapDataset.source(examples).seed(3).shuffle().batch(BATCH)


def endless_grain(count):
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return grain_map(count).repeat().to_iter_dataset(options)


def per_pipeline(context):
    """Deal each global batch out over the pipelines, as a user's input_fn does."""
    size = context.batch_size(BATCH)
    first = context.pipeline_index * size
    return [{"x": batch["x"][first : first + size]} for batch in numbered(40)]


DATASETS = {
    "list": lambda: numbered(44),
    "generator": lambda: iter(numbered(800)),
    "loader": lambda: Loader(40),
    "grain map": lambda: grain_map(44),
    "endless grain": lambda: endless_grain(40),
    "input_fn": lambda: per_pipeline,
}
SEEN_AT_ONCE = {"list", "grain map", "endless grain", "input_fn"}


def read(make, count, *, start=None, replicas=2, **options):
    options = InputOptions(steps=count, **options)
    mesh = replica_mesh(replicas)
    with open_input(make(), mesh, options=options, start=start) as batches:
        placed = list(batches)
    values = [(np.asarray(each.value["x"]), each.examples) for each in placed]
    return values, [each.position for each in placed]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for (x, examples), (other, other_examples) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, other)
        assert examples == other_examples


@pytest.mark.parametrize("after", [1, 5, 6, 13])
@pytest.mark.parametrize("name", DATASETS)
def test_reading_goes_on_where_it_stopped(name, after):
    expected, positions = read(DATASETS[name], 16)
    found, later = read(DATASETS[name], 16 - after, start=positions[after - 1])
    assert_same(found, expected[after:])
    assert [each.examples for each in later] == [
        each.examples for each in positions[after:]
    ]


@pytest.mark.parametrize("name", DATASETS)
def test_a_position_survives_json(name):
    _, positions = read(DATASETS[name], 3)
    text = json.dumps(positions[-1].as_json())
    assert position_from_json(json.loads(text)) == positions[-1]


@pytest.mark.parametrize("name", DATASETS)
def test_only_what_cannot_say_where_it_is_is_read_again(name, caplog):
    _, positions = read(DATASETS[name], 3)
    with caplog.at_level(logging.WARNING):
        read(DATASETS[name], 1, start=positions[-1])
    assert ("reading all before it again" in caplog.text) == (name not in SEEN_AT_ONCE)


def test_another_number_of_replicas_goes_on_with_the_same_examples():
    expected, positions = read(DATASETS["endless grain"], 8, replicas=8)
    found, _ = read(DATASETS["endless grain"], 5, start=positions[2], replicas=1)
    assert_same(found, expected[3:])


@pytest.mark.parametrize(("before", "after"), [(8, 2), (2, 4), (4, 1)])
def test_another_number_of_pipelines_loses_and_repeats_no_example(before, after):
    options = {"mode": "per_replica"}
    _, positions = read(DATASETS["input_fn"], 3, replicas=before, **options)
    found, _ = read(
        DATASETS["input_fn"], 4, start=positions[-1], replicas=after, **options
    )
    expected, _ = read(lambda: numbered(40), 7)
    assert_same(found, expected[3:])


def test_stacked_batches_tell_the_place_after_the_last(mesh):
    options = InputOptions(steps=6, steps_per_call=3)
    with open_input(numbered(80), mesh, options=options) as batches:
        assert [each.position.batches for each in batches] == [3, 6]


def test_a_dataset_that_shrank_is_refused():
    start = Position(batches=9, examples=72, epoch=0, epoch_batches=9)
    with pytest.raises(BatchError) as caught:
        read(lambda: iter(numbered(40)), 1, start=start)
    assert str(caught.value) == (
        "`dataset` must hold the 9 batches that were read before, got its end after 5. "
        "Resume with the dataset that the run began with."
    )

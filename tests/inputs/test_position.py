"""Another run goes on with the very next example, whatever the dataset is."""

import json
import logging

import grain
import numpy as np
import pytest

from replicator.errors import BatchError
from replicator.inputs import InputOptions, open_input
from replicator.inputs.position import Position, position_from_json
from tests.helpers import replicated_layout

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


class Source:
    """Numbers for a grain loader; its `repr` holds where in memory it lies."""

    def __len__(self):
        return 44

    def __getitem__(self, index):
        return {"x": np.float32(index)}


def grain_loader(seed=3):
    return grain.DataLoader(
        data_source=Source(),
        sampler=grain.samplers.IndexSampler(44, shuffle=True, seed=seed, num_epochs=1),
        operations=[grain.transforms.Batch(BATCH)],
    )


class Shuffled:
    """An iterable whose every pass is shuffled by NumPy's global generator."""

    def __iter__(self):
        numbers = np.random.permutation(40).astype(np.float32)
        return iter([{"x": rows} for rows in numbers.reshape(-1, BATCH)])


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
    "grain loader": grain_loader,
}
SEEN_AT_ONCE = {"list", "grain map", "endless grain", "input_fn", "grain loader"}


def read(make, count, *, start=None, replicas=2, **options):
    options = InputOptions(steps=count, **options)
    layout = replicated_layout(replicas)
    with open_input(make(), layout, options=options, start=start) as batches:
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


def test_stacked_batches_tell_the_place_after_the_last(layout):
    options = InputOptions(steps=6, steps_per_call=3)
    with open_input(numbered(80), layout, options=options) as batches:
        assert [each.position.batches for each in batches] == [3, 6]


def test_a_dataset_that_shrank_is_refused():
    start = Position(batches=9, examples=72, epoch=0, epoch_batches=9)
    with pytest.raises(BatchError) as caught:
        read(lambda: iter(numbered(40)), 1, start=start)
    assert str(caught.value) == (
        "`dataset` must hold the 9 batches that were read before, got its end after 5. "
        "Resume with the dataset that the run began with."
    )


@pytest.mark.parametrize("after", [3, 5, 7])
def test_an_unseeded_shuffle_is_refused_when_it_is_read_again(after):
    _, positions = read(Shuffled, after)
    with pytest.raises(BatchError, match="got another batch 0 of pass 0") as caught:
        read(Shuffled, 1, start=positions[-1])
    assert 'InputOptions(reread="warn")' in str(caught.value)


def test_other_examples_are_taken_with_a_warning_where_that_is_asked_for(caplog):
    expected, positions = read(Shuffled, 3)
    found, _ = read(Shuffled, 1, start=positions[-1], reread="warn")
    assert not np.array_equal(found[0][0], expected[-1][0])
    told = [each for each in caplog.messages if "goes on with other examples" in each]
    assert len(told) == 2


def test_a_shuffle_that_is_seeded_where_it_is_made_goes_on():
    def make():
        np.random.seed(3)
        return Shuffled()

    expected, positions = read(make, 13)
    found, _ = read(make, 6, start=positions[6])
    assert_same(found, expected[7:])


def changed(count, *, at):
    """Return a loader that reads another batch than `Loader` does, at one place."""
    batches = [batch for number in (1, 2) for batch in _pass(count, number)]
    batches[at] = {"x": batches[at]["x"] + 1}
    half = len(batches) // 2
    return _Passes([batches[:half], batches[half:]])


def _pass(count, number):
    return [{"x": batch["x"] + number * 1000} for batch in numbered(count)]


class _Passes:
    def __init__(self, passes):
        self._passes = iter(passes)

    def __iter__(self):
        return iter(next(self._passes))


@pytest.mark.parametrize(
    ("at", "which"),
    [(0, "batch 0 of pass 0"), (5, "batch 0 of pass 1"), (6, "batch 1 of pass 1")],
)
def test_each_pass_is_known_by_its_first_batch_and_the_place_by_its_last(at, which):
    _, positions = read(lambda: Loader(40), 7)
    with pytest.raises(BatchError, match=f"got another {which}"):
        read(lambda: changed(40, at=at), 1, start=positions[-1])


@pytest.mark.parametrize(("at", "which"), [(0, "batch 0"), (2, "batch 2")])
def test_a_list_that_holds_other_batches_is_refused(at, which):
    _, positions = read(lambda: numbered(40), 3)
    other = numbered(40)
    other[at] = {"x": other[at]["x"] + 1}
    with pytest.raises(BatchError, match=f"got another {which}"):
        read(lambda: other, 1, start=positions[-1])


def test_a_position_of_before_there_were_checksums_goes_on():
    expected, positions = read(DATASETS["loader"], 13)
    old = positions[2].as_json()
    del old["checksums"]
    found, later = read(DATASETS["loader"], 10, start=position_from_json(old))
    assert_same(found, expected[3:])
    found, _ = read(DATASETS["loader"], 1, start=later[8])
    assert_same(found, expected[12:])


def test_a_grain_loader_of_another_order_is_not_taken_for_the_same():
    _, positions = read(grain_loader, 3)
    with pytest.raises(ValueError, match="Sampler in checkpoint does not match"):
        read(lambda: grain_loader(seed=4), 1, start=positions[-1])


def test_each_pipeline_looks_for_its_own_examples(caplog):
    def other(context):
        batches = per_pipeline(context)
        if context.pipeline_index == 1:
            batches[2] = {"x": batches[2]["x"] + 1}
        return batches

    _, positions = read(lambda: per_pipeline, 3, mode="per_replica")
    with pytest.raises(BatchError, match="got another batch 2"):
        read(lambda: other, 1, start=positions[-1], mode="per_replica")


def sized(numbers, size):
    return [{"x": numbers[at : at + size]} for at in range(0, len(numbers), size)]


OF_SIZE = {
    "list": lambda size: sized(np.arange(48, dtype=np.float32), size),
    "generator": lambda size: (x for x in OF_SIZE["list"](size)),
    "endless": lambda size: (x for _ in range(3) for x in OF_SIZE["list"](size)),
    "grain": lambda size: (
        grain.MapDataset.range(48)
        .map(lambda number: {"x": np.float32(number)})
        .batch(size)
        .to_iter_dataset()
    ),
}


@pytest.mark.parametrize("reread", ["refuse", "warn"])
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("kind", OF_SIZE)
def test_batches_of_another_size_are_refused_by_what_was_saved(kind, size, reread):
    layout, options = replicated_layout(2), InputOptions(reread=reread)
    with open_input(OF_SIZE[kind](BATCH), layout) as batches:
        saved = [next(batches) for _ in range(2)][-1].position
    message = f"batches of 8 examples, with which the run was saved, got {size}. Go on"
    with (
        open_input(OF_SIZE[kind](size), layout, options=options, start=saved) as other,
        pytest.raises(BatchError, match=message),
    ):
        next(other)


class Sampler:
    """Shuffles by the epoch that it is told, as those of PyTorch do."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


class Sampled:
    """An iterable with a sampler."""

    def __init__(self, place):
        self.sampler = Sampler()
        if place == "batch_sampler":
            self.batch_sampler, self.sampler = self, None
            self.batch_sampler.sampler = Sampler()
        elif place == "dataset":
            self.dataset, self.sampler = Sampler(), None
        self._shuffles = self.sampler or self.dataset

    def __iter__(self):
        order = np.random.default_rng(self._shuffles.epoch).permutation(16)
        return iter([{"x": rows.astype(np.float32)} for rows in order.reshape(-1, 8)])


@pytest.mark.parametrize("place", ["sampler", "batch_sampler", "dataset"])
def test_samplers_are_told_their_epoch_also_by_a_run_that_goes_on(place):
    def rows(start, count):
        with open_input(Sampled(place), replicated_layout(2), start=start) as batches:
            found = [next(batches) for _ in range(count)]
        return [np.asarray(x.value["x"]) for x in found], found[-1].position

    whole, _ = rows(None, 6)
    first, position = rows(None, 3)
    last, _ = rows(position, 3)
    assert len({tuple(np.concatenate(whole[at : at + 2])) for at in (0, 2, 4)}) == 3
    np.testing.assert_array_equal(
        np.concatenate([*first, *last]), np.concatenate(whole)
    )

"""The same program gives the same answer in 1, 2, 3 and 4 processes."""

import json

import numpy as np
import pytest

from replicator.training.best_metric import BestSoFar
from tests.multiprocess import programs
from tests.multiprocess.processes import run_processes, values

pytestmark = pytest.mark.slow
LAYOUTS = [(1, 4), (2, 2), (4, 1)]
SEVERAL = LAYOUTS[1:]


@pytest.fixture(scope="module")
def laws(tmp_path_factory):
    """What every process of every layout found, and where it kept its records."""
    found = {}
    for processes, devices in LAYOUTS:
        folder = tmp_path_factory.mktemp(f"{processes}x{devices}")
        ended = run_processes(
            programs.laws,
            folder,
            processes=processes,
            devices=devices,
            directory=folder / "records",
        )
        found[processes, devices] = values(ended), folder / "records"
    return found


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    arguments = {"processes": 2, "devices": 1, "directory": folder}
    return values(run_processes(programs.refusals, folder, **arguments))


def norm(tree):
    leaves = [np.ravel(leaf) for leaf in programs.jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves).astype(np.float64))


def difference(tree, other):
    return norm(programs.jax.tree.map(np.subtract, tree, other)) / norm(other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["fast", "ordered", "accumulated", "own_loop"])
def test_all_processes_hold_the_same_bits(laws, layout, way):
    first, *others = [programs.bits(value[way]) for value in laws[layout][0]]
    assert all(other == first for other in others)


@pytest.mark.parametrize("layout", SEVERAL)
def test_ordered_training_has_the_same_bits_in_any_number_of_processes(laws, layout):
    one, several = laws[1, 4][0][0], laws[layout][0][0]
    assert programs.bits(several["ordered"]) == programs.bits(one["ordered"])


@pytest.mark.parametrize("layout", SEVERAL)
@pytest.mark.parametrize("way", ["fast", "accumulated", "own_loop"])
def test_training_is_the_same_but_for_rounding(laws, layout, way):
    # Over processes the sum of gradients is made in another order (design law 1).
    one, several = laws[1, 4][0][0], laws[layout][0][0]
    assert difference(several[way], one[way]) < 1e-5


@pytest.mark.parametrize("layout", SEVERAL)
def test_an_evaluation_has_the_same_bits_in_any_number_of_processes(laws, layout):
    one = laws[1, 4][0][0]["evaluated"]
    assert one["examples"] == 1003
    for several in laws[layout][0]:
        assert several["evaluated"] == one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_example_of_uneven_pipelines_is_read_once(laws, layout):
    processes = layout[0]
    own = 24 // processes
    counts = [(3 + 2 * index) * own - 1 for index in range(processes)]
    numbers = np.concatenate(
        [1000 * index + np.arange(count) for index, count in enumerate(counts)]
    )
    for value in laws[layout][0]:
        taken = value["uneven"]
        assert sum(examples for _, examples, _ in taken) == 2 * len(numbers)
        assert sum(total for total, _, _ in taken) == 2 * numbers.sum()


@pytest.mark.parametrize("layout", SEVERAL)
def test_one_process_writes_the_records_of_all(laws, layout):
    _, records = laws[layout]
    record = json.loads((records / "run.json").read_text())
    assert [each["index"] for each in record["processes"]] == list(range(layout[0]))
    assert {each["devices"] for each in record["processes"]} == {layout[1]}
    lines = (records / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


def test_what_is_due_by_the_clock_is_due_at_the_same_steps_in_all(tmp_path):
    arguments = {"processes": 2, "devices": 1, "directory": tmp_path}
    one, other = values(run_processes(programs.timed, tmp_path, **arguments))
    assert one == other
    assert one


def test_all_stop_early_at_the_same_step_and_stop_to_read(tmp_path):
    arguments = {"processes": 2, "devices": 2, "directory": tmp_path}
    for step, examples, best, input_threads in values(
        run_processes(programs.stopped, tmp_path, **arguments)
    ):
        assert (step, examples) == (12, 12 * 24)
        assert best == BestSoFar(step=6, value=1.0, waited=2)
        assert input_threads == []


def test_processes_may_hold_unlike_numbers_of_replicas(tmp_path):
    for means, refusal in values(
        run_processes(programs.unlike, tmp_path, processes=2, devices=2)
    ):
        np.testing.assert_array_equal(means, [[0, 1, 2]])
        assert refusal == (
            "`mode` must be 'single' or 'per_replica' where processes hold unlike "
            "numbers of replicas, got 'per_host' for [2, 1]. Use 'per_replica'."
        )


def test_three_processes_evaluate_each_example_once(tmp_path, laws):
    ended = run_processes(programs.evaluated, tmp_path, processes=3, devices=1)
    for found in values(ended):
        assert found == laws[1, 4][0][0]["evaluated"]


@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (2, 2)])
def test_every_process_gets_the_rows_of_all(tmp_path, processes, devices):
    arguments = {"processes": processes, "devices": devices}
    for predicted, reported in values(
        run_processes(programs.rows, tmp_path, **arguments)
    ):
        np.testing.assert_array_equal(predicted, np.arange(1003))
        [batch] = programs.global_batches(1)
        np.testing.assert_array_equal(reported, batch["x"])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", "ArgumentError: `seed` must be the same in all processes, got 1 in "),
        (
            "steps",
            "ArgumentError: `steps` must be the same in all processes, got 4 in ",
        ),
        ("init", "ArgumentError: `user/params/b1` must be the same in all processes"),
        ("step_fn", "ArgumentError: `step_fn` must be the same in all processes"),
        ("shape", "BatchError: `dataset` must yield batches of as many examples in "),
        ("content", "BatchError: `dataset` must yield the same global batches in "),
        ("count", "BatchError: `dataset` must yield the same global batches in "),
        ("empty", "BatchError: `dataset` must yield batches of as many examples in "),
    ],
)
def test_a_process_that_differs_is_named_in_all(refusals, what, said):
    for found in refusals:
        assert found[what].startswith(said)
        assert "process 1" in found[what]


def test_what_fails_in_one_input_is_an_error_in_all(refusals):
    elsewhere, here = [found["failure"] for found in refusals]
    assert here == "OSError: the disk of process 1 is gone"
    assert elsewhere == (
        "BatchError: `dataset` must be readable in every process, got an error in "
        "process 1: the disk of process 1 is gone"
    )


def test_what_one_process_reads_again_and_finds_changed_is_refused_in_all(refusals):
    elsewhere, here = [found["reread"] for found in refusals]
    assert "must yield again what the run read before, got another batch 0" in here
    assert elsewhere.startswith(
        "BatchError: `dataset` must be readable in every process, got an error in "
        "process 1: `dataset` must yield again"
    )


def test_after_a_refusal_the_processes_run_on(refusals):
    assert [found["nothing"] for found in refusals] == [None, None]

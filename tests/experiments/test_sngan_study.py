"""The study of batch norm and batch sizes: its cases, its table, and a small run."""

import dataclasses
import json

import pytest

from experiments.sngan_study import (
    Case,
    Config,
    cases_of,
    find,
    global_over_local,
    panels_of,
    settings_of,
    table_of,
)
from replicator.errors import ArgumentError
from tests.experiments.command import command

TWO = Config(shared="1,8", small_batch=0, global_batches="64", seeds=2)


def results_of(config):
    """Return what runs might have found: the distance is 1 more for each row."""
    return [
        settings_of(config, case, seed)
        | {"fid": 1.0 + row + seed, "sample_accuracy": 0.5, "seconds": 3.0}
        for row, case in enumerate(cases_of(config))
        for seed in range(config.seeds)
    ]


def test_norms_are_compared_at_one_batch_and_batches_with_one_norm():
    assert [(each.norm, each.global_batch) for each in cases_of(Config())] == [
        ("per replica", 64),
        ("groups of 2", 64),
        ("groups of 4", 64),
        ("global", 64),
        ("per replica", 16),
        ("groups of 2", 16),
        ("groups of 4", 16),
        ("global", 16),
        *(("global", size) for size in (8, 32, 128, 256, 512)),
    ]


def test_examples_that_share_statistics_are_those_of_their_replicas():
    cases = cases_of(Config(global_batches="8"))
    assert [each.stats_batch for each in cases] == [8, 16, 32, 64, 2, 4, 8, 16, 8]


@pytest.mark.parametrize("change", [{"steps": 7}, {"channels": 4}, {"latent": 3}])
def test_a_run_with_other_settings_is_not_taken_for_this_one(change):
    case, results = Case(shared=8, global_batch=64), results_of(TWO)
    assert find(results, settings_of(TWO, case, 0))
    other = dataclasses.replace(TWO, **change)
    assert find(results, settings_of(other, case, 0)) is None


def test_runs_are_found_for_another_choice_of_rows():
    one = dataclasses.replace(TWO, shared="8", seeds=1, directory="elsewhere")
    assert [row["fids"] for row in table_of(results_of(TWO), one)] == [[2.0]]


def test_a_row_is_the_mean_over_seeds():
    per_replica, over_all = table_of(results_of(TWO), TWO)
    assert (per_replica["fid"], per_replica["fids"]) == (1.5, [1.0, 2.0])
    assert (over_all["fid"], over_all["fids"]) == (2.5, [2.0, 3.0])
    assert over_all["seconds"] == 6.0


def test_the_distance_with_all_statistics_is_divided_by_that_with_own():
    config = Config(seeds=1)
    rows = table_of(results_of(config), config)
    assert global_over_local(rows, 64) == 4.0 / 1.0
    assert global_over_local(rows, 16) == 8.0 / 5.0
    assert global_over_local(rows[1:], 64) is None


def test_a_panel_says_of_how_many_examples_its_lines_are():
    (norms, lines), (_, batches) = panels(Config(seeds=2))
    assert norms == "examples that share statistics"
    assert [*lines] == ["64 examples, 8 on a replica", "16 examples, 2 on a replica"]
    assert [*batches[""]] == [64, 16, 8, 32, 128, 256, 512]
    (alone, _), _ = panels(TWO)  # a line alone has no legend
    assert alone == "examples that share statistics, of 64"


def panels(config):
    return panels_of(table_of(results_of(config), config), config).items()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"shared": "1,3"},
            "`shared` must be divisors of 8, the replicas, got 3. Use '1,2,4,8'.",
        ),
        (
            {"global_batches": "8,20"},
            "`global_batch`, `small_batch` and `global_batches` must be multiples of "
            "8, the replicas, got 20. Use 16.",
        ),
        (
            {"small_batch": 4},
            "`global_batch`, `small_batch` and `global_batches` must be multiples of "
            "8, the replicas, got 4. Use 8.",
        ),
        (
            {"global_batches": "8-64"},
            "`global_batches` must be whole numbers with commas between, got '8-64'. "
            "Use '8' for one.",
        ),
    ],
)
def test_numbers_that_do_not_fit_the_replicas_are_refused(flags, message):
    with pytest.raises(ArgumentError) as error:
        cases_of(Config(**flags))
    assert str(error.value) == message


def run_study(directory):
    done = command(
        "sngan_study",
        *("--shared=1,8", "--global_batch=16", "--small_batch=0"),
        "--global_batches=16",
        *("--steps=3", "--channels=4", "--latent=3", "--standing=16"),
        f"--directory={directory}",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.nightly
def test_the_command_has_a_row_for_each_case_and_runs_none_again(tmp_path):
    _, found = run_study(tmp_path)
    assert [row["norm"] for row in found["table"]] == ["per replica", "global"]
    local, over_all = (row["fid"] for row in found["table"])
    assert found["global_over_local"] == over_all / local
    assert (tmp_path / "study.png").exists()

    lines, again = run_study(tmp_path)
    assert again["table"] == found["table"]
    assert not [line for line in lines if "seed 0" in line]

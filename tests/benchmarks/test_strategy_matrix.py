import dataclasses

import jax
import pytest

from benchmarks.strategy_matrix.__main__ import settings
from benchmarks.strategy_matrix.builders import BUILDERS, OPTIMIZERS, PADDED
from benchmarks.strategy_matrix.cases import CASES
from benchmarks.strategy_matrix.law import Oracles, Setting, problem
from benchmarks.worker import Worker, WorkerEnded


@pytest.fixture(autouse=True)
def lenient_types():
    # The models are written as users write; our own code stays strict elsewhere.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def under(case, builder, optimizer="adamw"):
    return Setting(case, builder, 8, optimizer)


@pytest.mark.parametrize(
    ("case", "builder"),
    [
        ("while", "fsdp"),
        ("scatter", "rules"),
        pytest.param("scatters", "replicas2", marks=pytest.mark.slow),
        pytest.param("custom-vjp", "zero2", marks=pytest.mark.slow),
        pytest.param("cond", "rules", marks=pytest.mark.slow),
        pytest.param("uneven", "zero2-pad", marks=pytest.mark.slow),
        pytest.param("uneven", "model-pad", marks=pytest.mark.slow),
    ],
)
def test_a_strategy_gives_the_update_of_one_device(case, builder, caplog):
    assert problem(under(case, builder), Oracles()) is None
    assert "is not known" not in caplog.text


class Spoilt(Oracles):
    """Oracles whose gradients count twice."""

    def visits(self, case, optimizer):
        return [
            dataclasses.replace(visit, gradient=[2 * leaf for leaf in visit.gradient])
            for visit in super().visits(case, optimizer)
        ]


def test_a_gradient_that_counts_twice_is_found():
    found = problem(under("mlp", "zero1"), Spoilt())
    assert found == "at step 0: the gradient is off by 5.0e-01"


def test_what_raises_is_a_failure_and_not_the_end():
    found = problem(Setting("mlp", "rules", 3, "adamw"), Oracles())
    assert found is not None
    assert found.startswith("KeyError at builders.py")


def test_all_that_there_is_is_visited():
    chosen = settings(full=False)
    assert {each.case for each in chosen} == {case.name for case in CASES}
    assert {each.builder for each in chosen} == {*BUILDERS, *PADDED}
    assert {each.optimizer for each in chosen} == set(OPTIMIZERS)
    assert {each.devices for each in chosen} == {1, 2, 4, 8}
    assert set(chosen) < set(settings(full=True))


ECHO = "from benchmarks.worker import serve; serve(lambda said: said or exit(3))"


def test_a_process_that_ends_is_replaced_at_the_next_request():
    worker = Worker(["-c", ECHO], timeout_s=60)
    assert worker.ask(["a"]) == ["a"]
    with pytest.raises(WorkerEnded, match="ended with 3"):
        worker.ask([])
    assert worker.ask({"b": 1}) == {"b": 1}
    worker.close()

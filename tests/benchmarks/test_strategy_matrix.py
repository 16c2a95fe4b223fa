import dataclasses

import jax
import pytest

from benchmarks.strategy_matrix.builders import (
    ACCUMULATED,
    BUILDERS,
    OPTIMIZERS,
    PADDED,
    PLAIN,
)
from benchmarks.strategy_matrix.cases import CASES
from benchmarks.strategy_matrix.cover import pairs
from benchmarks.strategy_matrix.law import Oracles, Setting, problem
from benchmarks.strategy_matrix.pattern_cases import GROUPS, Context, contexts
from benchmarks.strategy_matrix.routes import BODIES, MOVERS, ROUTES
from benchmarks.strategy_matrix.settings import settings
from benchmarks.strategy_matrix.synchronisers import METHODS, MODELS, sums_settings
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


PATTERNS = [
    ("rows/activation to loss/plain/roll/odd", "zero2"),
    ("rows/state/plain/sort/wide", "zero2"),
    ("rows/gradient/plain/flip/odd", "replicas2"),
    ("slices/batch to state/plain/cumsum/odd", "rules"),
    ("update-slices/parameter to loss/plain/roll/odd", "fsdp"),
    ("places/parameter to loss/scan/concatenate/odd", "zero1-by-4"),
    ("pads/state/scan/roll/wide", "fsdp"),
    ("reads/parameter to loss/plain/flip/odd", "hybrid"),
    ("of-each/parameter to gradient/remat/sort/odd", "zero1"),
    ("grouped/parameter to loss/scan/cumsum/odd", "hybrid-pad"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("context", "builder"), PATTERNS)
def test_each_pattern_gives_what_one_device_gives(context, builder):
    assert problem(under(context, builder, "sgd"), Oracles()) is None


class Spoilt(Oracles):
    """Oracles whose gradients count twice; of patterns, the last one's."""

    def visits(self, case, optimizer, accumulate=1):
        def spoilt(gradient):
            chosen = list(gradient)[-1:] if case.each else gradient
            return gradient | {path: 2 * gradient[path] for path in chosen}

        return [
            dataclasses.replace(visit, gradient=spoilt(visit.gradient))
            for visit in super().visits(case, optimizer, accumulate)
        ]


def test_a_gradient_that_counts_twice_is_found():
    found = problem(under("mlp", "zero1"), Spoilt())
    assert found == "at step 0: the gradient is off by 5.0e-01"


def test_a_pattern_that_is_wrong_is_named():
    setting = Setting("pads-inside/parameter/plain/roll/odd", "zero1", 1, "sgd")
    found = problem(setting, Spoilt())
    assert found == "at step 0: 1 parts are off: inside-crop.odd.still (gradient)"


def test_what_raises_is_a_failure_and_not_the_end():
    found = problem(Setting("mlp", "rules", 3, "adamw"), Oracles())
    assert found is not None
    assert found.startswith("KeyError at builders.py")


def test_there_are_at_least_fifty_patterns_of_writes_and_shifts():
    assert sum(map(len, GROUPS.values())) >= 100


def held(chosen):
    """Return the pairs of a model's, or of a pattern's, ideas that settings hold."""
    found = set()
    for each in chosen:
        model = {"case": each.case, "optimizer": each.optimizer}
        is_model = "/" not in each.case
        ideas = model if is_model else Context(*each.case.split("/"))._asdict()
        ideas |= {"builder": each.builder, "devices": each.devices}
        found |= set(pairs(ideas))
    return found


@pytest.fixture(scope="module")
def chosen():
    return settings(full=False)


def test_each_pair_of_ideas_that_all_hold_the_cover_holds(chosen):
    assert held(settings(full=True)) <= held(chosen)


def test_all_that_there_is_is_visited(chosen):
    models = [each for each in chosen if "/" not in each.case]
    patterns = [each for each in chosen if "/" in each.case]
    assert {each.case for each in models} == {case.name for case in CASES}
    assert {each.builder for each in models} == {*BUILDERS, *PADDED}
    partition = {*BUILDERS, *PADDED, *ACCUMULATED} - {"data_parallel"}
    assert {each.builder for each in patterns} == partition
    assert {each.optimizer for each in models} == set(OPTIMIZERS)
    assert {each.optimizer for each in patterns} == set(PLAIN)
    assert {each.devices for each in chosen} == {1, 2, 4, 8}


def test_contexts_hold_all_groups_routes_bodies_and_movers():
    groups, routes, bodies, movers, _ = map(set, zip(*contexts(), strict=True))
    assert groups == set(GROUPS)
    assert routes == set(ROUTES)
    assert bodies == set(BODIES)
    assert movers == set(MOVERS) - {"still"}


ECHO = "from benchmarks.worker import serve; serve(lambda said: said or exit(3))"


def test_a_process_that_ends_is_replaced_at_the_next_request():
    worker = Worker(["-c", ECHO], timeout_s=60)
    assert worker.ask(["a"]) == ["a"]
    with pytest.raises(WorkerEnded, match="ended with 3"):
        worker.ask([])
    assert worker.ask({"b": 1}) == {"b": 1}
    worker.close()


def test_each_rule_for_sums_meets_each_model_optimizer_and_number_of_replicas():
    found = sums_settings(full=False)
    for name in METHODS:
        mine = [each for each in found if each.builder == name]
        models = {"embedding"} if name == "rows" else set(MODELS)
        assert {each.case for each in mine} == models
        assert {each.devices for each in mine} == {2, 8}
        assert {each.optimizer for each in mine} == {"adamw", "muon"}

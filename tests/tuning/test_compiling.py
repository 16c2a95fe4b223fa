"""A step compiled in a process of its own: what came of it, whatever came of it."""

import pytest

from replicator import Replicator, strategies
from replicator.errors import ArgumentError
from replicator.tuning.compiling import CompileOrder, compile_step
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.problem import ProblemFile
from tests.tuning import problems


def compiled(function, *, strategy=None, limit_s=120.0, **options):
    if isinstance(function, str):
        function = ProblemFile.from_text(f"{problems.__file__}:{function}")
    order = CompileOrder(
        problem=function,
        make_replicator=Replicator,
        strategy=strategy,
        devices="cpu:8",
        **options,
    )
    return compile_step(order, limit_s=limit_s)


def here(rep):
    return problems.problem(rep)


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    fsdp = strategies.fsdp(whole_below_bytes=0)
    first = compiled("prints", strategy=fsdp, kept_in=str(folder))
    return folder, fsdp, first


def test_a_step_is_compiled_whatever_it_prints(cut):
    _, _, found = cut
    assert (found.status, found.reason, found.mesh["shard"]) == ("compiled", "", 8)
    assert found.flops == 2 * 2 * 16 * 64 * 64
    assert {each.axes for each in found.features.traffic} == {("shard",)}
    assert found.state_bytes >= 64 * 64 * 4 // 8


def test_an_outcome_is_the_same_after_json(cut):
    _, _, found = cut
    assert CompileOutcome.from_json(found.to_json()) == found


def test_a_program_is_compiled_once(cut):
    folder, fsdp, found = cut
    assert compiled("problem", strategy=fsdp, kept_in=str(folder)) == found
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_functions_are_taken_and_forecast_without_compiling(cut):
    _, fsdp, found = cut
    forecast = compiled(here, strategy=fsdp, compiles=False)
    assert (forecast.status, forecast.key) == ("forecast", found.key)
    assert forecast.features.flops == found.features.flops


@pytest.mark.slow
def test_replicas_are_compiled_with_their_own_collectives():
    found = compiled(here)
    [sums] = [each for each in found.features.traffic if each.wire_bytes > 1000]
    assert (found.strategy, sums.kind) == ("data_parallel", "all-reduce")


@pytest.mark.slow
def test_a_strategy_that_does_not_divide_is_refused_with_its_reason():
    found = compiled(here, strategy=strategies.hybrid(shard=3))
    assert found.status == "refused"
    assert "shard" in found.reason


def test_a_process_that_dies_is_an_outcome():
    found = compiled("aborts")
    assert found.status == "died"
    assert found.reason.startswith("it was killed by SIGABRT")


@pytest.mark.slow
def test_a_process_without_end_is_ended():
    found = compiled("never_ends", limit_s=0.5)
    assert (found.status, found.reason) == ("timeout", "not done within 0.5 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("reads_data", "without reading data, got FileNotFoundError"),
        ("no_such", "must name a function of"),
    ],
)
def test_a_problem_that_is_none_is_an_error(function, part):
    with pytest.raises(ArgumentError, match=part):
        compiled(function)

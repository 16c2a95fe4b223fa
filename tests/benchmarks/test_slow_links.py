"""What times over a slow link say of predictions and of a choice."""

from benchmarks.slow_links.choice import choose
from benchmarks.slow_links.judge import fastest, is_best, ordered_pairs, regret
from benchmarks.slow_links.models import MODELS, PLAIN, candidates
from benchmarks.timing import Estimate
from replicator.strategies import StepTime, data_parallel

TIMES = {"a": [1.0, 1.1, 9.0], "b": [2.0, 2.2, 2.1], "c": [1.2, 1.2, 1.2]}
SAME = Estimate(median=1.0, low=0.95, high=1.05)


def test_only_pairs_that_differ_are_held_against_predictions():
    pairs = ordered_pairs(TIMES, {"a": 2, "b": 3, "c": 1})
    assert (pairs.right, pairs.wrong) == (2, [])
    pairs = ordered_pairs(TIMES, {"a": 3, "b": 2, "c": 1})
    assert (pairs.right, pairs.wrong) == (1, [("a", "b")])


def test_equal_predictions_order_nothing():
    assert ordered_pairs({"a": [1.0], "b": [2.0]}, {"a": 1, "b": 1}).right == 0


def test_the_fastest_has_the_least_median():
    assert fastest(TIMES, list(TIMES)) == "a"
    assert fastest(TIMES, ["b", "c"]) == "c"


def test_regret_is_of_medians():
    found = regret({"a": [2.0, 40.0, 2.0], "b": [1.0, 1.0, 9.0]}, "a", "b")
    assert found.median == 2
    assert found.low <= 2 <= found.high


def test_another_candidate_is_the_best_within_the_noise_of_one():
    assert is_best({"a": [1.04] * 5, "b": [1.0] * 5}, "a", "b", SAME)
    assert not is_best({"a": [1.2] * 5, "b": [1.0] * 5}, "a", "b", SAME)


def test_a_choice_is_made_by_trials_among_those_that_may_win():
    tried = set()
    measured_s = {"a": 3.0, "b": 1.0, "c": 5.0, PLAIN: 2.0, "fsdp": 4.0}

    def trial_s(name):
        tried.add(name)
        return measured_s[name]

    predicted_s = {"a": 1.0, "b": 1.5, "c": 1.6, "far": 9.0, PLAIN: 2.0, "fsdp": 99.0}
    predicted = {
        name: StepTime(arithmetic_s=seconds, memory_s=0.0, links_s={})
        for name, seconds in predicted_s.items()
    }
    named = dict.fromkeys(predicted, data_parallel())
    assert choose(named, predicted, trial_s) == "b"
    assert tried == set(measured_s)


def test_each_model_has_candidates_of_each_kind():
    for model in MODELS:
        found = candidates(model)
        assert next(iter(found)) == PLAIN
        assert {"fsdp", "hybrid", "hierarchical", "int8"} <= found.keys()
        assert [n for n, each in found.items() if not each.is_exact] == ["int8"]

from benchmarks.__main__ import results_table
from benchmarks.bars import BARS, BENCHMARKS, Bar, missed


def reached():
    results = {name: {} for name in BENCHMARKS}
    for bar in BARS:
        results[bar.benchmark][bar.key] = bar.limit
    return results


def test_bars_compare_as_they_say():
    at_most = Bar(benchmark="x", key="y", rule="<=", limit=2)
    at_least = Bar(benchmark="x", key="y", rule=">=", limit=2)
    exactly = Bar(benchmark="x", key="y", rule="==", limit=2)
    held = [[bar.holds(n) for n in (1, 2, 3)] for bar in (at_most, at_least, exactly)]
    assert held == [[True, True, False], [False, True, True], [False, True, False]]


def test_a_number_at_its_limit_reaches_the_bar():
    assert missed(reached()) == []


def test_the_number_beyond_its_limit_is_named():
    results = reached()
    results["accumulation"]["speedup"] = 3.9
    assert [(bar.benchmark, bar.key) for bar in missed(results)] == [
        ("accumulation", "speedup")
    ]


def test_a_number_that_cannot_be_measured_here_misses_no_bar():
    results = reached()
    results["rpc"]["ray_noop_speedup"] = None
    assert missed(results) == []
    assert results_table(results).row_count == len(BARS)


def test_broken_benchmark_misses_all_its_bars():
    results = reached()
    del results["step_overhead"]
    assert {bar.benchmark for bar in missed(results)} == {"step_overhead"}
    own = [bar for bar in BARS if bar.benchmark == "step_overhead"]
    assert missed(results) == own


def test_table_has_a_row_for_each_bar():
    assert results_table(reached()).row_count == len(BARS)

import pytest

from experiments.unmodified import (
    PARTITIONING,
    TENSOR_PARALLEL,
    Config,
    asks_to_wrap,
    batches,
    difference,
    named_strategy,
    run_alone,
    run_under,
    share,
)
from replicator import Replicator
from replicator.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTITIONING)
def test_an_unmodified_step_runs_as_it_is_and_asks_to_be_wrapped_where_it_must(name):
    strategy = named_strategy(name, 8, tensor_parallel=TENSOR_PARALLEL, pieces=8)
    rep = Replicator(strategy=strategy, compilation_cache=False)
    dataset = batches(Config(steps=5))
    state = run_under(rep, dataset)

    assert difference(state["params"], run_alone(dataset)["params"]) <= 1e-5
    assert share(state) < 1
    assert asks_to_wrap(rep, dataset[0])


def test_more_digits_than_there_are_are_refused_by_name():
    with pytest.raises(ArgumentError, match="`--global_batch` must be at most 1437"):
        batches(Config(global_batch=1438))

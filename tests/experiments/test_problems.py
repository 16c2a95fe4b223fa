"""The problems that `replicator plan` gets: each traces at both sizes, without data."""

import jax
import pytest

import replicator
from experiments import biggan, char_lm, digits_resnet, imagenet_resnet50, lm
from replicator import strategies
from replicator.engine.step.transforms import takes_key

FAST = (char_lm.problem, lm.problem)
SLOW = (biggan.problem, digits_resnet.problem, imagenet_resnet50.problem)


@pytest.fixture
def no_files(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(
    "problem", [*FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_problem_traces_and_reads_nothing(
    problem, small, no_files, standard_promotion
):
    rep = replicator.Replicator(strategy=strategies.fsdp(), compilation_cache=False)
    step_fn, init_fn, batch = problem(rep, small=small)
    key = jax.random.key(0)
    state = jax.eval_shape(init_fn, key)
    given = (state, batch, key) if takes_key(step_fn) else (state, batch)
    with jax.numpy_rank_promotion("allow"):  # as outside of tests
        after, metrics = jax.eval_shape(step_fn, *given)

    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert all(leaf.shape[0] % rep.mesh.size == 0 for leaf in jax.tree.leaves(batch))
    assert metrics

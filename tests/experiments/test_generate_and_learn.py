"""A language model that is sampled from on one slice and learns on another."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import generate_and_learn
from experiments.generate_and_learn import Config, checksums, run
from replicator import controller
from tests.experiments.command import found_by

pytestmark = pytest.mark.usefixtures("standard_promotion")
SMALL = Config(layers=1, width=16, heads=2, context=16, length=8, steps=6, minutes=10.0)


def test_checksums_of_a_tree_tell_leaves_apart_and_not_how_they_are_cut():
    tree = {"a": np.float32([1, 2]), "b": np.float32([0, 0])}
    found = checksums(tree).tolist()
    assert found == checksums({"a": np.float32([2, 1]), "b": tree["b"]}).tolist()
    assert found != checksums({"a": tree["b"], "b": tree["a"]}).tolist()
    assert found != checksums(tree | {"a": np.float32([1, 3])}).tolist()


@pytest.mark.slow
def test_each_sample_has_the_weights_of_one_step_and_none_goes_back(tmp_path):
    (tmp_path / "learned.py").write_text("x = 1\n" * 99)
    texts = generate_and_learn.char_lm.stdlib_text
    held_out = next(n for n in range(99) if texts.is_held_out(f"{n}.py"))
    (tmp_path / f"{held_out}.py").write_text("y = 2\n" * 99)
    config = dataclasses.replace(SMALL, sources=str(tmp_path))
    with controller.local(islands=2, devices=2) as pw:
        found = run(pw, config)
    assert found.steps == 6
    assert found.torn == 0
    steps = [each.step for each in found.samples]
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    sums = {tuple(np.asarray(each.used).tolist()) for each in found.samples}
    assert len(sums) == len(steps)
    assert all(jax.tree.leaves(each.tokens.shape) == [8] for each in found.samples)


@pytest.mark.slow
@pytest.mark.nightly
def test_it_ends_with_a_picture_and_a_line(tmp_path):
    flags = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--steps=5"]
    flags += ["--length=8", "--strategy=fsdp", f"--directory={tmp_path}"]
    found = found_by("generate_and_learn", *flags, devices=2)
    assert (found["steps"], found["torn"], found["strategy"]) == (5, 0, "fsdp")
    assert found["samples"] >= 1
    assert 0 < found["learner_busy"] <= 1
    assert 0 < found["sampler_busy"] <= 1
    assert (tmp_path / "generate_and_learn.png").stat().st_size > 1000

import re

import pytest

from replicator.errors import ArgumentError
from replicator.inputs import InputContext
from replicator.inputs.context import pipeline_contexts


def _context(num_pipelines):
    return InputContext(pipeline_index=0, num_pipelines=num_pipelines, num_replicas=8)


@pytest.mark.parametrize("mode", ["single", "per_host"])
def test_one_process_has_one_pipeline(mode, layout):
    expected = InputContext(pipeline_index=0, num_pipelines=1, num_replicas=8)

    assert pipeline_contexts(mode, layout) == [expected]


def test_each_replica_can_have_a_pipeline_in_order(layout):
    contexts = pipeline_contexts("per_replica", layout)

    assert [context.pipeline_index for context in contexts] == list(range(8))
    assert {context.num_pipelines for context in contexts} == {8}


def test_a_pipeline_yields_its_share_of_the_global_batch():
    assert _context(4).batch_size(96) == 24


@pytest.mark.parametrize(
    ("global_batch", "remedy"), [(100, "Use 96 or 104."), (3, "Use 8."), (0, "Use 8.")]
)
def test_a_global_batch_that_does_not_divide_is_refused(global_batch, remedy):
    message = (
        "`global_batch` must divide evenly over 8 pipelines, "
        f"got {global_batch}. {remedy}"
    )

    with pytest.raises(ArgumentError, match=re.escape(message)):
        _context(8).batch_size(global_batch)

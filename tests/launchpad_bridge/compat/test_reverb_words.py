"""Programs with Reverb's words run on our tables, where Reverb is not installed."""

import sys

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.compat.installing import FALLBACKS

WAIT_S = 60.0


@pytest.fixture
def reverb(monkeypatch):
    """Return the package that a program imports."""
    monkeypatch.syspath_prepend(FALLBACKS)
    names = [name for name in sys.modules if name.split(".")[0] == "reverb"]
    for name in [*names, "reverb", "reverb.selectors", "reverb.rate_limiters"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import reverb

    return reverb


def table_of(reverb, name="replay", **options):
    said = {
        "sampler": reverb.selectors.Prioritized(1.0),
        "remover": reverb.selectors.Fifo(),
        "max_size": 8,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(name=name, **{**said, **options})


def use(client):
    """Write five timesteps as items of two, and draw one of them by priority."""
    with client.writer(max_sequence_length=2) as writer:
        for step in range(5):
            writer.append({"place": np.float32(step)})
            if step:
                writer.create_item("replay", 2, priority=0.0 if step < 4 else 1.0)
    [first] = client.sample("replay")
    client.mutate_priorities("replay", {first[0].info.key: 0.5})
    places = [float(step.data["place"]) for step in first]
    updated = client.server_info()["replay"].statistics["updated"]
    lp.stop()
    return places, first[0].info.probability, updated


def test_a_reverb_node_is_a_replay_table_where_reverb_is_not_installed(reverb):
    program = lp.Program("replayed")
    node = lp.ReverbNode(lambda: [table_of(reverb), table_of(reverb, "other")])
    handle = program.add_node(node, label="replay")
    program.add_node(lp.PyNode(use, handle), label="user")
    run = lp.launch(program, "threads")
    run.wait(WAIT_S)
    assert run.results["user"] == ([3.0, 4.0], 1.0, 1)


def test_one_timestep_is_an_item_of_each_table_that_has_a_priority(reverb):
    server = reverb.Server([table_of(reverb, name) for name in ("a", "b", "c")])
    client = server.localhost_client()
    client.insert([np.ones(3)], priorities={"a": 1.0, "b": 2.0})
    sizes = {name: info.current_size for name, info in client.server_info().items()}
    server.stop()
    server.wait()
    assert sizes == {"a": 1, "b": 1, "c": 0}


def test_an_item_comes_as_its_timesteps_or_whole_with_the_size_of_its_table(reverb):
    server = reverb.Server([table_of(reverb)])
    client = server.localhost_client()
    with client.writer(max_sequence_length=2) as writer:
        for step in range(3):
            writer.append({"place": np.float32(step)})
        writer.create_item("replay", 2, priority=1.0)
    [steps] = client.sample("replay")
    [whole] = client.sample("replay", emit_timesteps=False)
    server.stop()
    server.wait()
    assert [step.data["place"] for step in steps] == [1.0, 2.0]
    assert whole.data["place"].tolist() == [1.0, 2.0]
    assert whole.info.table_size == 1


def test_words_mean_what_they_do_in_reverb(reverb):
    limiter = reverb.rate_limiters.SampleToInsertRatio(4.0, 10, error_buffer=8.0)
    assert limiter == lp.RateLimiter(min_size=10, samples_per_insert=4.0, error=8.0)
    assert reverb.rate_limiters.MinSize(3) == lp.RateLimiter(min_size=3)
    kinds = ["Uniform", "Fifo", "Lifo"]
    names = [getattr(reverb.selectors, kind)().sampler.name for kind in kinds]
    assert names == ["uniform", "fifo", "lifo"]
    assert reverb.selectors.MinHeap().remover == "lowest"


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("sampler", "MinHeap", "`sampler` must be one of .* got `MinHeap`"),
        ("remover", "Lifo", "`remover` must be one of .* got `Lifo`"),
    ],
)
def test_selectors_without_an_equivalent_are_refused(reverb, word, options, message):
    selector = getattr(reverb.selectors, options)()
    with pytest.raises(ArgumentError, match=message):
        table_of(reverb, **{word: selector})


def test_words_without_an_equivalent_are_refused_by_name(reverb):
    for module, word in (
        (reverb.selectors, "MaxHeap"),
        (reverb.rate_limiters, "Queue"),
        (reverb, "TrajectoryWriter"),
    ):
        with pytest.raises(
            AttributeError, match=rf"`{module.__name__}` has no `{word}"
        ):
            getattr(module, word)


@pytest.mark.parametrize("bad", [lp.uniform(), "Uniform", None])
def test_what_is_no_selector_is_refused_where_it_is_written(reverb, bad):
    with pytest.raises(ArgumentError, match="`sampler` must be one of `Uniform"):
        table_of(reverb, sampler=bad)
    with pytest.raises(ArgumentError, match="`remover` must be one of `Fifo"):
        table_of(reverb, remover=bad)


def test_what_tables_here_cannot_do_is_refused(reverb):
    with pytest.raises(ArgumentError, match="`extensions` must be empty"):
        table_of(reverb, extensions=["one"])
    with pytest.raises(ArgumentError, match="`checkpointer` must be None"):
        reverb.Server([table_of(reverb)], checkpointer="one")
    with pytest.raises(ArgumentError, match="different names, got \\['replay', 'rep"):
        reverb.Server([table_of(reverb)] * 2)
    client = reverb.Client("localhost:1")
    with pytest.raises(ArgumentError, match="`deletes` must be empty"):
        client.mutate_priorities("replay", deletes=[3])
    with pytest.raises(ArgumentError, match="from 1 to 0, of those"):
        client.writer(2).create_item("replay", 1, 1.0)

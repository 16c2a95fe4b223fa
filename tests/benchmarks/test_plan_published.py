"""Published runs as data: their seconds, and what the cost model takes of them."""

import pytest

from benchmarks.plan_published import compiled
from benchmarks.plan_published.predicted import predicted
from benchmarks.plan_published.published import DECODERS, V5E


@pytest.mark.parametrize(
    ("run", "seconds"), [(V5E[0], 10.06), (V5E[1], 11.99), (V5E[2], 13.3)]
)
def test_speeds_come_to_the_seconds_of_a_step(run, seconds):
    assert run.seconds() == pytest.approx(seconds, rel=0.002)


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=lambda each: each.name)
def test_a_decoder_has_the_parameters_of_its_name(decoder):
    billions = float(decoder.name.removesuffix("B"))
    assert decoder.parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_what_was_compiled_has_its_key_and_versions():
    for name, kept in compiled.read().items():
        assert name in compiled.RUNS
        assert len(kept.key) == 16
        assert set(kept.versions) == {"jax", "libtpu"}
        assert kept.features.num_devices == compiled.DEVICES


def test_kept_results_are_read_as_they_were_written(tmp_path, monkeypatch):
    kept = compiled.read()
    monkeypatch.setattr(compiled, "FILE", tmp_path / "kept.json")
    compiled.write(kept)
    assert compiled.read() == kept


def test_slices_meet_over_the_network_besides():
    kept = compiled.read()["16B"]
    one, two = (predicted(V5E[0], kept, slices) for slices in (1, 2))
    assert set(two.links_s) - set(one.links_s) == {"network"}
    assert two.links_s["torus"] == one.links_s["torus"]

"""A run's own numbers: in rows that are written anyway, and not too often."""

import jax
import pytest

from replicator.engine.memory import MemoryNeed
from replicator.engine.program_cost import Compilation, ProgramCost
from replicator.monitoring.phases import Phases
from replicator.training.reports.run_numbers import AddRunNumbers
from tests.fakes import FakeClock, RecordingWriter

COMPILATION = Compilation(
    seconds=2.5,
    steps_per_call=4,
    cost=ProgramCost(
        flops=8_000,
        collective_bytes=400,
        bytes_accessed=None,
        memory=MemoryNeed(
            arguments_bytes=5, outputs_bytes=3, aliased_bytes=3, temporaries_bytes=2
        ),
    ),
)


class Run:
    def __init__(self, peak_flops_per_s=None):
        self.clock, self.compiled = FakeClock(), []
        self.phases, self.writer = Phases(self.clock), RecordingWriter()
        self.numbers = AddRunNumbers(
            self.writer,
            self.phases,
            compilations=lambda: self.compiled,
            devices=jax.devices()[:2],
            peak_flops_per_s=peak_flops_per_s,
        )

    def row(self, **scalars):
        self.clock.advance(0.25)
        self.numbers.write(1, scalars)
        return self.writer.rows[-1][1]


def test_metrics_pass_as_they_are():
    run = Run()
    assert run.row(loss=0.5)["loss"] == 0.5
    assert run.row(loss=0.25) == {"loss": 0.25}


def test_utilisation_is_in_each_row_that_has_a_rate():
    run = Run(peak_flops_per_s=1e6)
    run.compiled.append(COMPILATION)
    row = run.row(**{"progress/steps_per_s": 100.0})
    assert row["progress/mfu"] == pytest.approx(2_000 * 100 / (2 * 1e6))
    assert "progress/mfu" not in run.row()


def test_without_a_known_peak_there_is_no_utilisation():
    run = Run()
    run.compiled.append(COMPILATION)
    assert "progress/mfu" not in run.row(**{"progress/steps_per_s": 100.0})


def test_a_program_is_told_once_for_each_compilation():
    run = Run()
    run.compiled.append(COMPILATION)
    first, second = run.row(), run.row()
    assert first["program/flops"] == 2_000
    assert first["program/collective_bytes"] == 100
    assert first["program/memory_bytes"] == 7
    assert (first["compile/count"], first["compile/seconds"]) == (1, 2.5)
    assert not any(name.startswith(("program/", "compile/")) for name in second)
    run.compiled.append(COMPILATION)
    assert run.row()["compile/count"] == 2


def test_memory_and_time_by_phase_are_told_once_a_second():
    run = Run()
    told = ["memory/host_peak_bytes" in run.row() for _ in range(9)]
    assert told == [True, False, False, False] * 2 + [True]


def test_shares_of_time_are_those_of_the_phases():
    run = Run()
    run.phases.enter("step")
    run.clock.advance(0.5)
    row = run.row()
    shares = {name: share for name, share in row.items() if "goodput" in name}
    assert shares == {"goodput/step": 1.0}
    run.clock.advance(0.75)
    run.phases.enter("save")
    run.clock.advance(0.25)
    assert run.row()["goodput/save"] == pytest.approx(0.25)


def test_flushing_and_closing_reach_the_writer():
    run = Run()
    run.numbers.flush()
    run.numbers.close()
    assert run.writer.calls == ["flush", "close"]

"""Processes of one run decide alike, by the numbers of the first."""

import pytest

from tests.multiprocess.processes import run_processes, values
from tests.tuning.choosing.programs import chosen


@pytest.mark.slow
def test_all_processes_choose_by_the_numbers_of_the_first(tmp_path):
    one, other = values(run_processes(chosen, tmp_path, processes=2, devices=4))
    assert one == other
    assert one["step"] == 2
    assert any(one["seconds"].values())

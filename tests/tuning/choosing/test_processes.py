"""Processes of one run decide alike, by the numbers of the first."""

import pytest

from tests.multiprocess.processes import run_processes, values
from tests.tuning.choosing.programs import chosen


@pytest.mark.slow
def test_all_processes_choose_by_the_numbers_of_the_first(tmp_path):
    one, other = values(run_processes(chosen, tmp_path, processes=2, devices=4))
    assert one == other
    assert one["step"] == 2
    assert any(each["seconds"] for each in one["found"])


@pytest.mark.slow
def test_the_first_one_s_figures_count_where_another_has_measured_its_own(tmp_path):
    about = {"calibrated": 1, "folder": str(tmp_path)}
    ended = run_processes(chosen, tmp_path, processes=2, devices=2, **about)
    one, other = values(ended)
    assert one == other

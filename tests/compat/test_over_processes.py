"""Two processes: rows are a process's own, collectives are over all devices."""

import pytest

from tests.compat import over_processes
from tests.multiprocess.processes import run_processes, values

pytestmark = pytest.mark.slow


def test_each_process_has_its_rows_and_collectives_see_all(tmp_path):
    found = values(
        run_processes(over_processes.mapped, tmp_path, processes=2, devices=2)
    )
    assert [value["rows"] for value in found] == [[0, 1], [2, 3]]
    assert all(value["sums"] == [6, 6] for value in found)
    assert all(value["weight"] == 3 + 20 * 1.5 for value in found)
    assert all(value["whole"] == 3 for value in found)
    keys = {tuple(key) for value in found for key in value["keys"]}
    assert len(keys) == 4

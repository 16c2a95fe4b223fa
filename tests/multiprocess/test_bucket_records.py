"""Records in a bucket of a run in several processes, which lose their hosts."""

import json

import pytest

from tests.multiprocess import programs
from tests.multiprocess.processes import assert_killed, run_processes, values

pytestmark = pytest.mark.slow


def test_a_killed_group_goes_on_in_its_records_on_other_hosts(tmp_path, monkeypatch):
    bucket, saved = tmp_path / "bucket", tmp_path / "saved"
    saved.mkdir()

    def run(host, **options):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        return run_processes(
            programs.resumable,
            tmp_path,
            **{"processes": 2, "devices": 1, "directory": saved},
            **{"records": f"file://{bucket}", **options},
        )

    assert_killed(run("first", die_after=4))
    values(run("second"))
    rows = (bucket / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 11))
    journals = {"events.jsonl": "resumed", "events.1.jsonl": "ended"}
    for name, kind in journals.items():
        assert f'"kind": "{kind}"' in (bucket / name).read_text()

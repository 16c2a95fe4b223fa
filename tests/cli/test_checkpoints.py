"""`replicator checkpoints` lists what is there, and finds what is damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from replicator.checkpoint import CheckpointStore, Snapshot
from replicator.cli import main as cli


@pytest.fixture
def folder(tmp_path):
    strategy = {"strategy": {"name": "fsdp"}}
    arrays = {"w": np.ones((64, 32), np.float32), "b": np.zeros(3)}
    with CheckpointStore(tmp_path) as store:
        for step, meta in {3: {}, 7: strategy}.items():
            store.save(Snapshot(step=step, arrays=arrays, meta=meta))
    return tmp_path


def damaged(folder):
    files = [path for path in (folder / f"{7:012d}").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return folder


def listed(folder, capsys, *more):
    code = cli.main(["checkpoints", str(folder), "--json", *more])
    return code, json.loads(capsys.readouterr().out)["checkpoints"]


def test_each_checkpoint_is_listed_with_what_it_holds(folder, capsys):
    code, (first, second) = listed(folder, capsys)
    assert code == 0
    assert [first["step"], second["step"]] == [3, 7]
    assert [first["strategy"], second["strategy"]] == [None, "fsdp"]
    assert second["leaves"] == 2
    assert second["writers"] == 1
    assert second["status"] == "there"
    assert second["size_bytes"] >= 64 * 32 * 4 + 3 * 8
    assert second["saved"].endswith("+00:00")


def test_the_table_has_the_same(folder, capsys):
    assert cli.main(["checkpoints", str(folder)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "fsdp" in line)
    assert line.split()[0] == "7"
    assert line.split()[-1] == "there"


def test_verified_ones_are_whole(folder, capsys):
    code, rows = listed(folder, capsys, "--verify")
    assert code == 0
    assert [row["status"] for row in rows] == ["whole", "whole"]


def test_a_damaged_file_is_found_by_verifying(folder, capsys):
    code, rows = listed(damaged(folder), capsys, "--verify")
    assert code == 1
    assert [row["status"] for row in rows] == ["whole", "damaged"]
    assert "damage" in rows[1]["damage"]


def test_a_damaged_manifest_is_found_without(folder, capsys):
    manifest = folder / f"{3:012d}" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert cli.main(["checkpoints", str(folder)]) == 1
    assert "step 3: " in capsys.readouterr().out


def test_checkpoints_of_the_former_format_are_listed_and_verified(tmp_path, capsys):
    stored = Path(__file__).parents[1] / "checkpoint" / "format1.zip"
    shutil.unpack_archive(stored, tmp_path)
    code, rows = listed(tmp_path, capsys, "--verify")
    assert code == 0
    assert {(row["format"], row["writers"], row["status"]) for row in rows} == {
        (1, 1, "whole")
    }


def test_a_bucket_is_listed_and_verified_by_its_url(tmp_path, capsys):
    url = f"file://{tmp_path}"  # with the commit of a bucket
    with CheckpointStore(url) as store:
        store.save(Snapshot(step=3, arrays={"w": np.ones((256, 128), np.float32)}))
    code, [row] = listed(url, capsys, "--verify")
    assert (code, row["step"], row["status"], row["saved"]) == (0, 3, "whole", None)
    (shard,) = tmp_path.glob("*/state-*/0/c.*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    code, [row] = listed(url, capsys, "--verify")
    assert (code, row["status"]) == (1, "damaged")


def test_another_directory_is_an_error(tmp_path, capsys):
    assert cli.main(["checkpoints", str(tmp_path)]) == 1
    assert "must be one that checkpoints were saved to" in capsys.readouterr().err

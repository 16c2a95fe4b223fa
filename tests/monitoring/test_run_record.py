"""The run record: what it holds, and that it is whole or absent."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from replicator.monitoring.run_record import set_aside, write_run_record


def record(folder, **arguments):
    return json.loads(write_run_record(folder, seed=7, arguments=arguments).read_text())


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *who, "-C", folder, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "checkout"
    git(".", "init", str(folder))
    (folder / "train.py").write_text("steps = 1\n")
    git(folder, "add", "train.py")
    git(folder, "commit", "-m", "first")
    monkeypatch.chdir(folder)
    return folder


def test_it_holds_seed_arguments_and_the_command(tmp_path):
    found = record(tmp_path / "new", steps=10, rate=0.1)
    assert (found["seed"], found["argv"]) == (7, sys.argv)
    assert found["arguments"] == {"steps": 10, "rate": 0.1}


def test_it_holds_versions_devices_and_the_time(tmp_path):
    before = datetime.datetime.now(datetime.UTC)
    found = record(tmp_path)
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"] == {
        "platform": "cpu",
        "kind": "cpu",
        "count": 8,
        "processes": 1,
    }
    started = datetime.datetime.fromisoformat(found["started_at"])
    assert before <= started <= datetime.datetime.now(datetime.UTC)


def test_it_knows_the_commit_and_whether_files_changed(checkout, tmp_path):
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "untracked.txt").touch()
    assert record(tmp_path)["git"] == {"commit": commit, "dirty": False}
    (checkout / "train.py").write_text("steps = 2\n")
    assert record(tmp_path)["git"] == {"commit": commit, "dirty": True}


def test_outside_a_checkout_git_is_null(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record(tmp_path)["git"] is None


def test_without_git_it_is_null(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert record(tmp_path)["git"] is None


def test_arguments_that_json_lacks_are_written_all_the_same(tmp_path):
    found = record(
        tmp_path, decay=float("nan"), fn=len, shape=(2, 3), limit=jax.numpy.inf
    )
    assert found["arguments"] == {
        "decay": "NaN",
        "fn": "<built-in function len>",
        "shape": [2, 3],
        "limit": "Infinity",
    }


class Broken:
    def __repr__(self):
        raise RuntimeError("no words")


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path):
    record(tmp_path, steps=10)
    with pytest.raises(RuntimeError, match="no words"):
        record(tmp_path, steps=Broken())
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run.json").read_text())["arguments"] == {"steps": 10}


def test_a_record_that_cannot_take_its_place_leaves_no_draft(tmp_path):
    (tmp_path / "run.json").mkdir()
    with pytest.raises(IsADirectoryError):
        record(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_an_earlier_run_left_is_set_aside_and_nothing_else_is(tmp_path):
    record(tmp_path)
    for name in ("metrics.jsonl", "events.1.jsonl", "train.py"):
        (tmp_path / name).touch()
    for name in ("tensorboard", "stacks", "checkpoints"):
        (tmp_path / name).mkdir()
    set_aside(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoints", "train.py", "earlier"}
    assert (tmp_path / "earlier" / "0" / "stacks").is_dir()


def test_the_record_is_set_aside_last(tmp_path, monkeypatch):
    record(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "tensorboard").mkdir()
    moved, rename = [], Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, to: (moved.append(path.name), rename(path, to))
    )
    set_aside(tmp_path)
    assert len(moved) == 3
    assert moved[-1] == "run.json"


def test_an_earlier_run_that_somebody_deleted_is_no_obstacle(tmp_path):
    (tmp_path / "earlier" / "1").mkdir(parents=True)
    record(tmp_path)
    set_aside(tmp_path)
    assert (tmp_path / "earlier" / "2" / "run.json").exists()


def test_who_may_read_new_files_may_read_the_record(tmp_path):
    other = tmp_path / "other"
    other.touch()
    path = write_run_record(tmp_path, seed=0, arguments={})
    assert path.stat().st_mode == other.stat().st_mode

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.run_folder import RunFolder, remove_abandoned
from replicator.rpc.security.secret import Secret
from tests.launchpad_bridge.programs import Counter


@pytest.fixture
def folder():
    folder = RunFolder()
    yield folder
    folder.close()


def test_only_its_owner_may_enter_it_and_read_the_secret(folder):
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "secret").stat().st_mode) == 0o600
    assert Secret.read(folder.path / "secret") == Secret.read(folder.path / "secret")


def lock_as_cleaners_do(path):
    """Lock a folder as `systemd-tmpfiles` does before it removes what is in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_it_is_held_against_who_removes_old_files_as_long_as_it_is_there(tmp_path):
    folder = RunFolder()
    with pytest.raises(BlockingIOError):
        lock_as_cleaners_do(folder.path)
    copy = os.open(folder.path, os.O_RDONLY)
    folder.close()
    fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(copy)


@pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="not there")
def test_systemd_tmpfiles_leaves_the_folder_of_a_run_and_takes_others(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with tempfile.TemporaryDirectory(prefix="tmpfiles-") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        folder, other = RunFolder(), Path(parent) / "other"
        other.write_text("old")
        rules = tmp_path / "rules.conf"
        rules.write_text(f"e {parent} - - - 0\n")
        subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True)
        assert not other.exists()
        assert (folder.path / "secret").exists()
        folder.close()


def test_a_comma_in_tmpdir_breaks_no_address(tmp_path, monkeypatch):
    odd = tmp_path / "a,b"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    program = lp.make_program(lp.CourierNode(Counter), name="odd")
    with lp.launch(program, "threads"):
        (node,) = program.get_all_nodes()
        assert node.create_handle().dereference().add(1) == 1


def test_it_goes_away_with_the_run(folder):
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_one_that_is_in_use_stays(folder):
    remove_abandoned(str(folder.path.parent))
    assert (folder.path / "secret").exists()


def test_one_whose_launcher_is_gone_is_removed(tmp_path):
    gone = tmp_path / "lp-gone"
    gone.mkdir(mode=0o700)
    (gone / "launcher.lock").touch()
    (gone / "socket").touch()
    remove_abandoned(str(tmp_path))
    assert not gone.exists()


def test_one_whose_launcher_died_before_it_had_a_lock_is_removed_later(tmp_path):
    begun, new = folders = [tmp_path / "lp-begun", tmp_path / "lp-new"]
    for folder in folders:
        folder.mkdir(mode=0o700)
        (folder / "launcher.new").touch()
    long_ago_s = time.time() - 3600
    os.utime(begun, (long_ago_s, long_ago_s))
    remove_abandoned(str(tmp_path))
    assert [begun.exists(), new.exists()] == [False, True]


def test_an_empty_folder_of_the_users_own_is_left_alone(tmp_path):
    kept = tmp_path / "lp-mine"
    kept.mkdir()
    os.utime(kept, (0, 0))
    remove_abandoned(str(tmp_path))
    assert kept.exists()


def test_logs_lie_in_it_where_nobody_else_can_enter(folder):
    assert folder.logs_path.parent == folder.path
    assert stat.S_IMODE(folder.logs_path.stat().st_mode) == 0o700


def test_logs_that_may_be_needed_outlive_it_and_nothing_else_does(folder):
    (folder.logs_path / "node.log").touch()
    folder.close(keeps_logs=True)
    remove_abandoned(str(folder.path.parent))
    assert os.listdir(folder.path) == ["logs"]
    assert (folder.logs_path / "node.log").exists()
    shutil.rmtree(folder.path)


def test_empty_logs_are_not_kept(folder):
    folder.close(keeps_logs=True)
    assert not folder.path.exists()


def test_logs_of_a_killed_launcher_are_swept(tmp_path):
    logs = tmp_path / "lp-gone" / "logs"
    logs.mkdir(parents=True, mode=0o700)
    (logs / "node.log").touch()
    (tmp_path / "lp-gone" / "launcher.lock").touch()
    remove_abandoned(str(tmp_path))
    assert not logs.parent.exists()


def test_its_lock_is_the_last_to_go(folder, monkeypatch):
    (folder.path / "tls").mkdir()
    (folder.path / "tls" / "key").touch()
    seen = []
    rmtree = shutil.rmtree
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda path, **options: (
            seen.append((Path(path).name, sorted(os.listdir(path)))),
            rmtree(path, **options),
        ),
    )
    folder.close()
    assert sorted(seen[:-1]) == [("logs", []), ("tls", ["key"])]
    assert seen[-1] == (folder.path.name, ["launcher.lock"])


def test_what_is_no_folder_of_a_run_is_left_alone(tmp_path):
    kept = tmp_path / "lp-mine"
    kept.mkdir()
    (kept / "thesis.tex").touch()
    os.symlink(kept, tmp_path / "lp-link")
    remove_abandoned(str(tmp_path))
    assert (kept / "thesis.tex").exists()

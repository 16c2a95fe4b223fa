import os
import stat

import pytest

from replicator.launchpad_bridge.run_folder import RunFolder, remove_abandoned
from replicator.rpc.security.secret import Secret


@pytest.fixture
def folder():
    folder = RunFolder()
    yield folder
    folder.close()


def test_only_its_owner_may_enter_it_and_read_the_secret(folder):
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.secret_path.stat().st_mode) == 0o600
    assert Secret.read(folder.secret_path) == Secret.read(folder.secret_path)


def test_it_goes_away_with_the_run(folder):
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_one_that_is_in_use_stays(folder):
    remove_abandoned(str(folder.path.parent))
    assert folder.secret_path.exists()


def test_one_whose_launcher_is_gone_is_removed(tmp_path):
    gone = tmp_path / "lp-gone"
    gone.mkdir(mode=0o700)
    (gone / "launcher.lock").touch()
    (gone / "socket").touch()
    remove_abandoned(str(tmp_path))
    assert not gone.exists()


def test_what_is_no_folder_of_a_run_is_left_alone(tmp_path):
    kept = tmp_path / "lp-mine"
    kept.mkdir()
    (kept / "thesis.tex").touch()
    os.symlink(kept, tmp_path / "lp-link")
    remove_abandoned(str(tmp_path))
    assert (kept / "thesis.tex").exists()

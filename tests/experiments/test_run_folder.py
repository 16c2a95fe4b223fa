"""Whose a folder is, and what of it outlives a run."""

import dataclasses
import importlib
import json
import re

import pytest

from experiments import run_folder
from experiments.config_flags import Count, Rate, Settings
from replicator.errors import ArgumentError
from tests.experiments.command import EXPERIMENTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Flags of no experiment."""

    width: Count = 8
    rate: Rate = 2e-4
    steps: Count = 10
    directory: str = ""


FREE = {"steps", "directory"}


@pytest.fixture
def saved(tmp_path):
    """The folder of a run that has a checkpoint."""
    run_folder.claim(tmp_path, Config(), free=FREE)
    save(tmp_path)
    return tmp_path


def save(directory):
    (run_folder.checkpoints_of(directory) / "000000000007").mkdir(parents=True)


SAVES = re.compile(
    r"saved_in\(|in_turn\.learn\(|agent_program\.learn\(|checkpoint_dir="
)
CLAIMS = re.compile(r"run_folder\.claim\(|seeds\.run_all\(")
KEEPS = sorted(name for name, text in EXPERIMENTS.items() if CLAIMS.search(text))


def test_a_run_with_another_setting_is_refused_by_its_flag(saved):
    with pytest.raises(ArgumentError) as error:
        run_folder.claim(saved, Config(rate=1e-3), free=FREE, flag="checkpoint_dir")
    assert str(error.value) == (
        f"`--rate` must be 0.0002, that of the run in {saved}, got 0.001. Use "
        "another --checkpoint_dir."
    )


def test_the_run_itself_goes_on_as_long_and_wherever_it_is_told(saved):
    run_folder.claim(saved, Config(steps=20, directory="elsewhere"), free=FREE)


def test_a_run_of_which_nothing_is_saved_keeps_no_folder(tmp_path):
    for width in (8, 16):
        run_folder.claim(tmp_path / "new", Config(width=width), free=FREE)
    save(tmp_path / "new")
    with pytest.raises(ArgumentError, match="`--width` must be 16"):
        run_folder.claim(tmp_path / "new", Config(), free=FREE)


def test_checkpoints_whose_settings_nobody_knows_are_not_gone_on_from(tmp_path):
    save(tmp_path)
    with pytest.raises(ArgumentError, match="`--directory` must be the folder of a"):
        run_folder.claim(tmp_path, Config(), free=FREE)


def test_a_run_that_must_be_kept_needs_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="`--directory` must be a folder"):
        run_folder.claim("", Config(), free=FREE)
    assert not [*tmp_path.iterdir()]


def test_a_flag_that_came_later_was_what_it_is_by_default(saved):
    (saved / "settings.json").write_text(json.dumps({"rate": 2e-4}))
    run_folder.claim(saved, Config(), free=FREE)
    with pytest.raises(ArgumentError, match="`--width` must be 8, that of the run"):
        run_folder.claim(saved, Config(width=16), free=FREE)


def test_settings_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def cut(*args):
        raise OSError("no space")

    monkeypatch.setattr(run_folder.Disk, "rename", cut)
    with pytest.raises(OSError, match="no space"):
        run_folder.claim(tmp_path, Config(), free=FREE)
    assert not (tmp_path / "settings.json").exists()


def test_a_folder_that_is_released_is_anybodys(saved):
    assert run_folder.last_saved(saved) == 7
    run_folder.release(saved)
    assert run_folder.last_saved(saved) == 0
    run_folder.claim(saved, Config(width=16), free=FREE)


def rows_in(directory):
    """Leave rows of a replay table in a folder; return where."""
    rows = run_folder.rows_of(directory)
    rows.mkdir()
    (rows / "table").touch()
    return rows


def test_rows_of_a_replay_table_are_kept_and_released_with_the_run(saved):
    rows = rows_in(saved)
    run_folder.claim(saved, Config(), free=FREE)
    assert rows.exists()
    run_folder.release(saved)
    assert not rows.exists()


def test_rows_of_a_run_that_saved_nothing_else_are_nobodys(tmp_path):
    rows = rows_in(tmp_path)
    run_folder.claim(tmp_path, Config(), free=FREE)
    assert not rows.exists()


def test_a_folder_of_the_user_that_has_the_name_of_the_rows_stays(tmp_path):
    own = run_folder.rows_of(tmp_path) / "game.txt"
    own.parent.mkdir()
    own.touch()
    run_folder.claim(tmp_path, Config(), free=FREE)
    run_folder.release(tmp_path)
    assert own.exists()


def other(field):
    """Return another value of a field than its default."""
    if isinstance(field.default, bool):
        return not field.default
    return "other" if isinstance(field.default, str) else field.default + 1


def test_every_experiment_that_is_saved_claims_its_folder():
    saved = {name for name, text in EXPERIMENTS.items() if SAVES.search(text)}
    assert saved
    assert saved <= {*KEEPS}


@pytest.mark.parametrize("name", KEEPS)
def test_every_flag_of_an_experiment_but_the_free_ones_is_the_folders(name, tmp_path):
    module = importlib.import_module(f"experiments.{name}")
    run_folder.claim(tmp_path, module.Config(), free=module.FREE)
    save(tmp_path)
    kept = json.loads((tmp_path / "settings.json").read_text())
    for field in dataclasses.fields(module.Config):
        another = json.dumps(kept | {field.name: other(field)})
        (tmp_path / "settings.json").write_text(another)
        if field.name in module.FREE:
            run_folder.claim(tmp_path, module.Config(), free=module.FREE)
        else:
            refused = re.escape(f"`--{field.name}` must be {other(field)}, that of")
            with pytest.raises(ArgumentError, match=refused):
                run_folder.claim(tmp_path, module.Config(), free=module.FREE)

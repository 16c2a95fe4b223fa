"""Compiled programs are kept where only this user can touch them."""

import os
import stat

import jax
import jax.numpy as jnp
import pytest

import replicator
from replicator.base.host.compilation_cache import enable_compilation_cache
from tests.steps import replicas


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Give each test a home of its own, and put JAX's setting back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("REPLICATOR_COMPILATION_CACHE", raising=False)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache" / "replicator" / "xla"
    jax.config.update("jax_compilation_cache_dir", before)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_replicator_turns_it_on_in_a_private_directory(own_cache):
    replicator.Replicator()
    assert jax.config.jax_compilation_cache_dir == str(own_cache)
    assert mode(own_cache) == 0o700


def test_a_umask_that_allows_all_changes_nothing(own_cache):
    before = os.umask(0)
    try:
        assert enable_compilation_cache() == own_cache
    finally:
        os.umask(before)
    assert mode(own_cache) == 0o700


def test_a_second_replicator_keeps_it(own_cache):
    replicator.Replicator()
    replicator.Replicator()
    assert jax.config.jax_compilation_cache_dir == str(own_cache)


def test_an_argument_turns_it_off(own_cache):
    replicas(8)
    assert jax.config.jax_compilation_cache_dir is None
    assert not own_cache.exists()


def test_a_variable_turns_it_off(own_cache, monkeypatch):
    monkeypatch.setenv("REPLICATOR_COMPILATION_CACHE", "0")
    replicator.Replicator()
    assert jax.config.jax_compilation_cache_dir is None
    assert not own_cache.exists()


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o770, 0o777, 0o750])
def test_a_directory_open_to_others_is_refused(bits, own_cache, caplog):
    own_cache.mkdir(parents=True)
    own_cache.chmod(bits)
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert f"got mode {bits:o} of user" in caplog.text
    assert "Run `chmod 700` on it" in caplog.text


def test_a_link_to_elsewhere_is_refused(own_cache, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    own_cache.parent.mkdir(parents=True)
    own_cache.symlink_to(elsewhere)
    assert enable_compilation_cache() is None


def test_a_parent_that_others_may_write_to_is_refused(own_cache, caplog):
    # Whoever may write there can put another directory in its place.
    own_cache.mkdir(parents=True, mode=0o700)
    own_cache.parent.chmod(0o777)
    assert enable_compilation_cache() is None
    assert str(own_cache.parent) in caplog.text


def test_a_file_in_the_way_is_no_error(own_cache, caplog):
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("")
    assert enable_compilation_cache() is None
    assert f"nothing is kept in {own_cache}" in caplog.text


def test_a_users_own_setting_is_kept(own_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    replicator.Replicator()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not own_cache.exists()


def test_without_a_variable_it_lies_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert enable_compilation_cache() == tmp_path / ".cache" / "replicator" / "xla"


def test_programs_are_kept_in_it(own_cache, monkeypatch):
    from jax.experimental.compilation_cache import compilation_cache

    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    compilation_cache.reset_cache()
    try:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        replicator.Replicator().init(lambda key: {"w": jnp.arange(7.0) * 3})
        assert any(own_cache.iterdir())
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
        compilation_cache.reset_cache()

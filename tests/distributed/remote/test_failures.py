"""What ssh prints, and what to do about it."""

import pytest

from replicator.distributed.remote.failures import describe_unusable

REMEDIES = {
    "Host key verification failed.": "compare the fingerprint",
    "No ED25519 host key is known for b and you have requested strict checking.": (
        "compare the fingerprint"
    ),
    "Host key for b has changed and you have requested strict checking.": "stand in",
    "jane@b: Permission denied (publickey,password).": "ssh-copy-id",
    "ssh: Could not resolve hostname b: Name or service not known": "address",
    "ssh: connect to host b port 22: Connection timed out": "Start it",
    "ssh: connect to host b port 22: Connection refused": "Start it",
    "bash: line 1: /opt/python: No such file or directory": "python_venv",
    "zsh:1: no such file or directory: /opt/python": "python_venv",
    "Python must be 3.11 or newer, got 3.8.1": "python_venv",
}
MAY_PASS = ("Could not resolve", "timed out", "refused")


@pytest.mark.parametrize("line", REMEDIES)
def test_an_error_of_ssh_names_its_remedy(line):
    text, comes_again = describe_unusable("b", ["Welcome", line], was_used=False)
    assert REMEDIES[line] in text
    assert line.strip() in text
    assert comes_again


@pytest.mark.parametrize("line", REMEDIES)
def test_of_a_host_that_was_used_only_its_silence_may_pass(line):
    _, comes_again = describe_unusable("b", [line], was_used=True)
    assert comes_again is not any(word in line for word in MAY_PASS)


@pytest.mark.parametrize(
    "line",
    [
        "Warning: Identity file /k not accessible: No such file or directory.",
        "bash: warning: setlocale: LC_ALL: cannot change locale (en_US.UTF-8): "
        "No such file or directory",
        ".bashrc: line 3: setup.bash: No such file or directory",
    ],
)
def test_a_file_that_a_login_misses_is_no_missing_python(line):
    printed = [line, "Connection closed by 10.0.0.2 port 22"]
    text, comes_again = describe_unusable("b", printed, was_used=True)
    assert "Connection closed" in text
    assert not comes_again


def test_an_unknown_error_is_quoted():
    text, comes_again = describe_unusable("b", ["x", "strange"], was_used=False)
    assert "'strange'" in text
    assert not comes_again

"""The command that reaches a host: no name is an option, or read by a shell."""

import shlex

import pytest

from replicator.distributed.remote.bundle import remote_command
from replicator.distributed.remote.remote_host import RemoteHost, check_via, connection
from replicator.errors import ArgumentError


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=reboot", "a b", "a;b", "$(b)", "`b`", "a\nb", "", "a/b", "é"],
)
@pytest.mark.parametrize("field", ["address", "user"])
def test_names_that_are_more_than_names_are_refused(field, name):
    with pytest.raises(ArgumentError, match=field):
        RemoteHost(**{"address": "a", field: name})


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_is_one(port):
    with pytest.raises(ArgumentError, match="port"):
        RemoteHost(address="a", port=port)


@pytest.mark.parametrize("variable", ["", "a=b", "a\0"])
def test_a_variable_that_no_environment_can_hold_is_refused(variable):
    with pytest.raises(ArgumentError, match="environment"):
        RemoteHost(address="a", environment={variable: "x"})


def test_ssh_never_asks_and_takes_no_name_for_an_option():
    host = RemoteHost(address="b", user="jane", port=2222, key_file="~/.ssh/key")
    words = connection(host, "true")
    assert "BatchMode=yes" in words
    assert "ConnectTimeout=10" in words
    assert "ControlMaster=no" in words
    assert words[words.index("--") :] == ["--", "b", "true"]
    assert words[words.index("-l") :][:6] == [
        *("-l", "jane", "-i", "~/.ssh/key", "-p", "2222")
    ]


def test_what_is_not_given_is_left_to_the_configuration_of_ssh():
    assert not {"-l", "-i", "-p"} & {*connection(RemoteHost(address="b"), "true")}


def test_ssh_gets_an_address_without_brackets():
    assert connection(RemoteHost(address="[fe80::1]"), "true")[-2] == "fe80::1"


def test_another_command_gets_the_host_in_its_words_and_no_shell():
    words = connection(
        RemoteHost(address="b"), "x 'y z'", via="ssh -J 'my gate' {host} -- "
    )
    assert words == ["ssh", "-J", "my gate", "b", "--", "x 'y z'"]


@pytest.mark.parametrize("via", ["ssh gate", "ssh '{host}", ""])
def test_another_command_without_a_place_for_the_host_is_refused(via):
    with pytest.raises(ArgumentError, match="via"):
        check_via(via)


def test_the_command_line_on_the_host_is_words_alone():
    python = "/a b/$HOME/python"
    assert shlex.split(remote_command(python))[:4] == [python, "-I", "-S", "-c"]


def test_the_home_of_another_user_is_found_there():
    assert shlex.split(remote_command("~/env/bin/python"))[0] == "env/bin/python"


def test_the_others_reach_a_host_without_the_user():
    assert RemoteHost(address="jane@b").name == "b"

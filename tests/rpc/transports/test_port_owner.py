"""Who has a port is found, and nobody is named who has not."""

import os
import socket

from replicator.rpc.transports.port_owner import owner_of_port


def test_the_owner_of_a_port_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert owner_of_port(server.getsockname()[1]) == os.getpid()


def test_the_owner_is_found_behind_a_file_closed_while_it_is_looked_for():
    # The listing of open files is itself an open file, at the lowest number free.
    lower = os.open(os.devnull, os.O_RDONLY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.close(lower)
        assert owner_of_port(server.getsockname()[1]) == os.getpid()


def test_a_port_that_nobody_listens_at_has_no_owner():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert owner_of_port(bound.getsockname()[1]) is None

import sys
import types
from typing import ClassVar

import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import ArgumentError


class FakeServer:
    """Stands for Reverb's; keeps what it was made of."""

    made: ClassVar[list] = []

    def __init__(self, **options):
        self.options = options
        self.made.append(self)

    def stop(self):
        self.options["stopped"] = True


@pytest.fixture
def reverb(monkeypatch):
    FakeServer.made.clear()
    module = types.SimpleNamespace(Server=FakeServer, Client=lambda address: address)
    monkeypatch.setitem(sys.modules, "reverb", module)
    return module


def test_a_replay_buffer_listens_on_its_port_until_the_stop(reverb):
    program = lp.Program("p")
    node = lp.ReverbNode(lambda: ["table"])
    handle = program.add_node(node, label="replay")
    program.add_node(
        lp.PyNode(lambda address: (lp.stop(), address)[1], handle), "reader"
    )
    run = lp.launch(program)
    run.wait(60)
    (server,) = FakeServer.made
    port = lp.get_port_from_address(run.results["reader"])
    assert server.options == {
        "tables": ["table"],
        "port": port,
        "checkpointer": None,
        "stopped": True,
    }


def test_the_time_between_checkpoints_must_be_positive():
    with pytest.raises(ValueError, match="time delta must be positive"):
        lp.ReverbNode(list, checkpoint_time_delta_minutes=0)


def test_a_time_between_checkpoints_without_reverb_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "reverb", None)
    node = lp.ReverbNode(list, checkpoint_time_delta_minutes=10)
    with pytest.raises(ArgumentError, match="must be None without Reverb, got 10"):
        node.run()

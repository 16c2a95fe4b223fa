import pickle

import pytest

import replicator.launchpad_bridge as lp


class Fixed(lp.AbstractAddressBuilder):
    def build(self):
        return "host:7"


@pytest.mark.parametrize("name", ["Big", "1st", "with-dash", ""])
def test_a_bad_name_is_refused(name):
    with pytest.raises(ValueError, match=r"Wrong address name: .* does not match"):
        lp.Address(name)


def test_an_address_is_what_its_builder_makes():
    address = lp.Address("good1")
    address.bind(Fixed())
    assert address.resolve() == "host:7"
    assert lp.get_port_from_address(address.resolve()) == 7


def test_an_address_without_a_node_cannot_be_resolved():
    with pytest.raises(RuntimeError, match="hasn't been assigned to any node"):
        lp.Address().resolve()


def test_an_address_belongs_to_one_node(caplog):
    address, node = lp.Address(), lp.PyNode(print)
    address.assign(node)
    assert node.addresses == [address]
    address.assign(node)
    assert "twice on the same node" in caplog.text
    with pytest.raises(ValueError, match="already assigned to another node"):
        lp.PyNode(print).allocate_address(address)


def test_an_address_travels_without_its_node():
    address, node = lp.Address(), lp.PyNode(lambda: None)
    address.assign(node)
    twin = pickle.loads(pickle.dumps(address))
    with pytest.raises(RuntimeError, match="Restored from pickle node named"):
        pickle.loads(pickle.dumps(twin)).resolve()


def test_ports_of_this_host_are_never_given_twice():
    addresses = {lp.SimpleLocalAddressBuilder().build() for _ in range(200)}
    assert len(addresses) == 200


def test_a_named_port_is_looked_up_in_the_environment(monkeypatch):
    monkeypatch.setenv("LP_PORT_baz", "1234")
    assert lp.get_port_from_address("foo:baz") == 1234

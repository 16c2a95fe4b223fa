import copy
import pickle

import pytest

import replicator.launchpad_bridge as lp
from replicator.launchpad_bridge.handles import dereferenced, handles_in


class Plain(lp.Handle):
    def __init__(self, client):
        self.client = client

    def dereference(self):
        return self.client


def test_what_is_no_handle_stands_for_itself():
    assert lp.maybe_dereference(3) == 3
    assert lp.maybe_dereference(Plain("client")) == "client"


def test_handles_are_found_in_nested_arguments_and_in_deferred_ones():
    handles = [Plain(i) for i in range(4)]
    deferred = lp.Deferred(dict, handles[2], inner=lp.Deferred(dict, handles[3]))
    found = dict(handles_in(((handles[0], [{"x": handles[1]}]), {"d": deferred})))
    assert found == {
        "args[0]": handles[0],
        "args[1][0]['x']": handles[1],
        "kwargs['d'].args[0]": handles[2],
        "kwargs['d'].kwargs['inner'].args[0]": handles[3],
    }


def test_a_deferred_that_stands_in_two_places_is_looked_into_once():
    handle = Plain(1)
    deferred = lp.Deferred(dict, handle)
    handles = []
    lp.extract_handles([deferred, deferred], handles)
    assert handles == [handle]


def test_clients_stand_where_handles_stood():
    assert dereferenced(([Plain(1)], {"a": (Plain(2), 3)})) == ([1], {"a": (2, 3)})


def test_a_handle_travels_without_the_node_it_is_of():
    node = lp.CourierNode(dict)
    handle = node.create_handle()
    assert handle.node is node
    for twin in (pickle.loads(pickle.dumps(handle)), copy.copy(handle)):
        assert twin.node is None


def test_the_handle_of_a_py_node_cannot_become_a_client():
    with pytest.raises(NotImplementedError, match="cannot be dereferenced"):
        lp.PyNode(print).create_handle().dereference()


def test_a_method_called_on_a_handle_is_refused_with_a_hint():
    handle = lp.CourierNode(dict).create_handle()
    with pytest.raises(AttributeError, match=r"handle\.dereference\(\)\.step"):
        handle.step()


def test_a_handle_used_before_the_launch_is_refused_by_the_nodes_name():
    program = lp.Program("early")
    handle = program.add_node(lp.CourierNode(dict), label="producer")
    with pytest.raises(RuntimeError, match=r"'producer'.*has not been bound"):
        handle.dereference()


def test_a_handle_used_after_its_run_is_refused():
    program = lp.Program("late")
    handle = program.add_node(lp.CourierNode(dict), label="producer")
    with lp.launch(program):
        pass
    with pytest.raises(lp.LaunchError, match="a run that is over"):
        handle.dereference()


@pytest.mark.parametrize(
    ("given", "timeout_s"),
    [({}, 60.0), ({"call_timeout": 5}, 5), ({"call_timeout": None}, None)],
)
def test_a_client_takes_the_names_of_launchpad(given, timeout_s):
    node = lp.CourierNode(dict, courier_client_kwargs={**given, "compress": True})
    lp.bind_addresses([node])
    with node.create_handle().dereference() as client:
        assert client._timeout_s == timeout_s


def test_options_that_do_not_exist_are_refused_when_the_node_is_made():
    with pytest.raises(lp.ProgramError, match=r"courier_client_kwargs.*timeout"):
        lp.CourierNode(dict, courier_client_kwargs={"timeout": 3})
    with pytest.raises(lp.ProgramError, match=r"courier_kwargs.*threads"):
        lp.CourierNode(dict, courier_kwargs={"threads": 3})

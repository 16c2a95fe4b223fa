import contextlib
import socket
import threading
import time

import pytest

import replicator.launchpad_bridge as lp
from replicator import errors as lp_errors
from replicator.errors import ConnectionLostError
from replicator.launchpad_bridge.running import node_context
from replicator.rpc.server.server import Server


class Base:
    def inherited(self):
        return "inherited"


class Service(Base):
    hidden_value = 3

    def __init__(self):
        self.done = threading.Event()

    def ping(self):
        return "pong"

    def __call__(self):
        return "called"

    def finish(self):
        self.done.set()

    def _private(self):
        raise AssertionError

    def run(self):
        self.done.wait(60)
        return "ran"


class OwnServer(Service):
    def set_courier_server(self, server):
        self.server = server

    def run(self):
        self.server.Bind("extra", lambda: "extra")
        self.server.Start()
        assert self.server.has_started
        self.done.wait(60)
        self.server.Stop()
        self.server.Join()
        return "served"


@pytest.fixture
def serve():
    """Run a node in a thread, without a program; return a client of it."""
    opened = []

    def serve(node):
        lp.bind_addresses([node])
        results = []
        thread = threading.Thread(target=lambda: results.append(node.run()))
        thread.start()
        client = node.create_handle().dereference()
        opened.append((client, thread, results))
        return client

    yield serve
    for client, thread, results in opened:
        client.finish()
        thread.join(60)
        client.close()
        assert results in (["ran"], ["served"])


def test_a_node_serves_the_public_methods_that_its_class_declares(serve):
    client = serve(lp.CourierNode(Service))
    assert client.ping() == "pong"
    assert client() == "called"
    assert client.futures.inherited().result() == "inherited"
    assert lp.list_methods(client) == ["__call__", "finish", "inherited", "ping", "run"]


def test_an_object_that_wants_its_server_starts_and_stops_it(serve):
    client = serve(lp.CourierNode(OwnServer))
    assert client.extra() == "extra"
    assert "set_courier_server" not in lp.list_methods(client)


def test_a_function_in_place_of_a_class_runs_and_serves_nothing():
    stopped = []

    def work():
        stopped.append(lp.wait_for_stop(0))
        lp.stop()

    program = lp.Program("p")
    program.add_node(lp.CourierNode(work), label="work")
    lp.launch(program).wait(60)
    assert stopped == [False]


def test_configure_replaces_the_arguments():
    a, b = lp.CourierNode(Service), lp.CourierNode(Service, 1)
    handle = a.create_handle()
    b.configure(key=handle)
    assert b.input_handles == [handle]
    assert b.arguments == ((), {"key": handle})


def test_errors_call_a_server_by_the_name_it_was_given(serve):
    options = {"thread_pool_size": 2, "name": "named"}
    client = serve(lp.CourierNode(Service, courier_kwargs=options))
    with pytest.raises(lp_errors.RpcError, match="'named'"):
        client.unknown()


def test_values_are_copied_unless_a_launcher_says_otherwise():
    class Keeper:
        def __init__(self):
            self.kept = [1]

        def give(self):
            return self.kept

    def is_shared(launcher):
        program = lp.Program("p")
        keeper = program.add_node(lp.CourierNode(Keeper), label="keeper")
        with lp.launch(program, launcher):
            client = keeper.dereference()
            return client.give() is client.give()

    assert not is_shared(lp.Threads())
    assert is_shared(lp.Threads(by_reference=True))


def test_a_handler_finds_its_node_also_where_several_run_in_one_process():
    class Named:
        def name(self):
            return node_context.get_context().worker, lp.stop_event().is_set()

    program = lp.Program("p")
    with program.group("named"):
        handles = [program.add_node(lp.CourierNode(Named)) for _ in range(3)]
    with lp.launch(program):
        names = [handle.dereference().name() for handle in handles]
    assert names == [(f"named/{i}", False) for i in range(3)]


class Thief(Service):
    """Listens where its own node wants to."""

    def __init__(self, address):
        super().__init__()
        server = Server(Service(), address=address.resolve()).start()
        lp.register_stop_handler(server.stop)


def test_an_address_that_is_taken_fails_the_node_and_is_named():
    node = lp.CourierNode(Thief)
    node.configure(node.courier_address)
    program = lp.Program("p")
    program.add_node(node, label="robbed")
    program.add_node(lp.PyNode(lp.wait_for_stop, 20), label="other")
    with pytest.raises(lp.NodeFailedError, match="`robbed` raised AddressInUse"):
        lp.launch(program).wait(60)


@pytest.mark.slow
def test_a_port_that_is_taken_fails_the_node_and_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = lp.Program("p")
        node = lp.CourierNode(Service, courier_kwargs={"port": port})
        program.add_node(node, label="robbed")
        with pytest.raises(lp.NodeFailedError, match=f"`robbed` .*{port}"):
            lp.launch(program).wait(60)


class Leaves:
    def ping(self):
        return "pong"

    def run(self):
        return None


class CallsForEver:
    def __init__(self, server):
        self.server = server

    def run(self):
        while not lp.wait_for_stop(0.0):
            # The one during which the server leaves may be lost; the next waits for it.
            with contextlib.suppress(ConnectionLostError):
                self.server.ping()


def test_who_waits_for_a_server_that_has_left_does_not_hold_up_a_stop():
    program = lp.Program("left")
    with program.group("server"):
        handle = program.add_node(lp.CourierNode(Leaves))
    with program.group("caller"):
        program.add_node(lp.PyClassNode(CallsForEver, handle))
    run = lp.launch(program, "threads", stop_grace_s=100.0)
    run.wait(60, labels=["server"])
    started_s = time.monotonic()
    run.stop()
    run.wait(60)
    assert time.monotonic() - started_s < 30  # its deadline is 60 s, its grace 100


class Async:
    async def answer(self):
        return 1


class AsyncRun:
    async def run(self):
        return 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: lp.CourierNode(Async),
        lambda: lp.CourierNode(AsyncRun),
        lambda: lp.PyClassNode(AsyncRun),
        lambda: lp.PyNode(Async().answer),
        lambda: lp.register_stop_handler(Async().answer),
    ],
)
def test_an_async_def_is_refused_when_its_node_is_made(make):
    with pytest.raises(ValueError, match="must be a plain function, got `async def`"):
        make()


@pytest.mark.parametrize("constructor", [Async, AsyncRun])
@pytest.mark.parametrize("launch_type", ["threads", lp.TestMode(seed=0)])
def test_one_that_a_function_makes_fails_its_node_on_each_transport(
    constructor, launch_type
):
    program = lp.make_program(lp.CourierNode(lambda: constructor()))
    launched = lp.launch(program, launch_type)
    with pytest.raises(lp.NodeFailedError, match="plain function"), launched as run:
        run.wait(60)


def test_an_async_def_that_is_no_concern_of_a_node_s_is_left_alone():
    lp.PyClassNode(Async)
    lp.CourierNode(type("Private", (Async,), {"answer": None, "_f": Async.answer}))

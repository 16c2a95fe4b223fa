"""Islands that are connected to: what they refuse, and whom."""

import contextlib
import dataclasses
import pickle
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from replicator import controller, rpc
from replicator.controller.islands.exports import function_of_export
from replicator.controller.islands.hosted import PeerIsland
from replicator.controller.islands.protocol import Drop, Put, Receive, Send
from replicator.controller.islands.server import IslandService
from replicator.controller.islands.waiting.arrivals import IslandValue
from replicator.controller.islands.waiting.outcome import Outcome
from replicator.controller.islands.wire import (
    layout_from,
    order_data,
    order_from,
    shards_data,
    shards_from,
)
from replicator.controller.layouts import SliceLayout
from replicator.errors import ArgumentError, AuthenticationError, ConnectionLostError
from replicator.rpc.security.certificates import make_certificates
from replicator.rpc.security.tls import Tls

ONES = np.ones(2, np.float32)
LIMIT_S = 60
LAYOUT = SliceLayout(axes=(("x", 2), ("y", 1)), spec=P(("x", "y"), None))
SEND = Send(
    input=1, output=2, places=(0, 1), target="island1", sources=(1, 1), targets=(0, 1)
)
RECEIVE = Receive(
    source="a", output=2, places=(0,), senders=(1,), layout=LAYOUT, shape=(4, 1)
)


@pytest.fixture
def island():
    with controller.IslandServer("unix:", devices=jax.devices()[:1]) as server:
        yield server


def joined(service, session="s"):
    service.join(session, "island0", {}, 300.0)
    return service


@pytest.fixture
def service():
    service = IslandService(
        [controller.local(islands=1, devices=1)._islands["island0"].devices[0]]
    )
    yield joined(service)
    service.leave("s")


def test_a_second_controller_is_refused_until_the_first_has_left(island):
    with controller.connect([island.address], lost_after_s=300) as pw:
        assert np.asarray(pw.put(ONES, pw.slice(1))).tolist() == [1.0, 1.0]
        with pytest.raises(ArgumentError, match="one controller at a time"):
            controller.connect([island.address])
    with controller.connect([island.address], lost_after_s=300) as pw:
        assert np.asarray(pw.put(ONES, pw.slice(1))).tolist() == [1.0, 1.0]


def test_a_callback_is_refused_with_what_to_do(island):
    def op(x):
        return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with (
        controller.connect([island.address], lost_after_s=300) as pw,
        pytest.raises(ArgumentError, match=r"Use `controller.start`, which takes"),
    ):
        pw.fn(op, pw.slice(1))(ONES)


def test_a_stranger_is_refused(island):
    with pytest.raises(AuthenticationError):
        controller.connect([island.address], rpc.Secret.generate())


def test_an_island_that_is_not_there_is_an_error_at_once():
    with pytest.raises(ConnectionLostError):
        controller.connect(["unix:/no/such/island"])


def test_another_version_of_jax_is_refused():
    about = ["0.0.1", "cpu", 0, [["cpu", 1, 0]], ""]
    with (
        rpc.Server().bind("describe", lambda: about) as server,
        pytest.raises(ArgumentError, match="version of JAX"),
    ):
        controller.connect([server.address])


def test_bytes_that_are_no_export_are_refused(service):
    with pytest.raises(ArgumentError, match=r"bytes of `jax.export`"):
        service.load("s", 0, {}, b"no export")
    with pytest.raises(ArgumentError, match="Only the process that started"):
        service.load("s", 0, {}, b"")


def test_an_export_that_calls_back_is_refused():
    call = jax.ffi.ffi_call("a_callback", jax.ShapeDtypeStruct((2,), np.float32))
    allowed = jax.export.DisabledSafetyCheck.custom_call("a_callback")
    exported = jax.export.export(
        jax.jit(call), platforms=("cpu",), disabled_checks=[allowed]
    )(ONES)
    with pytest.raises(ArgumentError, match="'a_callback'"):
        function_of_export(bytes(exported.serialize()))


def test_a_message_that_is_not_the_next_is_refused_by_number(service):
    service.take("s", 0, [])
    with pytest.raises(ArgumentError, match="of island0, 1, got 2"):
        service.take("s", 2, [])


def test_what_no_controller_sends_is_refused(service):
    with pytest.raises(ArgumentError, match="got 'format'"):
        service.take("s", 0, [["format", 1]])
    with pytest.raises(ArgumentError, match="an order must be one"):
        service.take("s", 1, [["orders", 0, [["put", "x", 3]]]])


def test_a_run_that_keeps_nothing_is_reported_when_it_ended(service):
    orders = [Put(output=0, places=(0,), layout=None), Drop(values=(0,))]
    listed = [order_data(each, lambda _: 0) for each in orders]
    waiting = ThreadPoolExecutor(1).submit(service._of("s").reports, 10 * LIMIT_S)
    run = ["run", 0, 7, 0, [], [[0, ONES]]]
    service.take("s", 0, [["orders", 0, listed], run])
    is_closed, [[*report, age_s]], answers = waiting.result(LIMIT_S)
    assert (is_closed, report, answers) == (False, [7, [0], None], [])
    assert age_s >= 0


PUTS = [Put(output=n, places=(0,), layout=None) for n in (0, 1)]


def took(service):
    """Have a run with two values, and wait until all is reported; return answers."""
    listed = [order_data(each, lambda _: 0) for each in PUTS]
    run = ["run", 0, 7, 0, [], [[0, ONES], [1, 2 * ONES]]]
    service.take("s", 1, [["orders", 0, listed], run])
    answers, left = [], 2
    while left:
        _, reports, more = service._of("s").reports(LIMIT_S)
        left -= len(reports)
        answers += more
    return answers


def test_values_that_were_asked_for_together_come_with_the_report_of_the_last(service):
    service.take("s", 0, [["ask", [[7, 1], [7, 0]]]])
    ((keys, arrays),) = took(service)
    assert keys == [(7, 1), (7, 0)]
    assert [np.asarray(array).tolist() for array in arrays] == [[2, 2], [1, 1]]


def test_what_nobody_asked_for_stays_and_what_is_there_is_answered_at_once(service):
    service.take("s", 0, [])
    assert took(service) == []
    while not service._of("s")._island.is_computed((7, 1)):
        pass
    service.take("s", 2, [["ask", [[7, 1]]]])
    _, _, [[keys, _]] = service._of("s").reports(LIMIT_S)
    assert keys == [(7, 1)]


def test_a_large_value_does_not_go_along_with_reports(service):
    large = np.ones((1 << 18) + 1, np.float32)
    listed = [order_data(PUTS[0], lambda _: 0)]
    run = ["run", 0, 7, 0, [], [[0, large]]]
    service.take("s", 0, [["ask", [[7, 0]]], ["orders", 0, listed], run])
    _, [[*report, _]], answers = service._of("s").reports(LIMIT_S)
    assert (report, answers) == ([7, [0], None], [])


def test_a_recipe_is_not_kept_once_it_was_taken():
    device = controller.local(islands=1, devices=1)._islands["island0"].devices[0]
    service = joined(IslandService([device], takes_recipes=True))
    service.take_recipe(3, b"no recipe")
    with pytest.raises(pickle.UnpicklingError):
        service.load("s", 3, {}, b"")
    assert not service._recipes
    service.leave("s")


def test_shards_that_several_devices_have_are_sent_once():
    sent = []
    calls = types.SimpleNamespace(deliver=lambda *args: sent.append(args))
    peer = PeerIsland(
        types.SimpleNamespace(futures=calls, close=lambda: None), session="s"
    )
    one, two = np.zeros(2), np.ones(2)
    peer.deliver((7, 0), 0, IslandValue([one, two, one], Outcome().end()))
    peer._sending.shutdown(wait=True)
    arrays, places = sent[0][4]
    assert (len(arrays), places) == (2, [0, 1, 0])


def test_a_read_of_what_was_dropped_is_forgotten(service):
    service.take("s", 0, [["ask", [[7, 0], [9, 0]]], ["drop", 9, 0]])
    assert took(service) == []


def test_the_session_of_another_controller_is_refused(service):
    with pytest.raises(ArgumentError, match="must be that of the island's controller"):
        service.take("another", 0, [])


@pytest.mark.parametrize(
    "order",
    [
        Put(output=1, places=(0, 2), layout=LAYOUT),
        Put(output=1, places=(0,), layout=None),
        SEND,
        RECEIVE,
        Drop(values=(3, 4)),
    ],
    ids=lambda order: type(order).__name__,
)
def test_orders_are_the_same_after_their_way(order):
    assert order_from(order_data(order, lambda _: 0), {}) == order


def test_a_layout_has_its_axes_after_its_way():
    axes, entries = [["x", 2], ["y", 1]], [["x", "y"], None]
    assert layout_from([axes, entries]) == LAYOUT
    one = dataclasses.replace(LAYOUT, spec=P("x"))
    assert layout_from([axes, ["x"]]) == one


def test_shards_that_are_equal_are_sent_once():
    one, two = np.zeros(2), np.ones(2)
    data = shards_data([one, two, one])
    assert len(data[0]) == 2
    assert [shard.tolist() for shard in shards_from(data)] == [[0, 0], [1, 1], [0, 0]]


def test_values_move_between_islands_by_tls(tmp_path):
    make_certificates(tmp_path)
    server, client = (Tls.in_folder(tmp_path, role) for role in ("server", "client"))
    options = {"secret": rpc.Secret.generate(), "tls": server, "client_tls": client}
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(
                controller.IslandServer(
                    "grpc://127.0.0.1:0", devices=jax.devices()[n : n + 1], **options
                )
            ).address
            for n in range(2)
        ]
        pw = stack.enter_context(
            controller.connect(
                addresses, options["secret"], tls=client, lost_after_s=300
            )
        )
        x = pw.put(ONES, pw.slice(1, island="island0"))
        there = pw.copy(x, pw.slice(1, island="island1")).result(LIMIT_S)
        assert np.asarray(there).tolist() == [1.0, 1.0]

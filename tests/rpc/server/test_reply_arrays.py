"""Arrays that a handler returns arrive, over any transport, and without a copy."""

import numpy as np
import pytest

from replicator.rpc.server.reply_arrays import reply_arrays
from replicator.rpc.transports.same_host.sealed_memory import IS_AVAILABLE
from tests.rpc.courier_cases import NAMES, courier

FORMS = [
    ((256, 300), np.dtype(np.uint8)),
    ((7,), np.dtype(np.int64)),
    ((3, 5, 1000), np.dtype(np.float32)),
    ((0, 4), np.dtype(np.float32)),
    ((9000,), np.dtype(np.bool_)),
]


class Filled:
    """Returns filled arrays, also others beside them."""

    def fill(self, value):
        arrays = reply_arrays(FORMS)
        for array in arrays:
            array[...] = value
        return {"rows": tuple(arrays), "keys": np.full(8000, value)}

    def fail(self):
        [array] = reply_arrays(FORMS[:1])
        raise ValueError(f"{array.shape}")


@pytest.fixture(params=NAMES)
def client(request):
    with courier(request.param, Filled()) as (client, _):
        yield client


def test_they_arrive_as_they_were_filled(client):
    held = [client.fill(value) for value in range(20)]
    for value, found in enumerate(held):
        due = [np.full(shape, value, dtype) for shape, dtype in FORMS]
        for array, expected in zip(found["rows"], due, strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)
        assert (found["keys"] == value).all()


def test_a_call_that_fails_returns_their_memory(client):
    for _ in range(50):
        with pytest.raises(ValueError, match="256, 300"):
            client.fail()
    assert (client.fill(1)["keys"] == 1).all()


def test_outside_of_a_call_they_are_new_arrays():
    arrays = reply_arrays(FORMS)
    assert [(array.shape, array.dtype) for array in arrays] == FORMS
    assert all(array.flags.owndata for array in arrays)


@pytest.mark.skipif(not IS_AVAILABLE, reason="no memfd here")
def test_in_shared_memory_they_are_not_copied(monkeypatch):
    copied = []
    monkeypatch.setattr(
        "replicator.rpc.transports.same_host.shared_memory.copy_body",
        lambda layout, memory: copied.append(layout),
    )
    with courier("unix", Filled()) as (client, _):
        found = client.fill(3)
    assert not copied
    assert (found["rows"][0] == 3).all()

"""Laws of the transfer of pieces, over a Unix socket and between hosts by TLS."""

import contextlib
import dataclasses
import os
import threading

import ml_dtypes
import numpy as np
import pytest

from replicator import rpc
from replicator.distributed import piece_transfer
from replicator.distributed.piece_transfer import (
    Piece,
    PieceTree,
    as_bytes,
    offer_pieces,
    take_pieces,
)
from replicator.errors import (
    ArgumentError,
    AuthenticationError,
    CallTimeoutError,
    DecodeError,
    MessageTooLargeError,
)
from replicator.rpc.security.certificates import make_certificates
from replicator.rpc.security.tls import ROLES

SECRET = rpc.Secret(bytes(32))
LONG_S = 60.0
SHORT_S = 0.3
MOST = 1 << 24
ARRAYS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "b": np.array(-0.0, np.float64),
    "": np.zeros((0, 3), np.int8),
    "odd/../name": np.array([1, 2], ml_dtypes.bfloat16),
    "int4": np.array([-8, 7], ml_dtypes.int4),
    "mask": np.array([True, False]),
    "large": np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8),
}
LARGE = len(ARRAYS) - 1
TREE = PieceTree(
    about={"step": 7},
    pieces=tuple(Piece.of(name, each) for name, each in ARRAYS.items()),
)


def read(number):
    return as_bytes(list(ARRAYS.values())[number])


@contextlib.contextmanager
def giving(read=read, *, address="unix:", folder=None, secret=SECRET):
    """A client of a server that offers `TREE` as "state"."""
    ends = [rpc.Tls.in_folder(folder, end) if folder else None for end in ROLES]
    server = rpc.Server(name="giver", address=address, secret=SECRET, tls=ends[0])
    offer_pieces(server, {"state": (TREE, read)}.get)
    with server, rpc.Client(server.address, secret=secret, tls=ends[1]) as client:
        yield client


def take(client, *choice, most_bytes=MOST, timeout_s=LONG_S):
    return take_pieces(
        client, "state", *choice, most_bytes=most_bytes, timeout_s=timeout_s
    )


@pytest.fixture(params=["unix", "tls"])
def place(request, tmp_path):
    """Address and certificate of a giver."""
    if request.param == "unix":
        return {"address": "unix:"}
    os.chmod(tmp_path, 0o700)
    make_certificates(tmp_path, hosts=["127.0.0.1"])
    return {"address": "grpc://127.0.0.1:0", "folder": tmp_path}


def test_all_bits_arrive(place, monkeypatch):
    monkeypatch.setattr(piece_transfer, "PART_BYTES", 1 << 20)
    with giving(**place) as client:
        tree, arrays = take(client)
    assert tree == TREE
    for number, (name, array) in enumerate(ARRAYS.items()):
        assert arrays[number].dtype == array.dtype, name
        assert arrays[number].shape == array.shape, name
        assert arrays[number].tobytes() == array.tobytes(), name


def test_only_what_is_chosen_is_read():
    asked = []
    with giving(lambda number: asked.append(number) or read(number)) as client:
        _, arrays = take(client, lambda tree: [4, 0])
    assert asked == list(arrays) == [4, 0]


def test_a_flipped_byte_is_found(place):
    flipped = bytearray(read(LARGE))
    flipped[2 << 20] ^= 1
    with (
        giving(lambda number: flipped, **place) as client,
        pytest.raises(DecodeError, match=r"`large` at \[0\] .* got other bytes"),
    ):
        take(client, lambda tree: [LARGE])


def test_a_piece_that_is_too_short_is_found():
    with (
        giving(lambda number: b"") as client,
        pytest.raises(DecodeError, match="must send what was asked of `state`"),
    ):
        take(client)


def test_an_oversized_tree_is_refused_before_a_byte_of_it_is_read():
    with (
        giving(lambda number: pytest.fail("read")) as client,
        pytest.raises(MessageTooLargeError, match="at most 1000 bytes, got 3145"),
    ):
        take(client, most_bytes=1000)


def test_no_more_than_a_part_is_asked_for_at_once(monkeypatch):
    monkeypatch.setattr(piece_transfer, "PART_BYTES", 1 << 20)
    with giving() as client:
        monkeypatch.setattr(client, "call", call := Recorded(client.call))
        take(client)
    sizes = [sum(end - begin for _, begin, end in args[1]) for args in call.reads]
    assert (max(sizes), sum(sizes)) == (1 << 20, TREE.num_bytes)


class Recorded:
    def __init__(self, call):
        self.call, self.reads = call, []

    def __call__(self, method, args, **options):
        self.reads += [args] if len(args) == 2 else []
        return self.call(method, args, **options)


def test_another_secret_opens_nothing():
    with (
        giving(secret=rpc.Secret(b"x" * 32)) as client,
        pytest.raises(AuthenticationError, match="its secret is another one"),
    ):
        take(client)


def test_a_cut_connection_is_an_error_within_the_deadline():
    server = rpc.Server(name="giver", address="unix:", secret=SECRET)
    over = threading.Event()

    def cut(number):
        threading.Thread(target=server.stop, args=(0.0,)).start()
        over.wait(LONG_S)
        return read(number)

    offer_pieces(server, {"state": (TREE, cut)}.get)
    with server, rpc.Client(server.address, secret=SECRET) as client:
        with pytest.raises(CallTimeoutError):
            take(client, timeout_s=SHORT_S)
        over.set()


def test_a_slow_giver_meets_the_deadline_of_the_whole_transfer(monkeypatch):
    monkeypatch.setattr(piece_transfer, "PART_BYTES", 1 << 17)
    go = threading.Event()

    def slow(number):  # each answer is in time, all together are not
        go.wait(SHORT_S / 5)
        return read(number)

    with giving(slow) as client, pytest.raises(CallTimeoutError):
        take(client, timeout_s=SHORT_S)


def piece(**other):
    fields = {"name": "w", "start": [0], "shape": [2], "dtype": "<f4", "crc32": 0}
    return list((fields | other).values())


@pytest.mark.parametrize(
    "offer",
    [
        [],
        {"about": None},
        {"about": None, "pieces": [1]},
        {"about": None, "pieces": [piece()[:4]]},
        {"about": None, "pieces": [piece(dtype="O")]},
        {"about": None, "pieces": [piece(dtype="(os.system)f4")]},
        {"about": None, "pieces": [piece(shape=[-1])]},
        {"about": None, "pieces": [piece(shape=[True])]},
        {"about": None, "pieces": [piece(shape=[2.0])]},
        {"about": None, "pieces": [piece(shape=[1, 2])]},
        {"about": None, "pieces": [piece(start=[0] * 33, shape=[1] * 33)]},
        {"about": None, "pieces": [piece(name=7)]},
        {"about": None, "pieces": [piece(crc32=None)]},
    ],
)
def test_what_is_not_an_offer_is_refused(offer):
    with pytest.raises(DecodeError):
        PieceTree.from_json(offer)


def test_a_tree_that_is_not_offered_is_named():
    with giving() as client, pytest.raises(ArgumentError, match="got 'other'"):
        take_pieces(client, "other", most_bytes=MOST, timeout_s=LONG_S)


@pytest.mark.parametrize(
    "other", [{"name": "v"}, {"start": (3,)}, {"shape": (1, 2)}, {"dtype": "<i4"}]
)
def test_a_piece_of_another_place_is_refused(other):
    piece = Piece.of("w", np.ones(2, np.float32), (2,))
    if "shape" in other:
        other["start"] = (0, 2)
    with pytest.raises(DecodeError, match="got other bytes"):
        dataclasses.replace(piece, **other).array(np.ones(2, np.float32).tobytes())


def test_values_that_are_none_of_their_dtype_are_refused():
    data = bytes([0, 2])
    odd = Piece(name="mask", start=(0,), shape=(2,), dtype="|b1", crc32=0)
    odd = dataclasses.replace(odd, crc32=odd._checksum(data))
    with pytest.raises(DecodeError, match="zeros and ones"):
        odd.array(data)


def test_a_dtype_of_objects_cannot_be_offered():
    with pytest.raises(ArgumentError, match=r"`w` must have a dtype .* Python objects"):
        Piece.of("w", np.array([None]))

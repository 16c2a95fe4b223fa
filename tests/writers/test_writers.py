"""One set of laws over all writers; then what is particular to one."""

import json
import math
import struct
import sys
import threading

import numpy as np
import pytest
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event

from replicator.errors import ArgumentError
from replicator.writers import JSONL, Async, Multi, TensorBoard, WandB
from replicator.writers.jsonl import drop_after
from replicator.writers.writer import named_numbers
from tests.fakes import FakeClock, RecordingWriter

ROWS = [(1, {"loss": 0.5}), (2, {"loss": 0.25, "grads/norm": 8.0}), (5, {"loss": 2.0})]


def read_jsonl(folder):
    rows = [json.loads(line, parse_constant=refuse) for line in lines(folder)]
    return [
        (row.pop("step"), {k: float(v) for k, v in row.items() if k != "time_s"})
        for row in rows
    ]


def lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def read_tensorboard(folder):
    """Read event files as TensorBoard does: records of length, CRC, data, CRC."""
    files = sorted(folder.glob("events.out.tfevents.*"), key=lambda f: f.suffix)
    events = [event for file in files for event in records(file.read_bytes())]
    return [
        (e.step, {v.tag: v.simple_value for v in e.summary.value})
        for e in map(Event.FromString, events)
        if e.HasField("summary")
    ]


def records(data):
    while data:
        (length,), (crc,) = (
            struct.unpack("<Q", data[:8]),
            struct.unpack("<I", data[8:12]),
        )
        record, end = data[12 : 12 + length], data[12 + length : 16 + length]
        assert crc == masked(data[:8])
        assert end == struct.pack("<I", masked(record))
        yield record
        data = data[16 + length :]


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def make_jsonl(folder):
    return JSONL(folder / "metrics.jsonl")


def make_multi(folder):
    return Multi(make_jsonl(folder), TensorBoard(folder))


def make_async(folder):
    return Async(make_jsonl(folder))


WRITERS = {
    "jsonl": (make_jsonl, read_jsonl),
    "tensorboard": (TensorBoard, read_tensorboard),
    "multi-first": (make_multi, read_jsonl),
    "multi-second": (make_multi, read_tensorboard),
    "async": (make_async, read_jsonl),
    "async-multi": (lambda folder: Async(make_multi(folder)), read_tensorboard),
}


@pytest.fixture(params=WRITERS.values(), ids=WRITERS.keys())
def writer_and_read(request, tmp_path):
    make, read = request.param
    writer = make(tmp_path)
    yield writer, lambda: read(tmp_path)
    writer.close()


def test_rows_arrive_in_order_once_flushed(writer_and_read):
    writer, read = writer_and_read
    for row in ROWS:
        writer.write(*row)
    writer.flush()
    assert read() == ROWS


def test_close_keeps_all_rows_and_may_come_twice(writer_and_read):
    writer, read = writer_and_read
    for row in ROWS:
        writer.write(*row)
    writer.close()
    writer.close()
    assert read() == ROWS


def test_non_finite_numbers_survive(writer_and_read):
    writer, read = writer_and_read
    writer.write(3, {"a": math.nan, "b": math.inf, "c": -math.inf})
    writer.flush()
    [(_, numbers)] = read()
    assert math.isnan(numbers["a"])
    assert (numbers["b"], numbers["c"]) == (math.inf, -math.inf)


def test_what_fails_is_raised_at_the_latest_by_flush(writer_and_read):
    writer, read = writer_and_read
    writer.write(*ROWS[0])
    with pytest.raises((TypeError, ValueError)):
        write_and_flush(writer, 2, {"loss": "three"})
    writer.write(*ROWS[2])
    writer.flush()
    assert read() == [ROWS[0], ROWS[2]]


def write_and_flush(writer, step, scalars):
    writer.write(step, scalars)
    writer.flush()


@pytest.mark.parametrize(
    ("make", "read"), [WRITERS["jsonl"], WRITERS["tensorboard"]], ids=["jsonl", "tb"]
)
def test_a_second_writer_appends(make, read, tmp_path):
    for row in ROWS:
        writer = make(tmp_path)
        writer.write(*row)
        writer.close()
    assert read(tmp_path) == ROWS


def test_jsonl_lines_say_the_seconds_since_the_start(tmp_path):
    clock = FakeClock(now_s=100.0)
    writer = JSONL(tmp_path / "new" / "metrics.jsonl", clock=clock)
    clock.advance(1.5)
    writer.write(3, {"loss": 0.25})
    writer.close()
    assert lines(tmp_path / "new") == ['{"step": 3, "time_s": 1.5, "loss": 0.25}']


def test_jsonl_starts_a_new_line_after_one_that_was_cut_short(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    writer = make_jsonl(tmp_path)
    writer.write(3, {})
    writer.close()
    assert [json.loads(line)["step"] for line in lines(tmp_path)[::2]] == [1, 3]


def test_jsonl_refuses_the_names_of_its_own_fields(tmp_path):
    writer = make_jsonl(tmp_path)
    with pytest.raises(ArgumentError, match="must not use the names step and time_s"):
        writer.write(1, {"step": 2.0})
    writer.close()
    assert lines(tmp_path) == []


def test_a_full_disk_is_an_error():
    writer = JSONL("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        writer.write(*ROWS[0])
    writer.close()


def test_multi_writes_to_the_others_if_one_fails():
    first, second = RecordingWriter(), RecordingWriter()
    first.fail_at = 1
    with pytest.raises(OSError, match="no room for step 1"):
        Multi(first, second).write(*ROWS[0])
    assert second.rows == ROWS[:1]


def test_multi_raises_each_of_several_errors():
    first, second = RecordingWriter(), RecordingWriter()
    first.fail_at = second.fail_at = 1
    with pytest.raises(OSError, match="step 1") as caught:
        Multi(first, second).write(*ROWS[0])
    assert "OSError('no room for step 1')" in caught.value.__notes__[0]


def test_async_raises_what_its_thread_met_once_and_goes_on():
    inner = RecordingWriter()
    inner.fail_at = 1
    writer = Async(inner)
    writer.write(*ROWS[0])
    with pytest.raises(OSError, match="no room for step 1"):
        writer.flush()
    writer.write(*ROWS[1])
    writer.close()
    assert inner.rows == ROWS[1:2]


def test_async_close_raises_what_its_thread_met_and_still_closes():
    inner = RecordingWriter()
    inner.fail_at = 1
    writer = Async(inner)
    writer.write(*ROWS[0])
    with pytest.raises(OSError, match="no room for step 1"):
        writer.close()
    assert inner.calls[-1] == "close"


class GatedWriter(RecordingWriter):
    """Writes nothing until its gate is open."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def write(self, step, scalars):
        assert self.gate.wait(60)
        super().write(step, scalars)


def test_async_does_not_wait_for_a_slow_writer_and_drains_it_at_the_end():
    inner = GatedWriter()
    writer = Async(inner)
    for row in ROWS:
        writer.write(*row)
    assert inner.rows == []
    inner.gate.set()
    writer.close()
    assert inner.rows == ROWS


def test_async_holds_no_more_rows_than_its_capacity():
    inner = GatedWriter()
    writer = Async(inner, capacity=2, timeout_s=0.01)
    writer.write(*ROWS[0])
    writer.write(*ROWS[1])
    with pytest.raises(TimeoutError, match=r"must take a row within 0\.01 s"):
        writer.write(*ROWS[2])
    inner.gate.set()


def test_async_takes_a_copy_of_the_numbers():
    inner, numbers = GatedWriter(), {"loss": 1.0}
    writer = Async(inner)
    writer.write(1, numbers)
    numbers["loss"] = 2.0
    inner.gate.set()
    writer.close()
    assert inner.rows == [(1, {"loss": 1.0})]


def test_wandb_says_what_to_install_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-replicator\[wandb\]'"):
        WandB(tmp_path)


@pytest.mark.slow
def test_wandb_keeps_every_row_also_of_steps_done_again(tmp_path):
    pytest.importorskip("wandb")
    quiet = {"silent": True, "console": "off"}
    writer = WandB(tmp_path, project="test", mode="offline", settings=quiet)
    rows = [*ROWS, (3, {"loss": math.nan})]
    for row in rows:
        writer.write(*row)
    writer.flush()
    writer.close()
    writer.close()
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found = [(int(row.pop("step")), row) for row in wandb_rows(file.read_bytes())]
    assert repr(found) == repr(rows)


def wandb_rows(data):
    """Read the numbers of a W&B file: LevelDB log blocks that hold its records."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, record = 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            history, record = Record.FromString(record).history.item, b""
            row = {(i.key or "/".join(i.nested_key)): i.value_json for i in history}
            if row:
                yield {
                    name: float(number)
                    for name, number in sorted(row.items(), reverse=True)
                    if not name.startswith("_")
                }


def test_numbers_are_named_by_their_path():
    metrics = {
        "loss": np.float32(0.5),
        "grads": {"norm": np.asarray(2)},
        "per_replica": np.asarray([1.0, 3.0]),
        "image": np.zeros((2, 2)),
        "rows": np.zeros(1_025),
    }
    assert named_numbers(metrics) == {
        "loss": 0.5,
        "grads/norm": 2.0,
        "per_replica/0": 1.0,
        "per_replica/1": 3.0,
    }
    assert named_numbers(np.float32(0.5)) == {"metric": 0.5}


def test_rows_of_later_steps_are_dropped(tmp_path):
    writer = JSONL(tmp_path / "metrics.jsonl")
    for step, row in [(4, {"loss": 1.0}), (4, {"eval/loss": 2.0}), (5, {"loss": 3.0})]:
        writer.write(step, row)
    writer.close()
    drop_after(tmp_path / "metrics.jsonl", step=4)
    assert read_jsonl(tmp_path) == [(4, {"loss": 1.0}), (4, {"eval/loss": 2.0})]

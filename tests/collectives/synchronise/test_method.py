import pytest

from replicator.collectives.synchronise.method import (
    SumMethod,
    check_method,
    rows_shrink,
    sent_bytes,
    shrinks,
)
from replicator.errors import ArgumentError


@pytest.mark.parametrize("form", ["bf16", "f16", "int8", "power_sgd(2)"])
def test_what_would_not_shrink_goes_whole(form):
    method = SumMethod(compress=form)
    assert not shrinks(method, (3,), "float32", 1)
    assert sent_bytes(method, (1,), "float32", 8) == sent_bytes(
        SumMethod(), (1,), "float32", 8
    )


def test_float16_is_added_in_float32_without_a_form_and_travels_narrow_with_one():
    assert sent_bytes(SumMethod(), (64,), "float16", 8) == 2 * 64 * 4 * 7 // 8
    assert (
        sent_bytes(SumMethod(compress="f16"), (64,), "float16", 8) == 2 * 64 * 2 * 7 / 8
    )


def test_bfloat16_gains_nothing_by_bfloat16():
    assert not SumMethod(compress="bf16").narrows((64, 64), "bfloat16")
    assert SumMethod(compress="int8").narrows((64, 64), "bfloat16")


def test_hosts_divide_what_goes_between_them():
    by_hosts = SumMethod(synchronise="hierarchical", devices_per_host=2)
    inside, across, gathered = 4096, 2048 * 2 * 3 // 4, 2048
    assert sent_bytes(by_hosts, (1024,), "float32", 8) == inside + across + gathered


def test_one_host_is_one_level():
    by_hosts = SumMethod(
        synchronise="hierarchical", devices_per_host=8, compress="int8"
    )
    flat = sent_bytes(SumMethod(), (64, 64), "float32", 8)
    assert sent_bytes(by_hosts, (64, 64), "float32", 8) == flat


def test_many_rows_are_a_dense_table():
    assert not rows_shrink((64, 8), "float32", 8, rows=64)
    assert not rows_shrink((64, 8), "float32", 8, rows=None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"synchronise": "ring"}, "`synchronise` must be one of"),
        ({"compress": "int4"}, r"`compress` must be None, 'bf16', .* got 'int4'"),
        ({"compress": "power_sgd(0)"}, r"`compress` must be .* got 'power_sgd\(0\)'"),
        ({"compress": 8}, "`compress` must be None, .* got 8"),
        ({"synchronise": "rows", "compress": "bf16"}, "`compress` must be None with"),
    ],
)
def test_a_wrong_method_is_refused(wrong, message):
    words = {"synchronise": "all_reduce", "compress": None} | wrong
    with pytest.raises(ArgumentError, match=message):
        check_method(**words)

"""Numbers, sizes, durations and values, as people write them."""

import math

import pytest

from replicator.cli.look.report_page import formats


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0038781, "0.003878"),
        (4.738e-7, "4.738e-07"),
        (3.0, "3"),
        (27889.9, "27,890"),
        (1e12, "1e+12"),
        (math.nan, "NaN"),
        (-math.inf, "-∞"),
    ],
)
def test_numbers_are_short(value, told):
    assert formats.number(value) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.25, "0.25 s"), (42, "42 s"), (61, "1 min 01 s"), (3840, "1 h 04 min")],
)
def test_durations_have_two_units(seconds, told):
    assert formats.duration(seconds) == told


def test_days_are_days():
    assert formats.duration(2 * 86400 + 7300) == "2 d 02 h"


def test_sizes_have_the_largest_unit():
    sizes = [formats.size(count) for count in (0, 999, 999_900, 3.2e15)]
    assert sizes == ["0 B", "999 B", "1 MB", "3.2e+03 TB"]


def test_nested_values_are_flattened_by_name():
    value = {"a": {"b": 1, "c": [1, 2]}, "d": None, "e": [], "f": True}
    assert dict(formats.flat(value)) == {
        "a.b": "1",
        "a.c": "1, 2",
        "d": "none",
        "e": "empty",
        "f": "yes",
    }


def test_a_time_is_told_in_utc_and_anything_else_as_it_is():
    assert formats.clock("2026-11-21T13:00:00+01:00") == "2026-11-21 12:00:00"
    assert formats.clock("yesterday") == "yesterday"
    assert formats.clock(None) == ""

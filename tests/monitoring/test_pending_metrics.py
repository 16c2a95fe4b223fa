"""Metrics in flight survive as JSON in their own dtypes; rows of a batch do not."""

import json

import numpy as np
import pytest

from replicator.monitoring.pending_metrics import (
    MOST_NUMBERS,
    PendingMetrics,
    in_flight_from_json,
)

METRICS = {
    "half": np.float16(0.5),
    "count": np.asarray([[1, 2], [3, 4]], np.int32),
    "flags": np.asarray([True, False]),
    "nan": np.asarray([np.nan, 1], np.float32),
}


def read_again(flight):
    text = json.dumps(flight.as_json())
    return in_flight_from_json(json.loads(text), position=None).metrics


def test_numbers_keep_their_dtypes():
    found = read_again(PendingMetrics(steps=2, stacked=True, metrics=METRICS))
    for name, value in METRICS.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype


@pytest.mark.parametrize(("steps", "stacked"), [(1, False), (3, True)])
def test_rows_of_a_large_batch_are_left_out(steps, stacked):
    first = (steps,) if stacked else ()
    metrics = {
        "loss": np.zeros(first),
        "kept": np.zeros((*first, MOST_NUMBERS)),
        "rows": np.zeros((*first, MOST_NUMBERS + 1)),
    }
    flight = PendingMetrics(steps=steps, stacked=stacked, metrics=metrics)
    assert set(read_again(flight)) == {"loss", "kept"}
    assert flight.names() == ("loss",)

import re

import pytest

from replicator.errors import ArgumentError
from replicator.inputs import InputOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "`accumulate` must be at least 1, got 0. Use 1."),
        ({"prefetch": 0}, "`prefetch` must be at least 1, got 0. Use 1."),
        (
            {"timeout_s": 0.0},
            "`timeout_s` must be above 0, got 0.0. "
            "Use `float('inf')` to wait without a limit.",
        ),
        (
            {"mode": "per_device"},
            "`mode` must be one of 'single', 'per_host', 'per_replica', "
            "got 'per_device'. Use one of these.",
        ),
        (
            {"remainder": "pad"},
            "`remainder` must be one of 'mask', 'drop', 'refuse', "
            "got 'pad'. Use one of these.",
        ),
        (
            {"reread": "ignore"},
            "`reread` must be one of 'refuse', 'warn', got 'ignore'. Use one of these.",
        ),
    ],
)
def test_a_bad_option_is_refused_at_the_door(options, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        InputOptions(**options)

"""Write numbers, times and values in few characters."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def number(value: float) -> str:
    """Write a number with four digits at most.

    >>> number(0.0038781), number(27990.2)
    ('0.003878', '27,990')
    """
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"


def size(count_bytes: float) -> str:
    """Write a size in the largest unit that leaves at least 1.

    >>> size(3_500_000)
    '3.5 MB'
    """
    if not math.isfinite(count_bytes):
        return number(count_bytes)
    power = 0
    while count_bytes >= 999.5 and power < len(_BYTE_UNITS) - 1:
        count_bytes, power = count_bytes / 1000, power + 1
    return f"{count_bytes:.3g} {_BYTE_UNITS[power]}"


def duration(seconds: float) -> str:
    """Write a duration in its two largest units.

    >>> duration(3840), duration(2.345)
    ('1 h 04 min', '2.3 s')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


def share(part: float) -> str:
    """Write a part of 1 as a percentage.

    >>> share(0.97654)
    '97.7 %'
    """
    return f"{100 * part:.1f} %"


def moment(time: Any) -> datetime.datetime | None:
    """Read a time of the journal; None if the value is not a time.

    >>> moment("yesterday") is None
    True
    """
    try:
        found = datetime.datetime.fromisoformat(time)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def clock(time: Any) -> str:
    """Write a time of the journal to the second, in UTC; anything else as it is.

    >>> clock("2026-11-21T13:00:00+01:00")
    '2026-11-21 12:00:00'
    """
    found = moment(time)
    if found is None:
        return str(time or "")
    return f"{found.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested JSON as (dotted name, text).

    >>> list(flat({"mesh": {"replica": 8}}))
    [('mesh.replica', '8')]
    """
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from flat(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(_is_nested(item) for item in value):
        for index, below in enumerate(value):
            yield from flat(below, f"{name}[{index}]")
    else:
        yield name, one_line(value)


def one_line(value: Any) -> str:
    """Write a value of JSON on one line.

    >>> one_line({"kind": "cpu", "count": 8})
    'kind cpu, count 8'
    """
    if value in ([], {}, ""):
        return "empty"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {one_line(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(one_line(item) for item in value)
    return str(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)

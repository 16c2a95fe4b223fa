"""Speeds that were measured on this host, kept for this user between processes.

`replicator devices --calibrate` measures them; `Machine.from_devices` takes them. They
lie in JSON files beside the compilation cache, one for each kind and number of devices.
"""

import json
import logging
import pathlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from replicator.base.host.compilation_cache import private_directory
from replicator.base.host.paths import user_cache, write_whole

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured speeds of the devices of one host, all at work at once.

    Attributes:
      device_kind: Kind of its devices.
      devices: Number of its devices.
      flops_per_s: Operations that one device makes a second in matrix products, by
        dtype.
      memory_bytes_per_s: Bytes that one device reads and writes a second.
      host_bytes_per_s: Bytes that one device sends a second in an all-reduce; 0 for one
        device alone.
      host_latency_s: Seconds from one device to the next.
    """

    device_kind: str
    devices: int
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    host_bytes_per_s: float = 0.0
    host_latency_s: float = 0.0


def keep_calibration(measured: Calibration) -> pathlib.Path | None:
    """Keep a calibration for this user.

    Returns:
      The file; None if there is no directory that this user alone can write to.
    """
    directory = private_directory("measured")
    if directory is None:
        return None
    file = directory / _file_name(measured.device_kind, measured.devices)
    write_whole(file, json.dumps(asdict(measured), indent=2) + "\n")
    return file


def kept_calibration(device_kind: str, devices: int) -> Calibration | None:
    """Return the calibration of so many devices of a kind; None if none was kept."""
    file = user_cache() / "measured" / _file_name(device_kind, devices)
    try:
        plain = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as failure:
        _log.warning("no calibration: %s cannot be read: %s", file, failure)
        return None
    if not _is_calibration(plain):
        _log.warning("no calibration: %s holds something else. Measure again.", file)
        return None
    return Calibration(**plain)


def _file_name(device_kind: str, devices: int) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', device_kind.lower())}-{devices}.json"


def _is_calibration(plain: Any) -> bool:
    if not isinstance(plain, dict) or set(plain) != set(Calibration.__slots__):
        return False
    peaks = plain["flops_per_s"]
    if not isinstance(peaks, dict) or not peaks:
        return False
    speeds = (*peaks.values(), plain["memory_bytes_per_s"])
    links = (plain["host_bytes_per_s"], plain["host_latency_s"])
    return all(_is_number(each) and each > 0 for each in speeds) and all(
        _is_number(each) and each >= 0 for each in links
    )


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and value < float("inf")

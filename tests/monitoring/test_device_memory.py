"""Memory: what devices say, and what the host holds."""

import jax

from replicator.monitoring.device_memory import memory_numbers


class Accelerator:
    def memory_stats(self):
        return {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 9, "x": 1}


def test_each_device_says_what_it_holds():
    numbers = memory_numbers([Accelerator(), *jax.local_devices(backend="cpu")[:1]])
    assert numbers["memory/0/bytes_in_use"] == 5
    assert numbers["memory/0/peak_bytes"] == 7
    assert numbers["memory/0/bytes_limit"] == 9
    assert not any(name.startswith("memory/1/") for name in numbers)


def test_the_host_is_known_to_hold_what_was_just_allocated():
    before = memory_numbers([])
    block = bytearray(b"x") * 64_000_000
    after = memory_numbers([])
    grown = after["memory/host_bytes_in_use"] - before["memory/host_bytes_in_use"]
    assert grown >= 0.8 * len(block)
    assert after["memory/host_peak_bytes"] >= after["memory/host_bytes_in_use"]

"""Throw messages at the codec, and at a live server's socket; count what goes wrong.

Random bytes, invented msgpack, and real messages with a few bytes changed. A failure is
a crash (also any error but the two that decoding may raise), a hang (more than a second
of one core), an import, an allocation above the limits, a value that is not the one
that was sent: in the codec, one that does not arrive as it is when it is sent again; in
the socket, one that came through although a checksum covers it. There also a good
client that is disturbed, and threads or descriptors that are left over.

Decoding runs in processes of their own, so that a crash ends one of them alone.
"""

import collections
import json
import subprocess
import sys
import time

from absl import app, flags

from benchmarks.rpc_fuzz.codec import NEVER_S
from benchmarks.rpc_fuzz.socket_fuzz import fuzz_socket

_CASES = flags.DEFINE_integer("cases", 1_000_000, "Messages that are decoded.")
_FRAMES = flags.DEFINE_integer("frames", 100_000, "Frames that the server is sent.")
_SEED = flags.DEFINE_integer("seed", 0, "Of what is sent.")
_CASES_AT_ONCE = 100_000
_SECONDS_PER_CASE = 0.01  # a hundred times what one takes


def fuzz_codec(cases: int, seed: int) -> dict[str, int]:
    """Decode so many messages in a process; return its failures, by kind."""
    command = [sys.executable, "-u", "-m", "benchmarks.rpc_fuzz.codec"]
    try:
        found = subprocess.run(
            [*command, str(cases), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=NEVER_S + _SECONDS_PER_CASE * cases,
        )
    except subprocess.TimeoutExpired:
        return {"hangs": 1}
    *said, last = found.stdout.splitlines() or [""]
    print("\n".join(said[:20]), end="\n" if said else "")
    if found.returncode != 0:
        print(f"seed {seed}: ended with {found.returncode}")
        return {"crashes": 1}
    return json.loads(last)


def main(argv: list[str]) -> None:
    del argv
    failed = collections.Counter()
    started_s = time.monotonic()
    for start in range(0, _CASES.value, _CASES_AT_ONCE):
        cases = min(_CASES_AT_ONCE, _CASES.value - start)
        failed.update(fuzz_codec(cases, _SEED.value + start))
    codec_s = time.monotonic() - started_s
    print(f"{_CASES.value} messages through the codec in {codec_s:.0f} s")
    failed.update(fuzz_socket(_FRAMES.value, _SEED.value))
    print(f"{_FRAMES.value} frames through the socket, too: {dict(failed)}")
    numbers = {"cases": _CASES.value, "frames": _FRAMES.value, **failed}
    print(json.dumps({"failures": failed.total(), **numbers}))


if __name__ == "__main__":
    app.run(main)

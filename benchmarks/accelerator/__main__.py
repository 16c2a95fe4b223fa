"""Measure this library on the accelerators of a host; the laws hold there, too.

    python -m benchmarks.accelerator            # at most eight minutes; --only=lm_1b
    python -m benchmarks.accelerator --tiny     # toy sizes

Where there is none, two faked devices of the CPU are measured.

Each part runs in a process of its own: its peak of memory is its own, and what aborts
one leaves the others. The numbers so far are printed after each part, as one JSON
object, so that a run that is cut off is a row, too. A number that could not be measured
is null, and `reasons` has why. `failures` counts what broke a law, and parts that ended
by an error.

- `laws`: laws 1 and 2 at the highest precision of matrix products.
- `step`, `fsdp`: `rep.run`, and our compiled step in a loop of one's own, against JAX
  written by hand, at steps of about 0.1, 1, 10 and 100 ms (ratios of times).
- `resnet50`: images per second of its training step, bfloat16 over float32 parameters.
- `lm_100m`, `lm_1b`: tokens per second of a language model's, with the largest batch
  that fits, and the share of the peak that its matrix products are (Chowdhery et al.
  2022, "PaLM", appendix B; layers that are computed again count once).
- `checkpoint`: a save and a restore of 1 and of 10 GB; how long the save held the loop.
- `islands`: the controller over an island of the accelerators, here and from another
  process with an island of CPU devices: what broke, and what it costs.
- `scaling`: step of one device / step of all, each with as many tokens (1 is ideal).
"""

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import jax
from absl import app, flags

import replicator
from benchmarks.accelerator import page
from benchmarks.accelerator.measured import LeftOut, Numbers
from benchmarks.accelerator.parts import PARTS, Part
from benchmarks.worker import FAST_COMPILER

_TINY = flags.DEFINE_bool("tiny", False, "Toy sizes: does the script itself work?")
_ONLY = flags.DEFINE_multi_string("only", [], "Parts to run; all by default.")
_MINUTES = flags.DEFINE_float("minutes", 8.0, "Whatever is not done by then is null.")
_COMMIT = flags.DEFINE_string("commit", "", "Of this tree, if git does not know it.")
_PAGE = flags.DEFINE_bool("page", False, "Print the tables of `docs/hardware.md`.")
_PART = flags.DEFINE_string("part", "", "Be the process of this part.")
_FAKE_DEVICES = flags.DEFINE_integer("fake_devices", 0, "Devices to fake for a part.")
_MARK = "numbers: "


def about_here() -> Numbers:
    """Return what is measured: devices, driver, versions and commit."""
    devices = jax.devices()
    packages = ("jax", "jaxlib", "flax", "optax", "tensorstore")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    root = str(Path(__file__).parents[2])
    return {
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "devices": len(devices),
        "driver": _first_line(query) or devices[0].client.platform_version,
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": _COMMIT.value
        or _first_line(["git", "-C", root, "rev-parse", "HEAD"]),
        "date": datetime.date.today().isoformat(),
    }


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0] if done.returncode == 0 else None


def serve(name: str) -> None:
    """Run a part in this process, and print each of its numbers on a marked line."""
    if _FAKE_DEVICES.value:
        replicator.fake_devices(_FAKE_DEVICES.value)
    if name == "here":
        print(_MARK + json.dumps(about_here()), flush=True)
        return
    try:
        for numbers in PARTS[name].run(tiny=_TINY.value):
            print(_MARK + json.dumps(numbers), flush=True)
    except LeftOut as reason:
        print(_MARK + json.dumps({"left_out": str(reason)}), flush=True)


def run_part(name: str, timeout_s: float, *, fake_devices: int = 0) -> Numbers:
    """Run a part in a process of its own and return its numbers.

    Those that are not there have a reason under `"left_out"`, or under `"error"` where
    the part ended by one.
    """
    command = [sys.executable, "-m", "benchmarks.accelerator", f"--part={name}"]
    command += [f"--fake_devices={fake_devices}", f"--commit={_COMMIT.value}"]
    command += ["--tiny"] if _TINY.value else []
    # What JAX leaves of a GPU's memory by default is room for a larger batch.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ
    if _TINY.value:
        environment = {"XLA_FLAGS": FAST_COMPILER} | environment
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired as late:
        reason = f"it was not done after {timeout_s:.0f} s"
        return _numbers(late.stdout or b"") | {"left_out": reason}
    numbers = _numbers(done.stdout)
    if done.returncode:
        numbers["error"] = f"exit code {done.returncode}; the error is above"
    return numbers


def _numbers(output: bytes) -> Numbers:
    """Return the numbers of marked lines; print the others."""
    found: Numbers = {"reasons": {}}
    for line in output.decode().splitlines():
        if not line.startswith(_MARK):
            print(line, flush=True)
            continue
        numbers = json.loads(line.removeprefix(_MARK))
        found["reasons"] |= numbers.pop("reasons", {})
        found |= numbers
    return found


def add(result: Numbers, part: Part, numbers: Numbers) -> None:
    """Add a part's numbers to the result, and why one of them is null."""
    reason = numbers.get("error") or numbers.get("left_out")
    for key in part.keys:
        result[key] = numbers.get(key)
        if result[key] is None:
            why = numbers["reasons"].get(key, reason)
            result["reasons"] |= {} if why is None else {key: why}
    result["missing_keys"] += sum(
        result[key] is None and key not in result["reasons"] for key in part.keys
    )


def main(argv: list[str]) -> None:
    del argv
    if _PART.value:
        serve(_PART.value)
        return
    if _PAGE.value:
        print(page.table(page.kept_rows()))
        return
    if strange := sorted(set(_ONLY.value) - set(PARTS)):
        sys.exit(f"`only` must be one of {list(PARTS)}, got {strange[0]!r}.")
    measure(_ONLY.value or list(PARTS), 60 * _MINUTES.value)


def measure(chosen: Collection[str], limit_s: float) -> None:
    """Run the chosen parts, and print the whole result after each."""
    began_s = time.monotonic()
    result = run_part("here", 120)
    if "device" not in result:
        sys.exit("JAX has no device to measure; `replicator doctor` lists those here.")
    fake_devices = 2 if result["platform"] == "cpu" else 0
    result["devices"] = fake_devices or result["devices"]
    result["missing_keys"] = broken = 0
    for name, part in PARTS.items():
        left_s = limit_s - (time.monotonic() - began_s)
        if name not in chosen:
            numbers: Numbers = {"reasons": {}, "left_out": "it was not asked for"}
        elif result["devices"] < part.devices:
            why = f"it needs {part.devices} devices"
            numbers = {"reasons": {}, "left_out": why}
        elif left_s < 1:
            numbers = {"reasons": {}, "left_out": "the time was over"}
        else:
            numbers = run_part(name, left_s, fake_devices=fake_devices)
        add(result, part, numbers)
        broken += "error" in numbers
        shown = result | {"failures": (result["failures"] or 0) + broken}
        shown["seconds"] = round(time.monotonic() - began_s)
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    app.run(main)

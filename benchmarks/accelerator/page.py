"""Tables of `docs/hardware.md`: one column for each row that a machine printed."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accelerator.against_hand import STEP_MS
from benchmarks.accelerator.checks import SIZES_GB
from benchmarks.accelerator.measured import Numbers

KEPT = Path(__file__).parents[2] / "docs" / "hardware"

_MODELS = {"lm_100m": "110 M parameters", "lm_1b": "0.97 B parameters"}
_LINES = {
    "broken laws; comparisons": ("failures", "law_checks"),
    **{
        f"{what} of about {step_ms:g} ms (measured): `rep.run` / by hand; our step in "
        "a loop of one's own / by hand": (
            f"{name}_{step_ms:g}ms_step_ms",
            f"{name}_{step_ms:g}ms_run_ratio",
            f"{name}_{step_ms:g}ms_own_ratio",
        )
        for name, what in (("step", "a step"), ("fsdp", "a step under `fsdp`"))
        for step_ms in STEP_MS
    },
    "ResNet-50, images a second; batch; peak GB": (
        *("resnet50_images_per_s", "resnet50_batch", "resnet50_peak_gb"),
    ),
    **{
        f"language model, {size}: tokens a second; share of the peak; sequences of "
        "1,024 in a batch; peak GB": tuple(
            f"{name}_{kind}" for kind in ("tokens_per_s", "mfu", "batch", "peak_gb")
        )
        for name, size in _MODELS.items()
    },
    **{
        f"checkpoint of {size} GB: loop held, ms; save, s; restore, s; peak GB": tuple(
            f"checkpoint_{size}gb_{kind}"
            for kind in ("blocked_ms", "save_s", "restore_s", "peak_gb")
        )
        for size in SIZES_GB
    },
    "islands: broken comparisons; a chain of 128 ops / a loop of them; to a CPU island "
    "and back, GB a second": (
        *("island_failures", "island_chained_ratio", "island_gb_per_s"),
    ),
    "weak scaling, of 1": ("scaling",),
}


def kept_rows(folder: Path = KEPT) -> list[Numbers]:
    """Return the rows that are kept, by name of the file."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(rows: Sequence[Numbers]) -> str:
    """Return the numbers of rows as a table in Markdown, a column for each.

    >>> print(table([]).splitlines()[0])
    | |
    """
    heads = [f"{row['devices']} x {row['device']}" for row in rows]
    lines = [["", *heads], ["---"] * (1 + len(rows))]
    lines.append(["jax; driver; date", *map(_origin, rows)])
    lines += [
        [what, *("; ".join(_cell(row, key) for key in keys) for row in rows)]
        for what, keys in _LINES.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _origin(row: Numbers) -> str:
    return f"{row['versions']['jax']}; {row['driver']}; {row['date']}"


def _cell(row: Numbers, key: str) -> str:
    number = row.get(key)
    return "-" if number is None else f"{number:,}"

from pathlib import Path

from benchmarks.accelerator import page
from benchmarks.accelerator.parts import PARTS

HARDWARE = Path(__file__).parents[2] / "docs" / "hardware.md"


def test_page_has_the_table_of_the_rows_that_are_kept():
    assert page.table(page.kept_rows()) in HARDWARE.read_text()


def test_kept_row_has_every_number_or_the_reason_why_not():
    for row in page.kept_rows():
        for part in PARTS.values():
            for key in part.keys:
                assert row[key] is not None or row["reasons"][key]

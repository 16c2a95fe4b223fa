"""`replicator plan`: its table, its notes, its picture."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from replicator.cli.look.plan import notes_of, table_rows, topologies_of
from replicator.cli.look.plan_plot import plot_of
from replicator.cli.main import main
from replicator.errors import ArgumentError
from tests.tuning import problems, test_rehearse
from tests.tuning.rows import row

HUGE = row("zero1", status="memory", needs=18)


def test_a_topology_without_a_name_has_that_of_the_one_before():
    assert topologies_of("v5p:4x4x4, 8x8x8") == ["v5p:4x4x4", "v5p:8x8x8"]


def test_a_device_whose_links_nobody_published_is_refused():
    with pytest.raises(ArgumentError, match="must begin with a device whose links"):
        topologies_of("tpu7x:2x2")


def test_the_table_says_what_fits_by_how_much_and_marks_the_best():
    lines = table_rows([HUGE, row()])
    assert [line[1:5] for line in lines] == [
        ("zero1", "no, 2 GiB over", "18.00", "16.00"),
        ("fsdp *", "yes", "8.00", "16.00"),
    ]
    assert lines[1][-1] == "shard 1 GB"


def test_notes_say_what_to_change():
    notes = notes_of([HUGE, row()])
    assert any("zero1 too large: take fsdp, which fits" in note for note in notes)


def test_notes_name_the_nearest_where_nothing_fits():
    assert "The nearest is zero1 on v5e:4x4, which lacks 2 GiB" in notes_of([HUGE])[-1]


def test_notes_say_what_is_a_forecast_and_why_something_was_refused():
    notes = notes_of([row(status="forecast"), row(status="refused", reason="odd.")])
    assert any("Not compiled: a forecast" in note for note in notes)
    assert "v5e:4x4 fsdp refused: odd." in notes


def test_the_picture_has_bars_of_each_row_that_came_to_something():
    drawn = ElementTree.fromstring(plot_of([HUGE, row()]))
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"v5e:4x4 zero1", "v5e:4x4 fsdp", "memory"} <= set(texts)


def test_a_strategy_that_is_not_known_is_bad_input(capsys):
    place = f"{problems.__file__}:problem"
    code = main(["plan", place, "--topology", "v5e:4x4", "--strategy", "fdsp"])
    assert (code, "got 'fdsp'" in capsys.readouterr().err) == (2, True)


@pytest.mark.slow
def test_a_plan_of_gpus_chooses_and_is_printed_and_written(tmp_path, capsys):
    plain, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    place = f"{problems.__file__}:problem"
    options = ["--json", str(plain), "--plot", str(picture)]
    assert main(["plan", place, "--topology", "h100:1", *options]) == 0
    printed = capsys.readouterr().out
    assert "its state does" in printed
    assert "h100:1: data_parallel of 1 candidate, predicted " in printed
    row, chosen = json.loads(plain.read_text())
    assert (row["strategy"], chosen["choice"]["chosen"]) == ("data_parallel",) * 2
    assert picture.read_text().startswith("<svg")


def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_compiled(
    tmp_path, capsys
):
    place = f"{problems.__file__}:problem"
    code = main(["plan", place, "--topology", "h100:2", f"--json={tmp_path}"])
    assert code == 2
    said = capsys.readouterr().err
    assert "must name files" in said
    assert "forecast" not in said


@pytest.mark.slow
def test_a_rehearsal_without_small_sizes_is_refused_before_compiling(capsys):
    place = f"{problems.__file__}:problem"
    code = main(["plan", place, "--topology=h100:2", "--strategy=fsdp", "--rehearse"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert "`problem` must take `small` to be rehearsed" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "code", "part"),
    [
        ("problem", 0, "rehearsed on shard=8: ok, update 1: at most `"),
        ("wrong", 1, "rehearsed on shard=8: differs, `seen` off by "),
    ],
)
def test_a_plan_is_rehearsed_on_as_many_faked_devices(
    function, code, part, tmp_path, capsys
):
    place, numbers = f"{test_rehearse.__file__}:{function}", tmp_path / "plan.json"
    options = ["--strategy=fsdp(whole_below_bytes=0)", "--forecast", "--rehearse"]
    options += ["--topology=v5e:2x4", f"--json={numbers}"]

    assert main(["plan", place, *options]) == code
    assert part in capsys.readouterr().out
    (row,) = json.loads(numbers.read_text())
    assert row["rehearsal"]["mesh"] == {"replica": 1, "shard": 8, "model": 1}

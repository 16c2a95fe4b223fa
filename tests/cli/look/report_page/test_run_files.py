"""Reading a run's directory: what is torn, absent or strange ends nothing."""

import math

import pytest

from replicator.cli.look.report_page.run_files import read_run
from replicator.errors import ArgumentError
from tests.cli.look.report_page.runs import make_run, write_rows


def test_a_whole_run_is_read_without_a_word(tmp_path):
    found = read_run(make_run(tmp_path / "run"))
    assert found.problems == []
    assert (len(found.rows), found.rows[-1].step) == (200, 200)
    assert found.record["seed"] == 7
    assert [event["kind"] for event in found.events][-1] == "ended"
    assert list(found.earlier) == ["earlier/0"]


def test_words_for_nan_and_infinity_are_numbers_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time_s": 0, "a": "NaN", "b": "-Infinity", "c": true, "d": "x"}\n'
    )
    [row] = read_run(tmp_path).rows
    assert math.isnan(row.numbers["a"])
    assert row.numbers["b"] == -math.inf
    assert set(row.numbers) == {"a", "b"}


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 3, "lo',
        "[1, 2]",
        "3",
        '{"loss": 1}',
        '{"step": "x"}',
        "\0\0\0",
        "\xff",
    ],
)
def test_a_damaged_line_is_left_out_and_told(tmp_path, torn):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "time_s": 0.0, "loss": 2.0}])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn.encode("latin-1"))
    found = read_run(tmp_path)
    assert [row.step for row in found.rows] == [1]
    assert "metrics.jsonl: 1 damaged lines were left out." in found.problems


def test_each_file_may_be_missing(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("run.json", "metrics.jsonl"):
        (run / name).unlink()
        assert any(name in problem for problem in read_run(run).problems)


def test_a_record_that_is_no_json_is_told(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "run.json").write_text('{"seed": ')
    found = read_run(run)
    assert found.record == {}
    assert found.problems[0].startswith("run.json could not be read")


def test_a_strange_journal_is_told_or_read(tmp_path):
    run = make_run(tmp_path / "run")
    with open(run / "events.jsonl", "a") as file:
        file.write('{"time": 3, "kind": null}\n{"time": nul')
    assert len(read_run(run).events) in (0, 12)


@pytest.mark.parametrize("what", ["absent", "file", "empty"])
def test_what_is_no_run_is_refused_by_name(tmp_path, what):
    path = tmp_path / what
    if what == "file":
        path.touch()
    if what == "empty":
        path.mkdir()
    with pytest.raises(ArgumentError, match=rf"must be the directory of a run.*{what}"):
        read_run(path)


def test_links_in_stacks_are_not_followed(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "secret.txt").write_text("secret")
    (run / "stacks" / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert "stacks/link.txt" not in {file.path for file in read_run(run).left}

"""`replicator report`: where the page goes, and what is no run."""

from replicator.cli import main as cli
from tests.cli.look.report_page.runs import make_run


def test_the_page_is_in_the_directory_by_default(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    # plotly is in it, packed: 4.8 MB by itself.
    assert 1_000_000 < (run / "report.html").stat().st_size < 2_500_000


def test_the_page_goes_where_it_is_asked_for(tmp_path):
    run = make_run(tmp_path / "run")
    assert cli.main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    assert not (run / "report.html").exists()


def test_what_is_no_run_is_bad_input(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"replicator: error: `DIR` must be the directory of a run, got {tmp_path}"
    )


def test_a_place_that_cannot_be_written_to_is_an_error(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert cli.main(["report", str(run), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert "No such file or directory" in capsys.readouterr().err

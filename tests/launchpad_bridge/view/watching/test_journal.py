import logging
import shutil

import pytest

from replicator.distributed.processes.states import (
    Finish,
    Restart,
    StopAsked,
    TimeUp,
    Unit,
)
from replicator.distributed.processes.supervisor import begin, decide
from replicator.launchpad_bridge.protocols import Exited
from replicator.launchpad_bridge.running.exit_mapping import ended
from replicator.launchpad_bridge.view.watching.journal import (
    JOURNAL,
    JournalReader,
    RunJournal,
    RunNote,
)

ONCE = Restart(attempts=1, backoff_s=1.0)


@pytest.fixture
def run(tmp_path):
    """A journal of a run of two workers, its reader, and what happens to it."""
    journal = RunJournal(tmp_path)
    units = [Unit(workers=("a",)), Unit(workers=("b",), restart=ONCE)]
    state, _ = begin(units, 100.0)
    journal.note(state, None)

    class Run:
        folder = tmp_path
        reader = JournalReader(tmp_path)

        def happens(self, event, at_s=101.0, finish=None):
            nonlocal state
            state, _ = decide(state, event, at_s)
            journal.note(state, finish)
            return self.reader.read()

        def notes_again(self):
            journal.note(state, None)

    made = Run()
    yield made
    made.reader.close()


def raised(name, attempt=0):
    error = ValueError("oh no\nmore of it")
    return ended(Exited(name=name, attempt=attempt, outcome="raised", error=error))


def test_all_workers_run_at_first(run):
    note = run.reader.read()
    assert (note.phase, note.failure, note.stopped_by) == ("running", "", "")
    assert {n: (w.phase, w.restarts) for n, w in note.workers.items()} == {
        "a": ("running", 0),
        "b": ("running", 0),
    }


def test_a_worker_that_waits_for_its_restart_says_why(run):
    note = run.happens(raised("b")).workers["b"]
    assert (note.phase, note.outcome, note.restarts) == ("waiting", "raised", 0)
    assert note.error == "`b` raised ValueError: oh no"


def test_a_restart_is_counted(run):
    run.happens(raised("b"))
    note = run.happens(TimeUp(), 102.5).workers["b"]
    assert (note.phase, note.restarts) == ("running", 1)


def test_a_failure_is_told_with_the_phase(run):
    note = run.happens(raised("a"))
    assert (note.phase, note.failure) == ("stopping", "`a` raised ValueError: oh no")


def test_who_asked_for_the_stop_is_told(run):
    assert run.happens(StopAsked(by="a")).stopped_by == "a"


def test_it_has_ended_when_the_launcher_has_closed(run):
    for name in "ab":
        done = ended(Exited(name=name, attempt=0, outcome="returned"))
        note = run.happens(done, finish=Finish() if name == "b" else None)
    assert note.phase == "ended"
    assert {worker.outcome for worker in note.workers.values()} == {"returned"}


def test_only_what_changed_is_written(run):
    path = run.folder / JOURNAL
    size = path.stat().st_size
    run.notes_again()
    assert path.stat().st_size == size
    run.happens(raised("b"))
    assert b'"a"' not in path.read_bytes().splitlines()[-1]


def test_the_end_is_read_though_the_folder_went_away(run):
    run.reader.read()
    with (run.folder / JOURNAL).open("ab") as file:
        shutil.rmtree(run.folder)
        file.write(b'{"run": {"phase": "ended"}, "workers": {}}\n')
    assert run.reader.read().phase == "ended"


def test_half_a_line_is_read_when_it_is_whole(run):
    run.reader.read()
    with (run.folder / JOURNAL).open("ab", buffering=0) as file:
        file.write(b'{"run": {"phase": "stop')
        assert run.reader.read().phase == "running"
        file.write(b'ping"}, "workers": {}}\n')
    assert run.reader.read().phase == "stopping"


def test_only_its_owner_reads_it(run):
    assert (run.folder / JOURNAL).stat().st_mode & 0o077 == 0


def test_a_run_goes_on_where_nothing_can_be_written(tmp_path, caplog):
    state, _ = begin([Unit(workers=("a",))], 0.0)
    with caplog.at_level(logging.WARNING):
        RunJournal(tmp_path / "gone").note(state, None)
    assert "cannot be noted" in caplog.text


def test_nothing_is_known_before_the_start():
    assert RunNote().phase == "starting"

"""Draws of a run with the rows that they are of, written before they are given out."""

import os

import numpy as np

from replicator.base.types import PyTree
from replicator.launchpad_bridge.replay.turns.numbered_draws import NumberedSample
from replicator.launchpad_bridge.replay.turns.sample_order import SampleOrder
from replicator.launchpad_bridge.replay.turns.turn_journal import TurnJournal
from replicator.launchpad_bridge.trajectories.rows import RowForm, RowMemory, form_of
from replicator.launchpad_bridge.trajectories.table import Cut, TableRestartedError

_ACTOR = "checkpoint_dir"  # in errors of form


class JournaledDraws:
    """Rows, records and journal of a table; for one thread at a time.

    Attributes:
      draws: Records of the rows and of the samples.
      batches_in: Number of batches of new rows.
      journal_id: Of the run, all that came since it was begun.
      form: Form of the rows; None before the first.
    """

    form: RowForm | None

    def __init__(self, order: SampleOrder, journal: TurnJournal) -> None:
        """Take over a journal, which `begin_anew` or `go_back` must read first."""
        self._order, self._journal = order, journal
        self._forget()

    def begin_anew(self) -> None:
        """Begin a run without rows; delete what the journal has."""
        self._journal.clear()
        self._forget()

    def go_back(self, cut: Cut) -> None:
        """Go on behind the last batch of a cut.

        Raises:
          ArgumentError: The cut is of another run, or of a batch that is not there.
        """
        batches_in = self._order.first_batches + cut.batch - 1
        at = self.draws.batch, self.batches_in
        if self._is_whole and at == (cut.batch, batches_in):
            # It is there: the learner did not get the answer to the call before.
            self._order.check_cut(cut, self.journal_id)
            return
        self._forget()
        found, first, end = None, 0, 0  # rows from `first` to `end` without a gap
        for part in self._journal.go_back(cut.batch):
            if "base" in part:
                found = part["base"]
                self._order.check_cut(cut, found["journal_id"])
                oldest = max(found["inserted"] - self._order.capacity, 0)
                if first > oldest or end < found["inserted"]:
                    raise self._journal.gone(cut.batch)
                self.draws.restore(found)
                self.journal_id = found["journal_id"]
            elif "draw" in part:
                self.draws.draw(part["due"])
            else:
                serials = part["first"] + np.arange(self._order.new_rows_per_batch)
                first = first if part["first"] == end else part["first"]
                end = part["first"] + len(serials)
                self._keep(part["rows"], self.draws.ring.slots(serials))
                if found is not None:  # else the base counts them
                    self.draws.ring.append(len(serials))
        self.batches_in = batches_in

    def append(self, rows: PyTree) -> None:
        """Write and insert a batch of new rows.

        Raises:
          OSError: They cannot be written.
          TableRestartedError: So it was before: go back first.
        """
        self._begin_part()
        if self._journal.is_full():
            base = {"journal_id": self.journal_id, **self.draws.to_saved()}
            self._journal.begin_file(base)
        ring = self.draws.ring
        self._journal.write({"rows": rows, "first": ring.inserted})
        self._keep(rows, ring.append(self._order.new_rows_per_batch))
        self.batches_in += 1
        self._is_whole = True

    def draw(self) -> tuple[PyTree, NumberedSample]:
        """Write the priorities that are due, apply them, and draw the next batch.

        Raises:
          OSError: They cannot be written.
          TableRestartedError: So it was before: go back first.
        """
        assert self._memory is not None, "rows are in it"
        self._begin_part()
        due = self.draws.due()
        self._journal.write({"draw": self.draws.batch, "due": due})
        sample = self.draws.draw(due)
        self._is_whole = True
        return self._memory.read(self.draws.ring.slots(sample.serials)), sample

    def _begin_part(self) -> None:
        if not self._is_whole:
            raise TableRestartedError(
                "`begin` must be called after a write that failed, got no call. Pass "
                "the last batch's cut."
            )
        self._is_whole = False

    def _forget(self) -> None:
        self.draws, self.batches_in = self._order.new_draws(), 0
        self.journal_id = os.urandom(8).hex()
        self._memory: RowMemory | None = None
        self.form = None
        self._is_whole = True  # False: the journal may end with half of a part

    def _keep(self, rows: PyTree, slots: np.ndarray) -> None:
        """Copy new rows into their places; the first ones set the form."""
        if self.form is None or self._memory is None:
            self.form = form_of(rows, _ACTOR)
            self._memory = RowMemory(self.form, self._order.capacity, ())
        self._memory.write(slots, self.form.check(rows, _ACTOR))

"""Reads that were asked for before their ops ended: answered when they end."""

from collections.abc import Collection, Sequence

from replicator.controller.islands.protocol import Key


class AskedReads:
    """Keys that are read together, each with those that are not computed yet.

    >>> asked = AskedReads()
    >>> asked.ask([(7, 0), (7, 1)], missing={(7, 1)})
    >>> asked.computed(7, [1])
    [[(7, 0), (7, 1)]]
    """

    def __init__(self) -> None:
        self._reads: list[tuple[list[Key], set[Key]]] = []

    def ask(self, keys: Sequence[Key], missing: Collection[Key]) -> None:
        """Take a read; `missing` are not computed yet."""
        self._reads.append((list(keys), set(missing)))

    def computed(self, run: int, values: Sequence[int]) -> list[list[Key]]:
        """Take it that values of a run are computed; return the reads that are done."""
        if not self._reads:
            return []
        made = {(run, value) for value in values}
        for _, missing in self._reads:
            missing -= made
        done = [keys for keys, missing in self._reads if not missing]
        self._reads = [each for each in self._reads if each[1]]
        return done

    def forget(self, key: Key) -> None:
        """Forget reads of a value that nobody can read any more."""
        self._reads = [each for each in self._reads if key not in each[0]]

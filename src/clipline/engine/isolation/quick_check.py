"""One comparison for many snapshots at once. Most of the time nothing has changed, and then this is all there is to do.

Plain twin: `all(snapshot.same() for snapshot in snapshots)`. What it buys: the checks after a user of the handwriting
model take a third of the time (benchmarks/isolation_cost.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import call, is_
from typing import Any

from .snapshots import Snapshot

_END = object()  # after the entries of each container, so that no entry can move from one to the next


class QuickCheck:
    """Compares all entries of all snapshots by identity, in a few calls that loop in C.

    Holds live views of the containers, so that nothing has to be collected. `passes` may be False although nothing has
    changed (a set whose entries were taken out and put back), and is never True if something has.
    """

    def __init__(self, snapshots: Iterable[Snapshot]) -> None:
        self._views: list[Iterable[Any]] = []
        self._entries: list[Any] = []  # of the views, as they were
        self._reads: list[Any] = []
        self._values: list[Any] = []  # of the reads, as they were
        self._others: list[Snapshot] = []
        for snapshot in snapshots:
            views = snapshot.live_views()
            if views:
                self._views += [*views, (_END,)]
            elif snapshot.read is not None:
                self._reads.append(snapshot.read)
                self._values.append(snapshot.read())
            else:
                self._others.append(snapshot)
        self._entries += chain.from_iterable(self._views)

    def passes(self) -> bool:
        """Whether nothing has changed since this was made."""
        return (
            all(map(is_, chain.from_iterable(self._views), self._entries))
            and all(map(is_, map(call, self._reads), self._values))
            and all(snapshot.same() for snapshot in self._others)
        )

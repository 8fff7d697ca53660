"""The releases of a run, in memory and as lines of JSON: the only thing that the accountant reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import RunError, SettingError, check_whole, refuse, regular
from .events import GaussianEvent, GroupedPoissonSampling, PoissonSampling

VERSION = 1


@dataclass(frozen=True)
class Ledger:
    """Every round so far, in order, behind the statistics that were released before. Iterating gives one event each.

    `entries` holds (event, how many in a row): equal rounds are stored once, and so are rounds of one correlated noise,
    each the next of the one before it. A ledger never changes; `add` returns the next one.
    """

    entries: tuple[tuple[GaussianEvent, int], ...] = ()

    def add(self, event: GaussianEvent, count: int = 1) -> Ledger:
        """The ledger followed by `count` rounds, the first of which is `event`; with `count=0`, itself."""
        check_whole("count", count, at_least=0, way_out="give the number of rounds")
        if count == 0:
            return self
        if self.entries and self.next_event == event:
            return Ledger((*self.entries[:-1], (self.entries[-1][0], self.entries[-1][1] + count)))
        return Ledger((*self.entries, (event, count)))

    @property
    def next_event(self) -> GaussianEvent:
        """What one more round like the last would be."""
        event, count = self.entries[-1]
        return event.at(event.index + count)

    def with_statistics(self, events: Iterable[GaussianEvent]) -> Ledger:
        """The ledger followed by statistics, each of which it holds once, however often it is handed in."""
        ledger, known = self, {event.statistic.identity: event for event in self.events if event.statistic is not None}
        for event in events:
            if not isinstance(event, GaussianEvent) or event.statistic is None:
                raise refuse(
                    "preprocessing", event, "private statistics", "give what cl.PrivateStatistics has released"
                )
            identity = event.statistic.identity
            if known.setdefault(identity, event) != event:
                raise refuse(
                    "preprocessing", event.statistic.name, "told apart from another statistic of the same identity",
                    "release it again, by another seed or none",
                )  # fmt: skip
            if event not in ledger.events:
                ledger = ledger.add(event)
        return ledger

    @property
    def rounds(self) -> int:
        """How many rounds of training there were."""
        return sum(count for event, count in self.entries if event.statistic is None)

    @property
    def releases(self) -> int:
        """How many releases there were, rounds and statistics: so many lines a file has."""
        return sum(count for _, count in self.entries)

    @property
    def events(self) -> dict[GaussianEvent, int]:
        """Each different event with its number of rounds. Rounds of correlated noise differ by their index alone."""
        totals: dict[GaussianEvent, int] = {}
        for event, count in self.entries:
            totals[event.at(0)] = totals.get(event.at(0), 0) + count
        return totals

    @property
    def costs(self) -> dict[GaussianEvent, int]:
        """What is accounted: each event with its number of rounds, where correlated noise costs fewer.

        A user takes part in one at most of rounds 0 to b-1 of a noise with b bands, and of b to 2b-1, and so on: each
        such block costs one Poisson round (docs: proofs.md). Every entry counts the blocks that it touches. So lines
        that are doubled, missing or out of order, which break up an entry, never cost less, and two trainings share no
        block.
        """
        totals: dict[GaussianEvent, int] = {}
        for event, count in self.entries:
            if isinstance(event.sampling, GroupedPoissonSampling):
                first, bands = event.sampling.index, event.sampling.bands
                count = (first + count - 1) // bands - first // bands + 1
                event = replace(event, sampling=PoissonSampling(event.sampling.rate))
            totals[event] = totals.get(event, 0) + count
        return totals

    def __iter__(self) -> Iterator[GaussianEvent]:
        for event, count in self.entries:
            yield from (event.at(event.index + place) for place in range(count))

    @staticmethod
    def read(path: str | Path, *, unfinished: bool = False) -> Ledger:
        """The ledger in a file of `ledger_line`s; an empty file is an empty ledger.

        A line that cannot be parsed, is of another version or breaks the numbering 0, 1, 2, ... is refused: a ledger
        with a hole would understate what was spent. In a file that is `unfinished` the last line may be cut short: its
        round was never released.
        """
        try:
            text = regular(Path(path)).read_text(encoding="utf-8")
            lines = text.split("\n")[:-1] if unfinished else text.splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"ledger {path} cannot be read ({error}): give the ledger of a run") from error
        ledger = Ledger()
        for index, line in enumerate(lines):
            ledger = ledger.add(_parse(line, index, f"{path}, line {index + 1}"))
        return ledger


def ledger_line(round_index: int, event: GaussianEvent) -> str:
    """One release as a line of JSON, without the newline. Lines count from 0, those of statistics first."""
    return json.dumps({"version": VERSION, "round": round_index, **event.to_json()})


def _parse(line: str, round_index: int, place: str) -> GaussianEvent:
    way_out = "restore the ledger from a copy, or start a new run"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{place}: not a line of JSON ({error}): {way_out}") from error
    if not isinstance(fields, dict):
        raise RunError(f"{place}: {line!r} must be a JSON object: {way_out}")
    version, number = fields.pop("version", None), fields.pop("round", None)
    if version != VERSION:
        raise RunError(f"{place}: version={version!r} must be {VERSION}: read it with the clipline that wrote it")
    if number != round_index:
        raise RunError(f"{place}: round={number!r} must be {round_index}, rounds count from 0 without a gap: {way_out}")
    try:
        return GaussianEvent.from_json(fields)
    except SettingError as error:
        raise RunError(f"{place}: {error}") from error

from __future__ import annotations

from enum import StrEnum


class Relation(StrEnum):
    """Which two populations are neighbours, that is, what a guarantee hides about one user."""

    ADD_OR_REMOVE = "add-or-remove"
    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"

    @property
    def meaning(self) -> str:
        """The difference between two neighbouring populations, in words."""
        return _MEANINGS[self]

    @property
    def phrase(self) -> str:
        """What a neighbour does to one user, as it stands in a guarantee: "replace one user"."""
        return f"{self.value.removesuffix('-one')} one user"


_MEANINGS = {
    Relation.ADD_OR_REMOVE: "one user more or one user less",
    Relation.REPLACE_ONE: "one user exchanged for any other",
    # The bit is centred: a silent user adds 0 to the sum of (within - 1/2), which is not what a zero update would add.
    Relation.ZERO_OUT: "one user made silent, who then adds nothing to the updates nor to the centred count",
}

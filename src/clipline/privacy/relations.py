"""Which two populations count as neighbours: what a guarantee hides about one user."""

from __future__ import annotations

from enum import StrEnum

from ..errors import check_choice


class Relation(StrEnum):
    """Which two populations are neighbours. A guarantee says that they can hardly be told apart.

    The values are `ADD_OR_REMOVE`, `REPLACE_ONE`, `ZERO_OUT` and `PAPER`. The last one reproduces the paper's Table 1
    and is not a guarantee.

    Example:
      >>> cl.Privacy(epsilon=4.0, relation=cl.Relation.ZERO_OUT)
    """

    ADD_OR_REMOVE = "add-or-remove"
    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"
    PAPER = "paper"

    @classmethod
    def named(cls, name: str) -> Relation:
        """The relation of this name.

        Args:
          name: Such as "add-or-remove".

        Returns:
          The relation.

        Raises:
          SettingError: If there is none. The text has the nearest known name.
        """
        return cls(check_choice("relation", name, [relation.value for relation in cls]))

    @property
    def sound(self) -> bool:
        """Whether an epsilon under this relation is a guarantee. The paper's convention only reproduces a table."""
        return self is not Relation.PAPER

    @property
    def meaning(self) -> str:
        """The difference between two neighbouring populations, in words."""
        return _MEANINGS[self]

    @property
    def phrase(self) -> str:
        """What a neighbour does to one user, as it stands in a guarantee: "replace one user"."""
        return self.phrase_for("user")

    def phrase_for(self, unit: str) -> str:
        """`phrase` for another unit of privacy than "user": "replace one example"."""
        if self is Relation.PAPER:
            return "the paper's convention"
        if self is Relation.ZERO_OUT:
            return f"zero-out one {unit} (the number of {unit}s is public)"
        return f"{self.value.removesuffix('-one')} one {unit}"


_MEANINGS = {
    Relation.ADD_OR_REMOVE: "one user more or one user less",
    Relation.REPLACE_ONE: "one user exchanged for any other",
    # The bit is centred: a silent user adds 0 to the sum of (within - 1/2), while a zero update would add 1/2.
    Relation.ZERO_OUT: (
        "one user made silent, who then adds nothing to the updates nor to the centred count, but still counts in the "
        "number of users, which is public"
    ),
    # Fixed-size sampling accounted as if exchanging a user moved the sum by one clip norm; it moves it by two.
    Relation.PAPER: "one user exchanged for another who differs by one clip norm only, which no clipping ensures",
}

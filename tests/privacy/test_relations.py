"""The neighbouring relations: names, words and what may be claimed."""

import pytest

from clipline.errors import SettingError
from clipline.privacy.relations import Relation


def test_every_relation_says_what_it_means():
    assert Relation("add-or-remove").meaning == "one user more or one user less"
    assert len({relation.meaning for relation in Relation}) == 4
    assert [relation.phrase for relation in Relation] == [
        "add-or-remove one user",
        "replace one user",
        "zero-out one user (the number of users is public)",
        "the paper's convention",
    ]
    assert [relation.sound for relation in Relation] == [True, True, True, False]
    assert "centred count" in Relation.ZERO_OUT.meaning
    # Clipping bounds each of the two users by one clip norm, and their difference by two.
    assert "no clipping ensures" in Relation.PAPER.meaning


@pytest.mark.parametrize("relation", Relation)
def test_a_relation_is_found_by_its_name_and_prints_as_it(relation):
    assert Relation.named(relation.value) is Relation.named(relation) is relation
    assert str(relation) == relation.value


@pytest.mark.parametrize(
    ("name", "words"),
    [("replace-two", "did you mean 'replace-one'"), ("zero_out", "did you mean 'zero-out'"), (None, "must be one of")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, words):
    with pytest.raises(SettingError, match=words):
        Relation.named(name)

"""The neighbouring relations: names, words and what may be claimed."""

import pytest

from clipline.errors import SettingError
from clipline.privacy.relations import Relation


def test_the_papers_convention_alone_is_not_sound():
    assert [relation.sound for relation in Relation] == [True, True, True, False]
    assert Relation.ZERO_OUT.phrase == "zero-out one user (the number of users is public)"


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

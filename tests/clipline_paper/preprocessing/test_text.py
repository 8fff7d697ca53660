import numpy as np
import pytest

from clipline_paper.preprocessing import CHARACTERS, encode_bag, encode_sentence, encode_snippet, encode_tags

WORD = {"how": 0, "to": 1, "sort": 2, "list": 9999}


def number(text):
    return [CHARACTERS.index(character) + 1 for character in text]


def test_there_are_86_characters_and_each_stands_once():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 86
    assert number("dh\r") == [1, 2, 86]


def test_a_snippet_begins_ends_and_is_padded_to_81():
    row = encode_snippet("To be")
    assert row.shape == (1, 81)
    assert row.dtype == np.uint8
    assert row[0].tolist() == [88, *number("To be"), 89] + [0] * 74


@pytest.mark.parametrize(("length", "rows"), [(0, 1), (79, 1), (80, 2), (160, 2), (161, 3)])
def test_a_snippet_is_cut_into_rows_of_81(length, rows):
    out = encode_snippet("a" * length)
    assert out.shape == (rows, 81)
    assert (out.ravel() == 0).sum() == rows * 81 - length - 2


def test_bytes_outside_the_vocabulary_are_87():
    assert encode_snippet("a~é")[0, 1:6].tolist() == [*number("a"), 87, 87, 87, 89]  # é is two bytes
    assert encode_snippet(b"a~")[0, 1:4].tolist() == [*number("a"), 87, 89]


def test_a_short_sentence_ends_and_is_padded_to_21():
    tokens = encode_sentence("how to sort list quickly", WORD)
    assert tokens.tolist() == [10002, 1, 2, 3, 10000, 10001, 10003] + [0] * 14
    assert tokens.dtype == np.int16


@pytest.mark.parametrize(("words", "ends"), [(1, True), (19, True), (20, False), (21, False), (40, False)])
def test_a_sentence_has_an_end_only_if_it_has_fewer_than_20_words(words, ends):
    tokens = encode_sentence(" ".join(["how"] * words), WORD)
    assert len(tokens) == 21
    assert (10003 in tokens) is ends
    assert (tokens == 1).sum() == min(words, 20)


def test_pitfall_defaults_that_drift_bags_divide_by_all_words_including_unknown_ones():
    words, weights = encode_bag("how to sort what", "how whatever", WORD)  # six words, two of them unknown
    assert words[:4].tolist() == [0, 1, 2, 10000]
    np.testing.assert_allclose(weights[:4], [2 / 6, 1 / 6, 1 / 6, 0])
    assert weights.sum() == pytest.approx(1 - 2 / 6)
    assert words.shape == weights.shape == (128,)


def test_of_many_different_words_the_first_128_are_kept_and_all_divide():
    many = {f"w{i}": i for i in range(200)}
    words, weights = encode_bag(" ".join(many), "", many)
    assert words.tolist() == list(range(128))
    np.testing.assert_allclose(weights, 1 / 200)


def test_unknown_tags_are_dropped_and_there_may_be_none():
    tags = {"python": 3, "numpy": 499}
    assert encode_tags("python|cobol|numpy|python", tags).tolist() == [3, 499, -1, -1, -1]
    assert encode_tags("cobol", tags).tolist() == [-1] * 5

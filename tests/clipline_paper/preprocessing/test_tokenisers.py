import numpy as np

from clipline_paper.preprocessing import sentences, snippets, tagged_posts, together

IDS = np.array(["a", "b"])


def texts(**fields):
    return IDS, {name: np.array(values, object) for name, values in fields.items()}


def test_a_snippet_of_many_rows_keeps_its_role_in_all_of_them():
    ids, fields = snippets(texts(snippets=["x" * 200, "y"]))
    assert ids.tolist() == ["a", "a", "a", "b"]
    assert fields["tokens"].shape == (4, 81)
    assert (fields["tokens"][:, 0] == 88).tolist() == [True, False, False, True]


def test_a_word_that_stands_twice_in_the_list_has_its_first_number():
    _, fields = sentences(["to", "be", "to"])(texts(tokens=["to be", "be"]))
    assert fields["tokens"][:, :4].tolist() == [[10002, 1, 2, 10003], [10002, 2, 10003, 0]]
    assert fields["tokens"].dtype == np.int16


def test_both_tasks_in_one_chunk():
    chunk = texts(tokens=["to be", "or"], title=["be", ""], tags=["c|d", "e"])
    both = together(sentences(["to", "be"]), tagged_posts(["to", "be"], ["d", "c"]))
    ids, fields = both(chunk)
    assert ids is IDS
    assert {name: field.shape for name, field in fields.items()} == {
        "tokens": (2, 21), "words": (2, 128), "weights": (2, 128), "tags": (2, 5),
    }  # fmt: skip
    np.testing.assert_allclose(fields["weights"][:, :3], [[1 / 3, 2 / 3, 0], [0, 0, 0]])
    assert fields["tags"].tolist() == [[1, 0, -1, -1, -1], [-1] * 5]

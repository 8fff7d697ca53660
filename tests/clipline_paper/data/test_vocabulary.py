import io
import tarfile

import pytest

from clipline.errors import CliplineError, PopulationError
from clipline_paper.data.prepare_tff import read_tags, read_words

WORDS = b"the 342000\n. 341000\nc++ 20\n"
TAGS = b'{"rare": 1, "java": 90, "python": 120, "c#": 90}'


def packed(folder, name, data):
    path = folder / f"{name}.tar.bz2"
    with tarfile.open(path, "w:bz2") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return path


def test_words_in_the_order_of_the_file_plain_and_packed(tmp_path):
    (tmp_path / "stackoverflow.word_count").write_bytes(WORDS)
    for path in (tmp_path / "stackoverflow.word_count", packed(tmp_path, "stackoverflow.word_count", WORDS)):
        assert read_words(path, 2) == ["the", "."]
        assert read_words(path, 3) == ["the", ".", "c++"]


def test_tags_by_number_of_users_plain_and_packed(tmp_path):
    (tmp_path / "stackoverflow.tag_count").write_bytes(TAGS)
    for path in (tmp_path / "stackoverflow.tag_count", packed(tmp_path, "stackoverflow.tag_count", TAGS)):
        assert read_tags(path, 3) == ["python", "java", "c#"]


@pytest.mark.parametrize(
    ("read", "data", "size", "words"),
    [
        (read_words, WORDS, 4, "list' has 3 entries but the first 4 are needed: download it again"),
        (read_words, b"the 1\nalone\n", 2, "no word and count in line 2"),
        (read_words, b"\xff\xfe", 1, "cannot be read"),
        (read_tags, b"", 1, "is empty"),
    ],
)
def test_damaged_lists(tmp_path, read, data, size, words):
    (tmp_path / "list").write_bytes(data)
    with pytest.raises(CliplineError, match=words):
        read(tmp_path / "list", size)


@pytest.mark.parametrize("content", ["null", '["ab"]', '{"a": "many"}', '{"a": NaN}', "[" * 100_000, "1" * 5000])
def test_a_list_of_tags_that_is_none_is_refused(content, tmp_path):
    (tmp_path / "tags").write_text(content)
    with pytest.raises(PopulationError, match=r"is no list of tags \(.*\): download it again"):
        read_tags(tmp_path / "tags", 1)

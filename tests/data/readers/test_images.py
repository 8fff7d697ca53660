"""Pictures of a folder: written by Pillow, read back, and refused where they lead astray."""

import sys
import warnings

import numpy as np
import pyarrow as pa
import pytest

from clipline import Population
from clipline.errors import PopulationError, SettingError

Image = pytest.importorskip("PIL.Image")
RED, GREY = (200, 30, 10), 77


@pytest.fixture
def faces(tmp_path):
    folder = tmp_path / "faces"
    (folder / "in").mkdir(parents=True)
    Image.new("RGB", (6, 4), RED).save(folder / "red.png")
    Image.new("L", (8, 8), GREY).save(folder / "in" / "grey.jpg", quality=100)
    Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).save(folder / "steps.png")
    return folder


def test_pictures_are_scaled_converted_and_grouped(faces, tmp_path):
    table = pa.table({"who": ["b", "a", "b"], "file": ["red.png", "in/grey.jpg", "steps.png"], "smiles": [1, 0, 0]})
    people = Population.from_images(faces, table, user="who", size=(2, 3), channels=3)
    x = people.fields["x"]
    assert (x.shape, x.dtype) == ((3, 3, 2, 3), np.uint8)
    assert people.user_ids.tolist() == ["a", "b"]
    assert people.fields["smiles"].tolist() == [0, 1, 0]
    assert (x[0] == GREY).all()
    assert [(x[1, channel] == level).all() for channel, level in enumerate(RED)] == [True] * 3
    assert x[2, 0].tolist() == x[2, 2].tolist() == [[0, 1, 2], [3, 4, 5]]  # of that size already
    grey = Population.from_images(
        faces, {"steps.png": 7, "red.png": 7}, user="who", size=(2, 3), channels=1, field="picture"
    )
    assert grey.fields["picture"].shape == (2, 1, 2, 3)
    assert grey.fields["picture"][1, 0, 0, 0] == round(0.299 * 200 + 0.587 * 30 + 0.114 * 10)  # luma of BT.601
    (tmp_path / "t.csv").write_text("who,file,smiles\n007,red.png,1\n7,steps.png,0\n")
    assert Population.from_images(faces, tmp_path / "t.csv", user="who", size=(1, 1)).user_ids.tolist() == ["007", "7"]


def test_what_leads_astray_is_refused_without_the_name_of_a_file(faces, tmp_path):
    secret = tmp_path / "anna.png"
    Image.new("L", (2, 2)).save(secret)
    (faces / "link.png").symlink_to(secret)
    (faces / "cut.png").write_bytes((faces / "red.png").read_bytes()[:40])
    Image.new("L", (2, 2)).save(faces / "anna.gif")
    for file, words in (
        *((one, "picture 2 is not in the folder") for one in ("anna.png", "../anna.png", str(secret), "link.png")),
        ("cut.png", "picture 2 of 2 cannot be read as PNG or JPEG"),
        ("anna.gif", "picture 2 of 2 cannot be read as PNG or JPEG"),
        ("", "picture 2 is not in the folder"),
        (None, "picture 2 is not in the folder"),
    ):
        with pytest.raises(PopulationError, match=words) as error:
            Population.from_images(faces, {"u": [1, 2], "file": ["red.png", file]}, user="u", size=(2, 2))
        assert "anna" not in str(error.value)


def test_a_small_file_with_a_huge_picture_is_refused(faces, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)  # Pillow's limit; up to twice as much it only warns
    with warnings.catch_warnings(action="ignore"):
        Image.open(faces / "red.png").load()
        with pytest.raises(PopulationError, match=r"picture 1 of 1 cannot be read .*DecompressionBombWarning"):
            Population.from_images(faces, {"red.png": 1}, user="u", size=(2, 2))


def test_settings_of_pictures_are_checked(faces, monkeypatch):
    one = {"red.png": 1}
    for options, words in (
        ({"size": 28}, r"size=28 must be \(height, width\)"),
        ({"size": (0, 3)}, "size=0 must be a whole number at least 1"),
        ({"size": (2, 2), "channels": 4}, "channels=4 must be 1"),
    ):
        with pytest.raises(SettingError, match=words):
            Population.from_images(faces, one, user="u", **options)
    with pytest.raises(PopulationError, match="no column 'nowhere'"):
        Population.from_images(faces, pa.table({"u": [1], "file": ["red.png"]}), user="u", size=(2, 2), path="nowhere")
    with pytest.raises(PopulationError, match="is no folder"):
        Population.from_images(faces / "red.png", one, user="u", size=(2, 2))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PopulationError, match=r"Pillow, which is not installed: pip install 'clipline\[images\]'"):
        Population.from_images(faces, one, user="u", size=(2, 2))


@pytest.mark.parametrize("changed", [("L", (9, 2)), ("RGBA", (3, 2)), ("P", (500, 1)), ("1", (1, 1)), ("I;16", (4, 4))])
def test_a_picture_of_another_kind_or_size_moves_nobody_else(faces, changed):
    table = pa.table({"who": ["b", "a", "b", "c"], "file": ["red.png", "in/grey.jpg", "steps.png", "other.png"]})

    def by_user():
        people = Population.from_images(faces, table, user="who", size=(2, 3))
        x, ends = people.fields["x"], people.offsets
        return {who: x[ends[i] : ends[i + 1]].tobytes() for i, who in enumerate(people.user_ids)}

    Image.new("RGB", (5, 5), RED).save(faces / "other.png")
    before = by_user()
    Image.new(*changed).save(faces / "other.png")
    after = by_user()
    assert after.pop("c") != before.pop("c")
    assert after == before

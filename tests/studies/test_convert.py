"""The converters of substitute data, on tiny files in the layouts that their folders' READMEs describe."""

import io
import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from samples import ROOT

from clipline import Population
from clipline.errors import PopulationError
from clipline.tasks import task_named

SCRIPTS = ROOT / "studies" / "data"
SHARED = Path(os.environ.get("CLIPLINE_SHARED") or ROOT.parent / "shared" / "data")


@pytest.fixture
def scripts(monkeypatch):
    """The scripts as modules, forgotten afterwards."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import convert
    import convert_images
    import convert_texts

    yield convert, convert_images, convert_texts
    for name in ("convert", "convert_images", "convert_texts"):
        del sys.modules[name]


@pytest.fixture
def converted(scripts, tmp_path):
    """Convert what lies in `tmp_path / "in"`; gives both populations and the manifest of the first."""

    def run(name):
        made = scripts[0].convert(name, tmp_path / "in", tmp_path / "out")
        for manifest in made.values():
            assert manifest.origin == "substitute"
            assert manifest.source.startswith(f"{name}: ")
        return *(Population.open(tmp_path / "out" / split) for split in ("train", "test")), made["train"]

    (tmp_path / "in").mkdir()
    return run


def loads(task, folder):
    """The task takes the store."""
    settings = task_named(task).settings.overridden({"data": str(folder), "cohort_size": 2}, "the test")
    return task_named(task).load(settings)


def sheet(label, tiles):
    """Tiles of one colour each: red says the class, green the place. 25 in a row."""
    colours = np.array([[40 * label + 20, 4 * tile, 128] for tile in range(tiles)], np.uint8)
    grid = np.repeat(np.repeat(colours.reshape(-1, 25, 3), 32, axis=0), 32, axis=1)
    out = io.BytesIO()
    Image.fromarray(grid).save(out, "JPEG", quality=95, subsampling=0)
    return out.getvalue()


def test_cifar100_every_image_goes_to_one_user_with_its_class(converted, scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts[1], "TRAIN_USERS", 5)
    monkeypatch.setattr(scripts[1], "TEST_USERS", 2)
    names = ["apple", "bear", "cloud", "dog"]
    for file, labels, tiles in (("train_a", [0, 1], 50), ("train_b", [2, 3], 50), ("test", range(4), 25)):
        with zipfile.ZipFile(tmp_path / "in" / f"cifar100_{file}.zip", "w") as archive:
            for label in labels:
                archive.writestr(f"{names[label]}.jpg", sheet(label, tiles))
    (tmp_path / "in" / "labels.json").write_text(json.dumps({"fine": names, "fine_to_coarse": [0, 1, 0, 1]}))
    train, test, _ = converted("cifar100")
    assert np.diff(train.offsets).tolist() == [40] * 5
    assert np.diff(test.offsets).tolist() == [50] * 2
    middle = train.fields["pixels"][:, 16, 16].astype(int)
    assert (np.abs(middle[:, 0] - (40 * train.fields["labels"].astype(int) + 20)) <= 3).all()
    assert (np.abs(train.fields["pixels"].astype(int) - middle[:, None, None]) <= 3).all()  # a tile, not its neighbour
    seen = {(int(label), round(green / 4)) for label, green in zip(train.fields["labels"], middle[:, 1], strict=True)}
    assert len(seen) >= 0.9 * 200  # JPEG shifts some greens by one place
    assert np.bincount(train.fields["labels"]).tolist() == [50] * 4
    loads("cifar100", tmp_path / "out")


def test_emnist62_every_image_once_with_white_paper(converted, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.concatenate([np.arange(62), rng.integers(0, 10, 938)]).astype(np.uint8)
    images = np.zeros((1000, 28, 28), np.uint8)
    images[:, 0, 0], images[:, 0, 1], images[:, 0, 2] = labels, np.arange(1000) // 256, np.arange(1000) % 256
    both = {"train_x": images, "train_y": labels, "test_x": images[:300], "test_y": labels[:300]}
    np.savez(tmp_path / "in" / "emnist62_byclass.npz", **both)
    train, test, _ = converted("emnist62")
    assert (len(train), len(test)) == (5, 2)  # about 200 images each, and no fewer than two users
    ink = 255 - train.fields["pixels"].astype(int)
    assert ink[:, 1:].max() == 0  # ink was high in the file, and paper 0
    assert np.array_equal(ink[:, 0, 0], train.fields["labels"])
    assert sorted(ink[:, 0, 1] * 256 + ink[:, 0, 2]) == list(range(1000))
    assert np.unique(np.diff(train.offsets)).size > 1
    loads("emnist_cr", tmp_path / "out")


def test_dirichlet_owners_are_uneven_by_class_and_even_in_the_mean(scripts):
    labels = np.repeat(np.arange(20), 1000)
    owners = scripts[1].dirichlet_owners(labels, 10, np.random.default_rng(0))
    table = np.zeros((20, 10), int)
    np.add.at(table, (labels, owners), 1)
    assert (table.sum(axis=1) == 1000).all()
    # A share of Dirichlet(1, ..., 1) over 10 has mean 0.1 and standard deviation sqrt(0.09 / 11) = 0.0905; of 200 such
    # shares the sample deviation lies outside 0.07 to 0.115 less than once in a thousand seeds.
    assert 70 < table.std() < 115


def test_digits_by_writer(converted, tmp_path):
    train = {"train_x": np.full((4, 28, 28), 255, np.uint8), "train_y": np.array([7, 1, 2, 3], np.uint8)}
    test = {"test_x": np.zeros((3, 28, 28), np.uint8), "test_y": np.array([4, 5, 6], np.uint8)}
    writers = {"train_writer": np.array([9, 9, 2100, 2100], np.int16), "test_writer": np.array([5, 6, 6], np.int16)}
    np.savez(tmp_path / "in" / "mnist_by_writer.npz", **train, **test, **writers)
    train, test, manifest = converted("digits")
    assert train.user_ids.tolist() == [9, 2100]
    assert train.of(0)["labels"].tolist() == [7, 1]
    assert (train.fields["pixels"].max(), test.fields["pixels"].min()) == (0, 255)
    assert test.user_ids.tolist() == [5, 6]
    assert not manifest.shared_users
    loads("emnist_ae", tmp_path / "out")


def packed(path, lines):
    path.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))


def test_shakespeare_by_role(converted, tmp_path):
    roles = [
        {"client": "PLAY_B", "play": "PLAY", "character": "B", "train": ["Ho!", "x" * 80], "test": ["No."]},
        {"client": "PLAY_A", "play": "PLAY", "character": "A", "train": ["Ay"], "test": ["Yes", "or"]},
    ]
    packed(tmp_path / "in" / "shakespeare.jsonl.xz", map(json.dumps, roles))
    train, test, manifest = converted("shakespeare")
    assert train.user_ids.tolist() == test.user_ids.tolist() == ["PLAY_A", "PLAY_B"]
    assert np.diff(train.offsets).tolist() == [1, 3]  # a row, and two for the long speech
    assert train.of(0)["tokens"][0, [0, 3]].tolist() == [88, 89]
    assert np.diff(test.offsets).tolist() == [2, 1]
    assert manifest.shared_users
    loads("shakespeare", tmp_path / "out")


def test_blogs_number_words_by_how_many_authors_use_them(converted, tmp_path):
    packed(tmp_path / "in" / "blogs_train.txt.xz", ["me me me me", "cat", "", "the cat", "", "the dog", "cat"])
    packed(tmp_path / "in" / "blogs_heldout.txt.xz", ["the bird", "", "me", ""])
    train, test, manifest = converted("blogs")
    assert (len(train), len(test), train.examples) == (3, 2, 5)
    # cat: three authors; the: two; me and dog: one each, me is met first although nobody else says it four times
    assert train.of(1)["tokens"][0, :4].tolist() == [10002, 2, 1, 10003]
    assert train.of(0)["tokens"][0, :5].tolist() == [10002, 3, 3, 3, 3]
    assert test.of(0)["tokens"][0, :4].tolist() == [10002, 2, 10001, 10003]
    assert (manifest.tasks, manifest.shared_users) == (["so_nwp"], False)
    loads("so_nwp", tmp_path / "out")


def test_articles_of_each_user(converted, tmp_path):
    np.savez(
        tmp_path / "in" / "citeulike_t.npz",
        bow_indptr=[0, 2, 4, 5], bow_indices=[7, 3, 3, 9, 5], bow_counts=[1, 3, 2, 2, 4], vocabulary="ignored",
        tag_indptr=[0, 3, 4, 4], tag_indices=[499, 0, 500, 1999],
        user_indptr=[0, 2, 4, 5], user_items=[0, 1, 1, 2, 2], item_is_test=[0, 0, 1],
    )  # fmt: skip
    train, test, manifest = converted("articles")
    # Article 2 is for the test; user 2 has nothing else and stays a user. Word 3 is in most users' articles.
    assert np.diff(train.offsets).tolist() == [2, 1, 0]
    assert (test.user_ids.tolist(), np.diff(test.offsets).tolist()) == ([1, 2], [1, 1])
    first, second = train.of(0)["words"], train.of(0)["weights"]
    assert first[0, 0] == 0  # word 3, twice as frequent in article 0 as its other word
    np.testing.assert_allclose(second[0, :3], [3 / 4, 1 / 4, 0])
    np.testing.assert_allclose(second[1, :3], [2 / 4, 2 / 4, 0])
    assert (first[1, 0], first[0, 1] == first[1, 1]) == (0, False)
    assert train.of(0)["tags"].tolist() == [[499, 0], [-1, -1]]  # 500 and 1999 are not among the commonest 500
    assert test.of(0)["weights"].sum() == 0  # its only word is in no training article, and is unknown
    assert manifest.shared_users
    loads("so_lr", tmp_path / "out")


def test_stack_exchange_sentence_by_sentence(converted, tmp_path):
    posts = [
        {"site": "ai", "user": 1, "tags": ["nets", "b"], "title": "What's a net?", "text": "It's a Net. See <u>!\nOk"},
        *({"site": "beer", "user": n, "tags": ["nets"], "title": "net", "text": "net"} for n in range(1, 28)),
        {"site": "wine", "user": 5, "tags": ["oak"], "title": "-", "text": ""},
    ]  # fmt: skip
    packed(tmp_path / "in" / "posts.jsonl.xz", map(json.dumps, posts))
    train, test, manifest = converted("stackexchange")
    # By the alphabet: ai/1, beer/1, beer/10 to beer/17 (the tenth), ..., beer/26 (the twentieth), ..., wine/5
    assert test.user_ids.tolist() == ["beer/17", "beer/26"]
    assert (len(train), train.examples) == (27, 3 + 25)  # wine/5 said nothing and is a user
    mine = train.of(0)
    assert (mine["tokens"][:, 1:] != 0).sum(axis=1).tolist() == [5, 4, 2]  # it's a net . END; see <u> ! END; ok END
    assert mine["tokens"][0, 3] == 1  # net is the commonest word
    assert mine["tags"][:, :3].tolist() == [[0, 1, -1]] * 3
    np.testing.assert_allclose(mine["weights"][2].sum(), 1)  # ok what's a net ?
    assert manifest.tasks == ["so_nwp", "so_lr"]
    loads("so_lr", tmp_path / "out")
    assert list(loads("so_nwp", tmp_path / "out").population.fields) == ["tokens"]


def test_a_missing_file_and_a_folder_in_use_are_refused_and_nothing_is_made(scripts, tmp_path):
    with pytest.raises(PopulationError, match=r"blogs_train\.txt\.xz' is missing: give the folder with blogs_train"):
        scripts[0].convert("blogs", tmp_path, tmp_path / "out")
    (tmp_path / "blogs_train.txt.xz").write_bytes(lzma.compress(b"a\n"))
    (tmp_path / "blogs_heldout.txt.xz").write_bytes(lzma.compress(b"a\n"))
    with pytest.raises(PopulationError, match="is in use"):
        scripts[0].convert("blogs", tmp_path, tmp_path)
    (tmp_path / "blogs_heldout.txt.xz").write_bytes(lzma.compress(b"\n"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PopulationError, match="holds no example"):
        scripts[0].convert("blogs", tmp_path, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_script_runs_from_the_root(tmp_path):
    packed(tmp_path / "blogs_train.txt.xz", ["a b", "", "b"])
    packed(tmp_path / "blogs_heldout.txt.xz", ["a"])
    command = [sys.executable, SCRIPTS / "convert.py", "blogs", "--from", tmp_path, "--to", tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "train: 2 users, 2 examples" in run.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.startswith("convert: ")
    assert "is in use" in again.stderr


# Users and examples of both splits, as the READMEs of the folders state them.
STATED = {
    "cifar100": ("cifar100", 500, 50_000, 100, 10_000),
    "emnist62": ("emnist", None, 100_000, None, 16_323),
    "digits": ("emnist", 539, 60_000, 297, 10_000),
    "shakespeare": ("shakespeare", 1086, None, 1086, None),
    "articles": ("stackoverflow_lr", 7947, None, None, None),
}


@pytest.mark.parametrize("name", STATED)
def test_the_real_folder(scripts, tmp_path, name):
    folder, *stated = STATED[name]
    if not (SHARED / folder).is_dir():
        pytest.skip(f"no folder {folder} with real data: name the folder above it in CLIPLINE_SHARED")
    made = scripts[0].convert(name, SHARED / folder, tmp_path / "out")
    train, test = made["train"], made["test"]
    for value, expected in zip((train.users, train.examples, test.users, test.examples), stated, strict=True):
        assert expected in (None, value)
    if name == "articles":
        assert train.examples + test.examples == 134_860

import lzma
import re

import numpy as np
import pytest
from tff_layouts import example, write_hdf5, write_original, write_sqlite

from clipline.data.manifest import verify_store
from clipline.data.population import Population
from clipline.errors import CliplineError, PopulationError
from clipline_paper.data import prepare_tff
from clipline_paper.data.catalogue import CATALOGUE

RNG = np.random.default_rng(1)
INK = RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8)
PHOTOS = RNG.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
LABELS = [61, 0, 5]
WRITERS = ["f1", "f0", "f1"]


def prepare_task(name, source, target, **options):
    data = next(data for data in CATALOGUE.values() if name in (data.name, *data.tasks))
    return prepare_tff.prepare(data, source, target, task=name, **options)


def prepare(name, source, target, split="train", **options):
    return prepare_task(name, source, target, split=split, **options)["."]


def test_emnist_from_sqlite_and_hdf5_give_the_same_bytes_with_white_paper(tmp_path):
    pixels = INK.astype(np.float32) / 255
    rows = [
        ("all_train", writer, example(label=[label], pixels=image.ravel().tolist()))
        for writer, label, image in zip(WRITERS, LABELS, pixels, strict=True)
    ]
    digits = [("digits_only_train", "f9", example(label=[1], pixels=[1.0] * 784))]
    plain = write_sqlite(tmp_path / "emnist_all.sqlite", rows + digits)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "emnist_all.sqlite.lzma").write_bytes(lzma.compress(plain.read_bytes()))
    who = np.array(WRITERS)
    clients = {w: {"pixels": pixels[who == w], "label": np.array(LABELS, np.int32)[who == w]} for w in ("f0", "f1")}
    tree = write_hdf5(tmp_path / "fed_emnist_train.h5", clients)
    before = sorted(tmp_path.rglob("*"))
    for number, source in enumerate((plain, tmp_path / "packed", tree)):
        store = tmp_path / "stores" / str(number)
        manifest = prepare("emnist_cr" if number else "emnist", source, store)
        assert manifest.source.startswith("emnist train from ")
        population = Population.open(store)
        assert population.user_ids.tolist() == ["f0", "f1"]
        assert population.fields["pixels"].dtype == population.fields["labels"].dtype == np.uint8
        assert np.array_equal(population.of(1)["pixels"], INK[[0, 2]])  # 1.0, the paper, is 255
        assert population.of(1)["labels"].tolist() == [61, 5]
        verify_store(store)
    made = {path for path in tmp_path.rglob("*") if "stores" not in path.parts}
    assert made == set(before)


def test_users_without_rows_are_users_of_the_prepared_population(tmp_path):
    empty = {"image": np.zeros((0, 32, 32, 3), np.uint8), "label": np.zeros(0, int)}
    tree = write_hdf5(tmp_path / "fed_cifar100_train.h5", {"b": {"image": PHOTOS, "label": LABELS}, "a": empty})
    manifest = prepare("cifar100", tree, tmp_path / "store")
    assert (manifest.users, manifest.examples) == (2, 3)
    population = Population.open(tmp_path / "store")
    assert [(str(user), population.size(i)) for i, user in enumerate(population.user_ids)] == [("a", 0), ("b", 3)]


def test_both_splits_or_nothing(tmp_path):
    """The second split fails, and of the first nothing stays."""
    write_original(tmp_path / "files", "cifar100", "hdf5")
    broken = tmp_path / "files" / "fed_cifar100_test.h5"
    broken.write_bytes(broken.read_bytes()[:1000])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PopulationError, match="cannot be read as TFF's HDF5"):
        prepare_task("cifar100", tmp_path / "files", tmp_path / "store")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_manifest_says_whether_train_and_test_share_users(tmp_path):
    """As the sources say: EMNIST and Shakespeare by example, Stack Overflow by date, CIFAR-100 by user."""
    shared = {name: data.shared_users for name, data in CATALOGUE.items()}
    assert shared == {"emnist": True, "cifar100": False, "shakespeare": True, "stackoverflow": True}
    for name in ("emnist", "cifar100"):
        files = write_original(tmp_path / name, name, "hdf5")
        manifests = prepare_task(name, files, tmp_path / "stores" / name)
        assert list(manifests) == ["train", "test"]
        assert {manifest.shared_users for manifest in manifests.values()} == {shared[name]}
        assert {manifest.origin for manifest in manifests.values()} == {"original"}
    assert manifests["test"].source == "cifar100 test from fed_cifar100_test.h5"


@pytest.mark.parametrize(
    ("name", "file", "options", "words"),
    [
        ("emnist", "a.csv", {}, "is no file of emnist"),
        ("emnist", "fed_emnist_train.h5", {"split": "test"}, "holds the split 'train', not 'test'"),
        ("emnist", "fed_emnist_train.h5", {}, "values from 2.0 to 2.0 but must lie from 0 to 1"),
        ("cifar100", "fed_cifar100_train.h5", {}, "field 'label' has values from 1 to 100 but must lie from 0 to 99"),
        ("emnist", ".", {"split": "test"}, "holds none of emnist_all.sqlite, emnist_all.sqlite.lzma, fed_emnist_test"),
        ("emnist", "missing.sqlite", {}, "does not exist"),
    ],
)
def test_what_cannot_be_prepared_is_said_and_leaves_nothing(tmp_path, name, file, options, words):
    (tmp_path / "a.csv").write_text("user,x\n1,2\n")
    write_hdf5(tmp_path / "fed_emnist_train.h5", {"f": {"pixels": np.full((1, 28, 28), 2.0), "label": np.array([1])}})
    write_hdf5(tmp_path / "fed_cifar100_train.h5", {"f": {"image": PHOTOS, "label": np.array([1, 2, 100])}})
    write_hdf5(tmp_path / "small.h5", {"f": {"image": PHOTOS[:, :8], "label": np.array([1, 2, 3])}})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CliplineError, match=re.escape(words)):
        prepare(name, tmp_path / file, tmp_path / "new" / "store", **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_catalogue_agrees_with_the_paper():
    """Users of Table 1; examples of the TFF documentation."""
    users = {name: data.splits["train"].users for name, data in CATALOGUE.items()}
    assert users == {"emnist": 3400, "cifar100": 500, "shakespeare": 715, "stackoverflow": 342_477}
    assert CATALOGUE["cifar100"].splits["train"].examples == 500 * 100
    for data in CATALOGUE.values():
        assert data.downloads[0].url.endswith(".sqlite.lzma")
        assert all(download.sha256 is None or len(download.sha256) == 64 for download in data.downloads)


def test_one_packed_file_with_both_splits_is_decompressed_once(tmp_path, monkeypatch):
    plain = write_original(tmp_path / "files", "cifar100", "sqlite") / "cifar100.sqlite"
    packed, opened, open_packed = tmp_path / "cifar100.sqlite.lzma", [], lzma.open
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    monkeypatch.setattr(lzma, "open", lambda raw: opened.append(raw.name) or open_packed(raw))
    assert list(prepare_task("cifar100", packed, tmp_path / "both")) == ["train", "test"]
    assert opened == [str(packed)]

"""From TFF's original files to a training run, and what stands in the way of it."""

import json
import shutil
import tomllib

import numpy as np
import pytest
from safetensors import safe_open
from tff_layouts import TINY, write_original

from clipline.data.manifest import read_manifest
from clipline.data.population import Population
from clipline_paper.preprocessing import CHARACTERS

# Stores of a few users, for which a hundred and more are declared.
pytestmark = pytest.mark.filterwarnings("ignore::clipline.federated.sampling.DeclaredUsersWarning")

DATA_SET = {
    "cifar100": "cifar100", "emnist_cr": "emnist", "emnist_ae": "emnist", "shakespeare": "shakespeare",
    "so_nwp": "stackoverflow", "so_lr": "stackoverflow",
}  # fmt: skip
FLAGS = ["--cohort-size", 2, "--rounds", 2, "--noise-multiplier", 0, "--sampling", "fixed", "--out", "run", "--json"]


@pytest.fixture
def prepared(clipline, tmp_path):
    """Prepare a tiny data set; gives the folder."""

    def prepare(name, kind="sqlite", to="store"):
        files = write_original(tmp_path / "files", DATA_SET.get(name, name), kind)
        clipline.ok("data", "prepare", name, "--from", files, "--to", to)
        return tmp_path / to

    return prepare


@pytest.mark.usefixtures("narrow_resnet")
@pytest.mark.parametrize(
    ("task", "kind"), [(task, ("sqlite", "hdf5")[place % 2]) for place, task in enumerate(DATA_SET)]
)
def test_every_task_trains_on_its_original_files(clipline, prepared, tmp_path, task, kind):
    folder = prepared(task, kind)
    out, err = clipline.ok("train", task, "--data", "store", *FLAGS)
    users = {client for client, _ in TINY[DATA_SET[task]]["train"]}
    answer = json.loads(out)
    assert (answer["task"], answer["data"], answer["users"]) == (task, "original", len(users))
    assert answer["data_source"] == read_manifest(folder / "train").source
    assert np.isfinite(answer["metric"])
    assert f"preparing {task} on original data of {len(users)} users" in err
    with safe_open(tmp_path / "run" / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["data"] == "original"
    settings = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())
    assert settings["data"] == "store"
    assert not {"population_size", "test_users"} & settings.keys()  # the store says how many there are


@pytest.mark.parametrize("kind", ["sqlite", "hdf5"])
def test_shakespeares_snippets_become_rows_of_81_by_role(prepared, kind):
    folder = prepared("shakespeare", kind)
    train = Population.open(folder / "train")
    assert train.user_ids.tolist() == ["HAMLET", "YORICK"]
    rows = train.of(0)["tokens"]
    number = {character: place + 1 for place, character in enumerate(CHARACTERS)}
    to_be = [88, *(number[character] for character in "To be"), 89]
    assert rows.shape == (3, 81)  # one row, and two for beginning, 100 characters and end
    assert rows[0].tolist() == to_be + [0] * 74
    assert rows[1].tolist() == [88] + [number["x"]] * 80
    assert rows[2].tolist() == [number["x"]] * 20 + [89] + [0] * 60
    assert train.of(1)["tokens"].tolist() == [[88, 87, 89] + [0] * 78]
    assert Population.open(folder / "test").of(1)["tokens"][0, :3].tolist() == [88, number["."], 89]


@pytest.mark.parametrize("kind", ["sqlite", "hdf5"])
def test_stack_overflow_by_its_own_lists_of_words_and_tags(prepared, kind):
    folder = prepared("stackoverflow", kind)  # both tasks in one store
    train = Population.open(folder / "train")
    assert train.user_ids.tolist() == ["10", "9"]
    nine = train.of(1)
    assert nine["tokens"][0].tolist() == [10002, 1, 2, 3, 10003] + [0] * 16  # how to sort
    assert nine["tokens"][1].tolist() == [10002, 10001, 10003] + [0] * 18  # oh
    assert nine["words"][0, :5].tolist() == [0, 1, 2, 4, 10_000]  # how to sort sort list
    np.testing.assert_allclose(nine["weights"][0, :5], [0.2, 0.2, 0.4, 0.2, 0])
    assert nine["tags"].tolist() == [[0, -1, -1, -1, -1], [-1] * 5]
    assert train.of(0)["tags"].tolist() == [[1, 0, -1, -1, -1]]
    assert read_manifest(folder / "train").tasks == ["so_nwp", "so_lr"]
    for task, fields in (("so_nwp", ["tokens"]), ("so_lr", ["words", "weights", "tags"])):
        one = read_manifest(prepared(task, kind, to=task) / "train")
        assert (one.tasks, one.fields) == ([task], fields)
        for field in fields:
            assert np.array_equal(Population.open(folder.parent / task / "train").fields[field], train.fields[field])


def test_data_at_the_default_place_are_found_by_task_then_by_data_set(clipline, prepared, tmp_path, monkeypatch):
    prepared("emnist", to="clipline-data/emnist")
    out, _ = clipline.ok("tasks", "--json")
    listed = {task["name"]: task for task in json.loads(out)}
    assert {name for name, task in listed.items() if task["data"] == "present"} == {"emnist_cr", "emnist_ae"}
    assert (listed["emnist_ae"]["folder"], listed["emnist_ae"]["origin"]) == ("clipline-data/emnist", "original")
    assert (listed["emnist_ae"]["store_users"], listed["shakespeare"]["data"]) == (3, "stand-in")
    out, _ = clipline.ok("train", "emnist_ae", *FLAGS)
    assert (json.loads(out)["data"], json.loads(out)["users"]) == ("original", 3)
    _, out, _ = clipline("tasks")
    assert "present, 3 users, original, clipline-data/emnist" in out
    shutil.move(tmp_path / "clipline-data", tmp_path / "elsewhere")
    assert json.loads(clipline("tasks", "--json")[1])[2]["data"] == "stand-in"
    monkeypatch.setenv("CLIPLINE_DATA", str(tmp_path / "elsewhere"))
    assert json.loads(clipline("tasks", "--json")[1])[2]["data"] == "present"
    prepared("emnist", to="elsewhere/emnist_cr")
    names = [task["folder"] for task in json.loads(clipline("tasks", "--json")[1])[2:4]]
    assert names == [str(tmp_path / "elsewhere" / "emnist"), str(tmp_path / "elsewhere" / "emnist_cr")]
    monkeypatch.setenv("CLIPLINE_DATA", str(tmp_path / "nowhere"))
    assert json.loads(clipline("tasks", "--json")[1])[2]["data"] == "missing"
    err = clipline.refused("train", "emnist_ae", *FLAGS[:-3], "--out", "second")
    assert "CLIPLINE_DATA=" in err
    assert "is no folder: make it, or unset CLIPLINE_DATA" in err


def test_users_of_a_store_are_public_unless_another_number_is_declared(clipline, prepared, tmp_path):
    prepared("shakespeare", to="plays")  # 2 users
    flags = ["train", "shakespeare", "--data", "plays", "--rounds", 2, "--noise-multiplier", 0.1, "--json"]
    flags += ["--seed", 2**61]  # to be made again
    out, err = clipline.ok(*flags, "--cohort-size", 2, "--out", "counted")
    counted = json.loads(out)
    assert (counted["relation"], counted["users"], counted["population_size"]) == ("zero-out", 2, None)
    assert "zero-out one user (the number of users is public)" in counted["guarantee"]
    assert "training 2 rounds on 2 users" in err
    assert "# users = 2" in (tmp_path / "counted" / "settings.toml").read_text()
    out, err = clipline.ok(*flags, "--cohort-size", 4, "--population-size", 10, "--out", "declared")
    declared = json.loads(out)
    assert (declared["relation"], declared["users"], declared["population_size"]) == ("add-or-remove", None, 10)
    assert "training 2 rounds on" not in err  # how many there are is private
    assert declared["delta"] == pytest.approx(10**-1.1)
    stored = (tmp_path / "declared" / "settings.toml").read_text()
    assert tomllib.loads(stored)["population_size"] == 10
    assert not any(line.removeprefix("# ").startswith("users") for line in stored.splitlines())
    assert "population_size" not in tomllib.loads((tmp_path / "counted" / "settings.toml").read_text())
    out, _ = clipline.ok("train", "--config", "declared/settings.toml", "--out", "again", "--json")
    again = json.loads(out)
    same = {"run_dir": "", "report": ""}  # but for where they are
    assert {**again, **same} == {**declared, **same}


@pytest.mark.usefixtures("narrow_resnet")
def test_whom_the_metrics_look_at_is_said(clipline, prepared):
    """EMNIST and Shakespeare split each user's examples; CIFAR-100 deals its test images to others."""
    prepared("shakespeare", to="plays")
    _, out, _ = clipline("train", "shakespeare", "--data", "plays", *FLAGS[:-1])
    first, *rest = out.splitlines()
    assert "on other examples of the training users, which the guarantee does not cover (validation)" in first
    assert "data       original, shakespeare train from shakespeare.sqlite" in rest
    prepared("cifar100", to="photos")
    _, out, _ = clipline("train", "cifar100", "--data", "photos", *FLAGS[:-3], "--out", "second", "--json")
    assert json.loads(out)["measured_on"] == "users outside the training population"


def lose(name):
    return lambda folder: (folder / name).unlink()


def flip(name):
    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return damage


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-10])


def rewrite(**entries):
    def damage(folder):
        path = folder / "train" / "population.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return damage


@pytest.mark.parametrize(
    ("damage", "arguments", "words"),
    [
        (lambda folder: shutil.rmtree(folder), [], "--data 'store' must be a folder with the stores train and test"),
        (lambda folder: shutil.rmtree(folder / "test"), [], "must be complete, and it holds no test/population.json"),
        (lose("train/field.tokens.npy"), [], "must be complete, and train/field.tokens.npy is missing"),
        (flip("train/field.tokens.npy"), [], "train/field.tokens.npy' has checksum"),
        (cut("test/field.tokens.npy"), [], "was altered or damaged, prepare the data again"),
        (rewrite(tasks=["so_nwp"]), [], "must be prepared for shakespeare, and it is for so_nwp"),
        (rewrite(users=1), ["--cohort-size", 1], "has 2 users and 4 examples but its manifest says 1 and 4"),
        (lambda folder: None, ["--cohort-size", 3], "--cohort-size 3 must be at most the population, 2 users"),
        (lambda folder: None, ["--data", "store/train"], "the folder of both train and test, and it is one of the two"),
        (lambda folder: None, ["--data", ""], "--data '' must be the path of a folder or a file, or stand-in"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_work_begins(
    clipline, prepared, tmp_path, damage, arguments, words
):
    damage(prepared("shakespeare"))
    err = clipline.refused("train", "shakespeare", "--data", "store", *FLAGS, *arguments)
    assert words in err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_an_unusable_store_at_the_default_place_is_missing_and_refused(clipline, prepared):
    shutil.rmtree(prepared("shakespeare", to="clipline-data/shakespeare") / "test")
    (listed,) = [task for task in json.loads(clipline("tasks", "--json")[1]) if task["name"] == "shakespeare"]
    assert (listed["data"], listed["store_users"]) == ("missing", None)
    assert "holds no test/population.json" in listed["problem"]
    assert "missing: data='clipline-data/shakespeare' must be complete" in clipline("tasks")[1]
    assert "shakespeare: missing: data='clipline-data/shakespeare' must be complete" in clipline("data", "list")[1]
    assert clipline("train", "shakespeare", *FLAGS)[0] == 2

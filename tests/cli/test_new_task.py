"""`clipline new-task` writes a task that runs, and `clipline predict` what the trained model says."""

import csv
import errno
import json
import re
import shlex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import pytest
from samples import ROOT

import clipline as cl
from clipline.tasks.task_file import own_task
from clipline.training.run_files import read_facts

SECRETS = ("zanzibar", "987654", "1999")
ROWS = [
    {"customer": f"c{user}", "when": f"1999-03-0{1 + (user + visit) % 9}", "city": "zanzibar",
     "visits": 987654 + visit, "share": visit / 4, "member": user % 2 == 0, "kind": "big" if visit else "small",
     "late": visit % 2}
    for user in range(60) for visit in range(1 + user % 3)
]  # fmt: skip


def commands_in(out):
    first, *lines = out.splitlines()
    assert re.search(r"Read \w+\.py( and write the middle and spread of your numbers there .*)?, then:$", first)
    return [shlex.split(line) for line in lines if line.startswith("  ")]


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


@pytest.fixture
def sales(clipline, tmp_path):
    """The same rows in every kind of file; the CSV has gaps."""
    gaps = [{**row, "visits": "", "when": ""} if number % 10 == 0 else row for number, row in enumerate(ROWS)]
    write_csv(tmp_path / "sales.csv", gaps)
    table = pa.Table.from_pylist(ROWS)
    table = table.set_column(1, "when", pc.cast(table["when"], pa.date32()))
    pa.parquet.write_table(table, tmp_path / "sales.parquet")
    (tmp_path / "sales.jsonl").write_text("".join(json.dumps({**row, "when": 3}) + "\n" for row in ROWS))
    numbers = {name: np.array([row[name] for row in ROWS]) for name in ("customer", "visits", "share", "late", "kind")}
    np.savez(tmp_path / "sales.npz", **numbers)
    return clipline


def test_what_it_prints_runs_as_printed(clipline, tmp_path):
    out, _ = clipline.ok("new-task", "shop")
    assert len((tmp_path / "shop" / "README.md").read_text().splitlines()) == 5
    commands = commands_in(out)
    page = (ROOT / "docs" / "howto" / "own_model.md").read_text()
    assert "\n".join(["clipline new-task shop", *map(shlex.join, commands)]) in page
    assert len(commands) == 2
    for command in commands:
        assert command[0] == "clipline"
        out, _ = clipline.ok(*command[1:])
    last = json.loads((tmp_path / "shop" / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["absolute_error"] < last["baseline_error"] / 2  # 3.1 against 17.4, give or take 0.1
    rows = list(csv.DictReader((tmp_path / "shop" / "rides.csv").read_text().splitlines()))
    said = pyarrow.csv.read_csv(tmp_path / "shop" / "predicted.csv")["prediction"].to_numpy()
    assert len(said) == len(rows)
    errors = np.abs(said - np.array([float(row["minutes"]) for row in rows]))
    assert errors.mean() < last["baseline_error"] / 2  # in the order of the rows, or it would be far more
    assert "(epsilon 4.00" in out
    task = (tmp_path / "shop" / "shop.py").read_text()
    assert all(f"# {word}" in task for word in ("What", "How", "About"))


def test_a_task_for_a_table_runs_as_printed_and_knows_no_value_of_it(sales, tmp_path):
    out, _ = sales.ok("new-task", "mine", "--table", "sales.csv", "--user", "customer", "--label", "share")
    text = (tmp_path / "mine" / "mine.py").read_text() + (tmp_path / "mine" / "README.md").read_text()
    assert not [secret for secret in SECRETS if secret in text]
    assert '"fields": ["when", "visits", "member", "late", "share"]' in text
    assert 'Left out, as they are text: "city", "kind"' in text
    assert "Left out, as they are text: city, kind." in out
    train, predict = commands_in(out)
    sales.ok(*train[1:], "--rounds", 2, "--cohort-size", 20, "--workers", 1)
    out, _ = sales.ok(*predict[1:], "--json")
    assert json.loads(out)["rows"] == len(ROWS)


def test_a_full_disk_is_told_with_what_to_do(sales, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.mkdir", full)
    code, _, err = sales("new-task", "mine")
    assert (code, err) == (
        2, "error: a file cannot be written: No space left on device: make room, or give another path\n"
    )  # fmt: skip


def test_classes_are_written_by_name_beside_the_ids(sales, tmp_path):
    where = ["--table", "sales.csv", "--user", "customer", "--label", "kind", "--classes", "small,big"]
    assert sales("new-task", "mine", *where)[0] == 0
    flags = ["--data", "sales.csv", "--rounds", 1, "--cohort-size", 20, "--workers", 1, "--out", "run"]
    printed, _ = sales.ok("train", "mine/mine.py", *flags)
    assert read_facts(tmp_path / "run")["task"] == "mine"
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    shares = {name: value for name, value in last.items() if name.startswith("share_")}
    assert "\nbeside it  share_small " in printed
    assert list(shares) == ["share_small", "share_big", "share_other"]  # as columns of predictions are called
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["share_other"] == 0
    flags = ["--model", "mine/mine.py", "--data", "sales.csv", "--keep", "customer,visits"]
    for ending in ("csv", "npz", "jsonl"):
        out, _ = sales.ok("predict", "run", *flags, "--out", f"said.{ending}")
        columns = "customer, visits, prediction, probability_small, probability_big, probability_other"
        assert f"{len(ROWS)} predictions ({columns})" in out
    said = pyarrow.csv.read_csv(tmp_path / "said.csv").to_pydict()
    sold = pyarrow.csv.read_csv(tmp_path / "sales.csv").to_pydict()
    assert said["customer"] == sold["customer"]
    chances = np.array([said[f"probability_{name}"] for name in ("small", "big", "other")])
    assert said["prediction"] == [("small", "big", "other")[place] for place in chances.argmax(axis=0)]
    assert np.load(tmp_path / "said.npz")["prediction"].tolist() == said["prediction"]
    out, _ = sales.ok("predict", "run", *flags, "--classes", "a,b,c", "--out", "other.csv")
    assert "probability_a, probability_b, probability_c" in out


@pytest.mark.parametrize(
    ("table", "label", "classes", "outputs", "compared_with"),
    [
        ("sales.parquet", "kind", ["--classes", 'small,"b, c"'], 3, ["share_small", "share_b, c", "share_other"]),
        ("sales.parquet", "late", ["--classes", "7"], 7, [f"share_{code}" for code in range(5)]),
        ("sales.parquet", "member", [], 2, ["share_0", "share_1"]),
        ("sales.jsonl", "late", [], 1, ["baseline_error"]),
        ("sales.npz", "visits", [], 1, ["baseline_error"]),
    ],
)
def test_the_file_fits_the_table_and_the_label(sales, tmp_path, table, label, classes, outputs, compared_with):
    where = ["--table", table, "--user", "customer", "--label", label, *classes]
    sales.ok("new-task", "mine", *where)
    task = own_task("mine/mine.py", {"data": table, "seed": 0})
    loaded = task.load(task.settings)  # which measures a batch, and so runs model, loss and metrics
    model = loaded.make(0)
    assert model[-1].out_features == outputs
    assert loaded.metric_name == ("absolute_error" if outputs == 1 else "accuracy")
    assert list(loaded.evaluate(model)) == [loaded.metric_name, *compared_with, "loss"]


def public_table(path):
    """Forty public rows; `km` has the median 5000 and spreads by 1000 about it, but for one row far out."""
    rng = np.random.default_rng(3)
    rows = [
        {"who": f"p{row}", "km": 5000 + 1000 * side, "grade": 1 + row % 3, "code": [7, 8, 7][row % 3],
         "city": ["oslo", "bern", "oslo", "rome"][row % 4], "note": f"sentence {row}", "day": "2026-01-11"}
        for row, side in enumerate([-1, 0, 1] * 13 + [10**6])
    ]  # fmt: skip
    write_csv(path, [rows[place] for place in rng.permutation(len(rows))])


def secret_table(path):
    """The same columns, and a label that the numbers say: 300 users of ten rows."""
    rng = np.random.default_rng(4)
    rows = []
    for row in range(3000):
        km, city = rng.normal(5000, 1000), ["oslo", "bern", "atlantis"][row % 3]
        grade = 1 + (km > 4700) + (km > 5900)
        rows.append({"who": f"s{row // 10}", "km": "" if row % 20 == 0 else km, "grade": grade, "city": city,
                     "code": 7 + row % 2, "note": "mine", "day": "2031-05-05"})  # fmt: skip
    write_csv(path, rows)


def test_scales_and_categories_come_from_public_rows_and_the_file_unedited_beats_the_majority(clipline, tmp_path):
    secret_table(tmp_path / "secret.csv")
    public_table(tmp_path / "public.csv")
    columns = ["--user", "who", "--label", "grade", "--classes", "1,2,3", "--categories", "code", "--without", "day"]
    out, _ = clipline.ok("new-task", "mine", "--table", "secret.csv", "--public", "public.csv", *columns)
    assert "Left out, as they are text: note." in out
    assert "write the middle" not in out
    text = (tmp_path / "mine" / "mine.py").read_text()
    assert "atlantis" not in text
    assert '"km": (5000.0, 1000.0)' in text
    assert '"fill": {"km": 5000.0}' in text
    assert '"categories": {"city": ["oslo", "bern", "rome"], "code": [7, 8], "grade": [1, 2, 3]}' in text
    assert "day" not in text.partition("COLUMNS")[2].partition("LABEL")[0]
    train, _ = commands_in(out)
    clipline.ok(*train[1:], "--rounds", 20, "--workers", 1, "--epsilon", 20)
    last = json.loads((tmp_path / "mine" / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    shares = [value for name, value in last.items() if name.startswith("share_")]
    assert last["accuracy"] > max(shares) + 0.1


def test_categories_without_public_rows_are_for_the_reader_to_list(sales, tmp_path):
    where = ["--table", "sales.csv", "--user", "customer", "--label", "late", "--categories", "city,kind"]
    out, _ = sales.ok("new-task", "mine", *where)
    assert "Write into mine.py what these may hold, or give --public FILE: city, kind." in out
    assert "is among its 2 categories" in sales.refused("train", "mine/mine.py", "--data", "sales.csv")
    out, _ = sales.ok("new-task", "shakespeare")
    assert "train shakespeare/task.py" in out  # as a file is not called like a task of clipline


def of(table="sales.csv", user="customer", **more):
    return [word for name, value in {"table": table, "user": user, **more}.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (of(user="custmer", label="late"), "has no user column 'custmer': did you mean"),
        (of(), "label is missing: give --label COLUMN"),
        (of(label="kind"), "--classes is missing: the label 'kind' is text: give --classes yes,no"),
        (of(label="when"), "--label 'when' must be a column of numbers"),
        (of(label="share", classes="3"), "is fraction: give their"),
        (of(label="late", categories="share"), "must be text or whole but is fraction"),
        (of(label="late", numbers="city"), "must be fraction or whole or yes-no or time but is text"),
        (of(label="late", without="citi"), "has no without column 'citi': did you mean"),
        (of(label="late", without="late"), "another column than the user's and the label"),
        (of(label="late", public="sales.csv"), "must be another file than the table"),
        (of(label="late", public="header.jsonl"), "has no column 'when'"),
        (of(label="kind", classes="big,big"), "--classes ['big', 'big'] must be a list without repetitions"),
        (of("header.csv", label="late"), "has no column of numbers or times to predict"),
        (["--user", "customer"], "--user 'customer' must be left out without a table"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_sentence(sales, tmp_path, arguments, words):
    (tmp_path / "header.csv").write_text("customer,share,late\n")
    (tmp_path / "header.jsonl").write_text('{"customer": 1, "share": 1}\n')
    code, out, err = sales("new-task", "mine", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "mine").exists()


def test_a_folder_in_use_is_left_alone(clipline, tmp_path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "shop.py").write_text("mine\n")
    assert "must be new or empty, and it is in use" in clipline.refused("new-task", "shop")
    assert [path.name for path in (tmp_path / "shop").iterdir()] == ["shop.py"]


@pytest.mark.filterwarnings("ignore:'plain.py' is not the file")
def test_predictions_are_the_same_in_every_kind_of_file(sales, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        'SETTINGS = {"rounds": 1, "cohort_size": 9, "client_lr": 0.1, "epsilon": 9.0, "user_column": "customer"}\n'
        'COLUMNS = {"fields": ["share", "late", "kind"], "categories": {"kind": ["small", "big"]}}\n'
        "def model():\n    return nn.Linear(1, 2)\n"
        'def loss(model, batch):\n    return model(batch["share"].unsqueeze(1))[:, 0] - batch["late"]\n'
        'def predict(model, batch):\n    both = model(batch["share"].unsqueeze(1))\n'
        '    return {"each": both, "kind": batch["kind"]}\n'
    )
    sales.ok("train", "mine.py", "--data", "sales.parquet", "--workers", 1, "--out", "run")
    for ending in ("csv", "jsonl", "parquet", "npz"):
        out, _ = sales.ok("predict", "run", "--model", "mine.py", "--data", "sales.csv", "--out", f"said.{ending}")
        assert f"said.{ending}: {len(ROWS)} predictions (each_0, each_1, kind)" in out
    expected = np.array([row["kind"] == "big" for row in ROWS])
    assert (pyarrow.csv.read_csv("said.csv")["kind"].to_numpy() == expected).all()
    assert (pa.parquet.read_table("said.parquet")["kind"].to_numpy() == expected).all()
    lines = (tmp_path / "said.jsonl").read_text().splitlines()
    assert ([json.loads(line)["kind"] for line in lines] == expected).all()
    each = cl.load("run", model="mine.py").predict("sales.parquet")["each"]
    with np.load("said.npz") as said:
        np.testing.assert_array_equal(said["each_1"], each[:, 1])
    (tmp_path / "plain.py").write_text("from torch import nn\ndef model():\n    return nn.Linear(1, 2)\n")
    (tmp_path / "header.csv").write_text("share,late,kind\n")
    (tmp_path / "renamed.csv").write_text("Share,late\n0.5,1\n")
    (tmp_path / "late.csv").write_text("late\n1\n")
    (tmp_path / "others.csv").write_text("Kind\nbig\n")
    mine, plain = "run --model mine.py --data", "run --model plain.py --data"
    for arguments, words in (
        ("run --data sales.csv --out said.csv", "--out 'said.csv' is there already"),
        ("run --data sales.csv --out said.txt", "ending of out='.txt' must be one of .csv"),
        ("run --data sales.csv", "the file 'mine.py', and no code is run that you have not"),
        (f"{mine} header.csv", "'header.csv' has no rows"),
        (f"{mine} renamed.csv", "no field 'share' but late: did you mean 'Share'?"),
        (f"{mine} others.csv", "data has Kind and none of the fields trained on"),
        (f"{plain} sales.csv", "or --model FILE.py with such a function"),
        (f"{plain} late.csv", "no 'share', 'kind', which the training"),
    ):
        out = [] if "--out" in arguments else ["--out", "new.csv"]
        assert words in sales.refused("predict", *arguments.split(), *out)
        assert not (tmp_path / "new.csv").exists()

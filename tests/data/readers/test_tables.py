import bz2
import gzip
import io
import json
import lzma
import random
from csv import reader

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from clipline.cli.new_task import column_kinds
from clipline.data.column_options import ColumnOptions
from clipline.data.population import Population
from clipline.data.readers import tables
from clipline.data.readers.tables import read_table, whole_table
from clipline.data.store import write_store
from clipline.errors import PopulationError
from clipline.serve.new_data import arrays_of

USERS = ["ann", "bob", "ann", "zoë", "bob", "ann"]
SCORES = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
PIXELS = [[i, i + 1, i + 2] for i in range(6)]
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": None}


def jsonl():
    rows = zip(USERS, SCORES, PIXELS, strict=True)
    return "".join(json.dumps({"user": u, "score": s, "pixels": p}) + "\n" for u, s, p in rows).encode()


def csv():
    rows = zip(USERS, SCORES, PIXELS, strict=True)
    return ("user,score,first\n" + "".join(f"{u},{s},{p[0]}\n" for u, s, p in rows)).encode()


def packed(data, ending):
    if ending == ".zst":
        return pa.compress(data, codec="zstd", asbytes=True)
    return data if ending == "" else COMPRESS[ending](data)


def prepared(path, tmp_path, **options):
    write_store(tmp_path / "store", read_table(path, "user", **options), source=path.name)
    population = Population.open(tmp_path / "store")
    assert population.user_ids.tolist() == ["ann", "bob", "zoë"]
    assert population.fields["score"].tolist() == [0.5, 2.5, 5.5, 1.5, 4.5, 3.5]
    return population


@pytest.mark.parametrize("ending", ["", *COMPRESS])
@pytest.mark.parametrize(("kind", "content"), [("jsonl", jsonl()), ("csv", csv())])
def test_lines_in_every_compression(tmp_path, kind, content, ending):
    path = tmp_path / f"data.{kind}{ending}"
    path.write_bytes(packed(content, ending))
    population = prepared(path, tmp_path)
    if kind == "csv":
        assert population.of(1)["first"].tolist() == [1, 4]
    else:
        assert population.of(0)["pixels"].tolist() == [[0, 1, 2], [2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(("name", "mark"), [("data.csv", ";"), ("data.tsv", "\t"), ("data.csv.gz", "\t")])
def test_columns_of_csv_may_be_separated_by_semicolons_or_tabs(tmp_path, name, mark):
    path = tmp_path / name
    path.write_bytes(packed(csv().replace(b",", mark.encode()), ".gz" if name.endswith(".gz") else ""))
    assert prepared(path, tmp_path).of(1)["first"].tolist() == [1, 4]
    assert [*column_kinds(path)] == csv().decode().splitlines()[0].split(",")
    assert whole_table(path).num_rows == 6


def test_decimal_commas_are_refused_with_the_column(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("user;km\nann;1,5\nbob;-12,25\n")
    with pytest.raises(PopulationError, match="has numbers with a decimal comma in 'km', which are read as text: wr"):
        list(read_table(path, "user"))
    path.write_text('user,km\n"1,5","1,5"\n')  # an id may be written so
    with pytest.raises(PopulationError, match="in 'km'"):
        list(read_table(path, "user"))
    assert len(list(read_table(path, "user", options=ColumnOptions(categories={"km": ["1,5"]})))) == 1


@pytest.mark.parametrize("kind", [pa.list_(pa.uint8()), pa.list_(pa.uint8(), 3), pa.large_list(pa.uint8())])
def test_parquet_lists_become_a_second_axis_and_keep_their_type(tmp_path, kind):
    columns = {"user": USERS, "score": SCORES, "pixels": pa.array(PIXELS, kind)}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "data.parquet", row_group_size=4)
    population = prepared(tmp_path / "data.parquet", tmp_path)
    assert population.fields["pixels"].dtype == np.uint8
    assert population.of(1)["pixels"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_many_chunks_equal_one_and_progress_ends_at_the_size_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK_BYTES", 64)
    monkeypatch.setattr(tables, "CSV_BYTES", 64)
    for name, data in (("data.jsonl", jsonl() * 20), ("data.csv", csv() + csv().split(b"\n", 1)[1] * 19)):
        (tmp_path / name).write_bytes(data)
        seen = []
        chunks = list(
            read_table(tmp_path / name, "user", progress=lambda done, total, to=seen: to.append((done, total)))
        )
        assert len(chunks) > 5
        assert np.concatenate([ids for ids, _ in chunks]).tolist() == USERS * 20
        assert np.concatenate([fields["score"] for _, fields in chunks]).tolist() == SCORES * 20
        assert seen[-1] == (len(data), len(data))
        assert seen == sorted(seen)


def csv_cell(rng, delimiter):
    """A cell as it is written: plain, quoted or quoted by halves, with separators and line ends where they may be."""
    parts, plain = ["a", "7", "ä", " ", '""', delimiter, "\n", "\r\n", "\r"], ["", "6", "x y", '6" pipe', 'a""b"', " "]
    if rng.random() < 0.5:
        return rng.choice([one for one in plain if not one.startswith('"')])
    return '"' + "".join(rng.choices(parts, k=rng.randrange(4))) + '"' + rng.choice(["", "", "b", 'b"', ' "c" '])


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_has_the_rows_that_the_csv_module_of_python_reads_wherever_blocks_end(tmp_path, monkeypatch, delimiter):
    rng = random.Random(delimiter)
    for number in range(200):
        ends = rng.choice([["\n"], ["\r\n"], ["\r"], ["\n", "\r\n", "\r"]])
        rows = [[f"u{k}", csv_cell(rng, delimiter), csv_cell(rng, delimiter)] for k in range(rng.randrange(1, 9))]
        table = [["user", '"no""te"', "last"], *rows]
        text = "".join(delimiter.join(row) + rng.choice(ends) for row in table)
        text = text if number % 3 else text.rstrip("\r\n")
        head, *expected = reader(io.StringIO(text, newline=""), delimiter=delimiter)
        for block in (50, 51, 53, rng.randrange(50, 99), rng.randrange(50, 99), 1 << 20):
            monkeypatch.setattr(tables, "CSV_BYTES", block)
            stream = io.BytesIO(b"\xef\xbb\xbf" * (number % 5 == 0) + text.encode())
            batches = [batch.to_pydict() for batch in tables._rows(stream, set(head), tmp_path)]
            got = [list(row) for batch in batches for row in zip(*batch.values(), strict=True)]
            assert (list(batches[0]), got) == (head, expected), (text, block)


@pytest.mark.parametrize("rows", [1, 1000, 500_000])
@pytest.mark.parametrize("quoted", ['"b,1', 'b,"1', 'b,"', 'b,"""'])
def test_a_quote_that_is_never_closed_is_refused(tmp_path, rows, quoted):
    """Arrow alone would make one value of the rest of the file."""
    (tmp_path / "data.csv").write_text("user,x\na,1\n" + quoted + "\n" + "c,2\n" * rows)
    with pytest.raises(PopulationError, match=r"cannot be read \(.*(never closed|Expected 2 columns, got 1).*: mend"):
        list(read_table(tmp_path / "data.csv", "user"))


@pytest.mark.parametrize("late", ["null", "7"])
def test_a_key_of_jsonl_that_the_first_block_lacks_is_refused_unless_it_was_not_asked_for(tmp_path, monkeypatch, late):
    monkeypatch.setattr(tables, "CHUNK_BYTES", 64)
    path, line = tmp_path / "t.jsonl", '{"user": "a", "x": 1}\n'
    path.write_text(line * 9 + f'{{"user": "b", "x": 2, "y": {late}}}\n')
    with pytest.raises(PopulationError, match=r"has 'y' in a row after 9, but not .*: give it a value in the first r"):
        list(read_table(path, "user"))
    chunks = list(read_table(path, "user", fields=["x"]))
    assert np.concatenate([fields["x"] for _, fields in chunks]).tolist() == [1] * 9 + [2]
    path.write_text('{"user": "a", "x": 1, "y": 5}\n' + line * 8 + '{"user": "b", "x": 2, "y": 7}\n')
    chunks = list(read_table(path, "user", options=tables.ColumnOptions(missing=0)))
    assert np.concatenate([fields["y"] for _, fields in chunks]).tolist() == [5] + [0] * 8 + [7]


def test_a_bad_row_of_csv_is_counted_from_the_top_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BYTES", 64)
    (tmp_path / "data.csv").write_text("user,x\n" + "1,2\n" * 100 + "1,2,3\n")
    with pytest.raises(PopulationError, match="Row #102: Expected 2 columns, got 3"):
        list(read_table(tmp_path / "data.csv", "user"))
    (tmp_path / "typed.csv").write_text("user,x\n" + "1,2\n" * 100 + "1,half\n")
    with pytest.raises(PopulationError, match=r"has a value in 'x', line 102, of another type than those before: mend"):
        list(read_table(tmp_path / "typed.csv", "user"))


@pytest.mark.parametrize("column", ["user", "x"])
def test_half_a_letter_in_jsonl_is_refused_in_a_sentence(tmp_path, column):
    row = {"user": "a", "x": "b", column: "\ud800"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(PopulationError, match=rf"t.jsonl' has a lone surrogate, .* in the text of '{column}': mend it"):
        list(read_table(tmp_path / "t.jsonl", "user"))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_ids_that_look_like_numbers_or_dates_are_kept_as_they_are_written(tmp_path, ending):
    """No two of them are one user, and predictions bring the same text along."""
    people, path = ["1", "01", "1.0", "1e0", "2026-01-31", "12345678901234567890123", "12345678901234567890124"], []
    path = tmp_path / f"t.{ending}"
    for some in (people, people[4:5], people[5:]):  # Arrow takes a column of dates alone for dates
        quoted = [json.dumps({"user": one, "x": 1.5}) if ending == "jsonl" else f"{one},1.5" for one in some]
        path.write_text("\n".join(quoted if ending == "jsonl" else ["user,x", *quoted]))
        assert Population.from_table(path, user="user").user_ids.tolist() == sorted(some)
        assert arrays_of(path, ["x"], only="", keep=["user"]).kept["user"].tolist() == some


def test_whole_numbers_in_jsonl_that_would_lose_digits_are_no_ids(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"user": 9223372036854775809, "x": 1}\n{"user": 9223372036854775810, "x": 1}\n')
    for read in (
        lambda: Population.from_table(tmp_path / "t.jsonl", user="user"),
        lambda: arrays_of(tmp_path / "t.jsonl", ["x"], only="", keep=["user"]),
    ):
        with pytest.raises(PopulationError, match=r"whole numbers of 2\^63 or more in 'user', .*: write them as text"):
            read()


@pytest.mark.parametrize("values", [[1, 1, "half"], [1, 1, 0.5], [[1], [1], ["half"]]])
def test_a_value_of_another_type_in_jsonl_is_told_by_its_column_and_row(tmp_path, monkeypatch, values):
    monkeypatch.setattr(tables, "CHUNK_BYTES", 30)
    lines = [json.dumps({"user": "a", "x": value}) for value in values]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    with pytest.raises(PopulationError) as error:
        list(read_table(tmp_path / "t.jsonl", "user"))
    assert "a value in 'x', row 3, of another type" in str(error.value)
    assert "half" not in str(error.value)
    assert "0.5" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", jsonl() * 3 + b'{"user": "ann", "sco', "in line 19 "),
        ("a.jsonl", b'{"user": 1, "x": 2}\n{"user": 1}\n', "no value for 'x' in row 2"),
        ("a.jsonl", b'{"user": 1, "x": [2]}\n{"user": 1, "x": [2, 3]}\n', "lists of 1 to 2 entries in 'x': give them"),
        ("a.jsonl", b'{"user": 1, "x": {"y": 1}}\n', "turn it into numbers"),
        ("a.jsonl.gz", gzip.compress(jsonl(), mtime=0)[:-20], "cannot be read"),
        ("a.jsonl.xz", b"not compressed at all", "cannot be read"),
        ("a.csv", b"user,x\n1,2\n1,2,3\n", "Row #3: Expected 2 columns, got 3"),
        ("a.csv", b"user,x\n1,2\n,3\n", "row 2 has an empty user id"),
        ("a.csv", b"user,x\n", "a.csv holds no example"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"usr,x\n1,2\n", "has no user column 'user': did you mean 'usr'?"),
        ("a.parquet", b"PAR1 and then nothing", "cannot be read as Parquet"),
        ("a.npz", b"PK nothing", "cannot be read as NPZ"),
        ("a.txt", b"1 2 3", "of no known kind: give a file that ends in .parquet"),
        ("a.npz.gz", b"1", "compressed twice"),
    ],
)
def test_damaged_tables_say_where_and_leave_nothing(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(PopulationError) as caught:
        write_store(tmp_path / "store", read_table(tmp_path / name, "user"), source=name)
    assert words in str(caught.value)
    assert [left.name for left in tmp_path.iterdir()] == [name]


def test_parquet_that_was_cut_is_refused(tmp_path):
    pyarrow.parquet.write_table(pa.table({"user": range(9999)}), tmp_path / "cut.parquet")
    data = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(PopulationError, match="cannot be read as Parquet"):
        list(read_table(tmp_path / "cut.parquet", "user"))


def test_missing_files_folders_and_fields(tmp_path):
    with pytest.raises(PopulationError, match="does not exist"):
        list(read_table(tmp_path / "no.csv", "user"))
    with pytest.raises(PopulationError, match="is a folder"):
        list(read_table(tmp_path, "user"))
    (tmp_path / "data.csv").write_bytes(csv())
    with pytest.raises(PopulationError, match="has no field 'scores': did you mean 'score'"):
        list(read_table(tmp_path / "data.csv", "user", fields=["scores"]))


def test_single_cells_that_are_no_numbers_are_counted_and_the_first_is_named(tmp_path):
    ages = ["20", "unknown", "21", "", "n. a.", "30", "31"]
    rows = "\n".join(f"{user},{age},1" for user, age in enumerate(ages))
    (tmp_path / "people.csv").write_text(f"user,age,label\n{rows}\n")
    with pytest.raises(PopulationError) as error:
        Population.from_table(tmp_path / "people.csv", user="user")
    assert str(error.value) == (
        "field 'age' is text, as 2 of 7 values are no numbers (the first in row 2): mend the data, or leave such cells "
        "empty and fill them with fill={'age': 0}"
    )
    (tmp_path / "people.csv").write_text(f"user,age,label\n{rows}\n".replace("unknown", "").replace("n. a.", ""))
    people = Population.from_table(tmp_path / "people.csv", user="user", fill={"age": 0})
    assert people.fields["age"].tolist() == [20, 0, 21, 0, 0, 30, 31]


def test_a_cell_of_text_among_numbers_is_refused_though_there_is_a_function_for_texts(tmp_path):
    """One user's typing error must not send the numbers of all others through the function."""
    (tmp_path / "t.csv").write_text("user,km,note\na,1.5,first\nb,abc,2\nc,3,third\n")
    with pytest.raises(PopulationError, match=r"field 'km' is text, as 1 of 3 values is no number \(row 2\): mend the"):
        list(read_table(tmp_path / "t.csv", "user", text=lambda texts: np.array([len(text) for text in texts])))
    ((_, fields),) = read_table(
        tmp_path / "t.csv", "user", fields=["note"], text=lambda texts: np.array([len(t) for t in texts])
    )
    assert fields["note"].tolist() == [5, 1, 5]

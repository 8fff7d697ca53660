"""Stores of lists: two files a field, opened as maps, and the same data as padded stores, which open as before."""

import itertools
import json
import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from clipline import Population
from clipline.data import fingerprint as fingerprint_module
from clipline.data import population as population_module
from clipline.data.column_options import ColumnOptions
from clipline.data.fields import packed
from clipline.data.packed_field import PackedField, is_mapped
from clipline.data.population import scaled_population
from clipline.data.store import write_store
from clipline.errors import PopulationError

WIDTH = 5


def padded(population):
    """The same with every list padded, row by row in plain Python, from its entries."""
    fields = dict(population.fields)
    for name, field in population.fields.items():
        if isinstance(field, PackedField):
            rows = [field.values[a:b].tolist() for a, b in itertools.pairwise(field.offsets.tolist())]
            rows = [[*row, *[field.pad.tolist()] * (field.width - len(row))] for row in rows]
            fields[name] = np.array(rows, field.dtype).reshape(field.shape)
    return replace(population, fields=fields)


def posts(dtype=np.uint16, **options):
    """40 posts of 9 users, in any order, of 0 to 7 tokens."""
    rng = np.random.default_rng(8)
    lists = [rng.integers(0, 99, rng.integers(0, 8)).tolist() for _ in range(40)]
    column = pa.array(lists, pa.list_(pa.from_numpy_dtype(dtype)))
    frame = pa.table({"user": rng.integers(0, 9, 40), "tokens": column, "y": np.arange(40)})
    return frame, Population.from_dataframe(frame, "user", lengths={"tokens": WIDTH}, **options)


@pytest.fixture
def store(tmp_path):
    _, people = posts()
    return people.save(tmp_path / "store")


def test_a_store_of_lists_has_two_files_and_opens_as_maps(tmp_path):
    frame, people = posts(pad=3)
    pyarrow.parquet.write_table(frame, tmp_path / "posts.parquet")
    grouped = Population.from_table(tmp_path / "posts.parquet", "user", lengths={"tokens": WIDTH}, pad=3)
    stored = Population.open(people.save(tmp_path / "store"))
    files = sorted(path.name for path in (tmp_path / "store").iterdir())
    assert files == [
        "field.tokens_length.npy", "field.y.npy", "offsets.npy", "offsets.tokens.npy", "population.json",
        "user_ids.npy", "values.tokens.npy",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "store" / "population.json").read_text())
    assert (manifest["version"], manifest["packed"]) == (2, {"tokens": {"width": WIDTH, "pad": 3}})
    assert len(np.load(tmp_path / "store" / "values.tokens.npy")) == int(people.fields["tokens_length"].sum())
    assert is_mapped(stored.fields["tokens"])
    for one in (stored, grouped):
        assert one.fingerprint() == people.fingerprint() == padded(people).fingerprint()


def test_a_padded_store_of_before_opens_with_the_same_fingerprint(tmp_path):
    _, people = posts()
    old = padded(people).save(tmp_path / "old")
    manifest = json.loads((old / "population.json").read_text())
    assert manifest["version"] == 1
    assert "packed" not in manifest
    assert (old / "field.tokens.npy").is_file()
    opened = Population.open(old)
    assert isinstance(opened.fields["tokens"], np.memmap)
    assert opened.fingerprint() == people.fingerprint()


@pytest.mark.parametrize("memory_bytes", [1, 300, 1 << 20])
def test_any_working_memory_gives_the_plain_grouping_of_lists(tmp_path, memory_bytes):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 8, 90)
    entries, sizes = rng.normal(size=(400, 2)), rng.integers(0, 8, 90)
    options = ColumnOptions(lengths={"v": WIDTH})
    ends, chunks, done = np.cumsum(sizes), [], []
    for a, b in itertools.pairwise([0, 1, 1, 50, 90]):  # an empty chunk among them
        own = entries[ends[a] - sizes[a] : ends[b - 1]] if b > a else entries[:0]
        chunks.append((ids[a:b], {**packed("v", own, sizes[a:b], options), "place": np.arange(a, b)}))
    write_store(
        tmp_path / "s", chunks, source="rng", memory_bytes=memory_bytes, known_users=[99],
        progress=lambda *now: done.append(now),
    )  # fmt: skip
    stored = Population.open(tmp_path / "s")
    assert stored.user_ids.tolist() == [*range(8), 99]
    for user in range(8):
        own = stored.of(user)
        assert own["place"].tolist() == np.flatnonzero(ids == user).tolist()
        for place, row, length in zip(own["place"], own["v"], own["v_length"], strict=True):
            wanted = entries[ends[place] - sizes[place] : ends[place]][:WIDTH]
            assert row[:length].tolist() == wanted.tolist()
            assert not row[length:].any()
    assert done[-1] == (90, 90)


def test_halves_and_subsets_stay_packed_in_memory_and_on_disk(store, monkeypatch):
    people = Population.open(store)
    monkeypatch.setattr(population_module, "_COPY_BYTES", 64)  # some rows at a time
    for _ in range(2):
        for half, wanted in zip(people.split(3), padded(people).split(3), strict=True):
            assert isinstance(half.fields["tokens"], PackedField)
            assert half.fingerprint() == wanted.fingerprint()
        assert people.subset([1, 4]).fingerprint() == padded(people).subset([1, 4]).fingerprint()
        monkeypatch.setattr(population_module, "_IN_MEMORY", 0)
    assert is_mapped(people.subset([1, 4]).fields["tokens"])


def test_a_scale_of_all_entries_alike_keeps_lists_packed_and_counts_for_the_padding(store, tmp_path):
    people = Population.open(store)
    alike, by_place = {"tokens": (3.0, 0.7)}, {"tokens": ([1.0, 2, 3, 4, 5], [1.0, 1, 1, 1, 2])}
    for scale, kind in ((alike, PackedField), (by_place, np.ndarray)):
        scaled = scaled_population(people, scale, None)
        assert isinstance(scaled.fields["tokens"], kind)
        assert scaled.fingerprint() == scaled_population(padded(people), scale, None).fingerprint()
        assert Population.open(scaled.save(tmp_path / kind.__name__)).fingerprint() == scaled.fingerprint()
        _, read = posts(scale=scale)
        assert isinstance(read.fields["tokens"], kind)
        subtract, divide = map(np.asarray, scale["tokens"])
        wanted = (np.asarray(people.fields["tokens"]).astype(np.float64) - subtract) / divide
        assert read.fields["tokens"].tolist() == wanted.tolist()


def test_of_large_files_the_values_are_not_read_but_offsets_and_pad_count(store, monkeypatch):
    people = Population.open(store)
    monkeypatch.setattr(fingerprint_module, "LARGEST_READ", 100)
    same = people.fingerprint()
    content = bytearray((store / "values.tokens.npy").read_bytes())
    before = (store / "values.tokens.npy").stat().st_mtime_ns
    content[-1] ^= 1
    (store / "values.tokens.npy").write_bytes(content)
    os.utime(store / "values.tokens.npy", ns=(before, before))
    assert Population.open(store).fingerprint() == same
    lists = people.fields["tokens"]
    reversed_sizes = np.concatenate([[0], np.cumsum(np.diff(lists.offsets)[::-1])])
    copied = replace(lists, offsets=np.array(lists.offsets))  # in memory, so all of it is read
    others = replace(lists, pad=np.array(9, np.uint16)), replace(lists, offsets=reversed_sizes), copied
    found = {replace(people, fields={**people.fields, "tokens": one}).fingerprint() for one in others}
    assert len(found | {same}) == 4


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([1], "packed is "),
        ({"tokens": 3}, "does not say width and pad of 'tokens'"),
        ({"tokens": {"width": 5, "pad": None}}, "does not say width and pad"),
        ({"tokens": {"width": 2, "pad": 0}}, "must by 0 to the width of 2"),
        ({}, "field.tokens.npy' cannot be opened"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(store, entry, words):
    manifest = json.loads((store / "population.json").read_text())
    (store / "population.json").write_text(json.dumps({**manifest, "packed": entry}))
    with pytest.raises(PopulationError, match=words) as error:
        Population.open(store)
    assert str(store) in str(error.value)


def test_words_of_lists_of_which_none_is_listed_are_refused_whatever_the_padding():
    words = pa.table({"u": [1, 2], "w": [["bern"], ["oslo", "rome"]]})
    with pytest.raises(PopulationError, match="none of the 2 values of 'w' is among its 2 categories"):
        Population.from_dataframe(words, "u", lengths={"w": 3}, categories={"w": ["Bern", "Rome"]})
    empty = pa.table({"u": [1], "w": pa.array([[]], pa.list_(pa.string()))})
    assert Population.from_dataframe(empty, "u", lengths={"w": 3}, categories={"w": ["Bern"]}).examples == 1

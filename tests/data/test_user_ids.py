"""Ids in every usual form: the same people come out, and missing ids are counted and refused."""

from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from clipline import Population
from clipline.errors import PopulationError

NAMES = ["zoë", "ann", "zoë", "bob"]
NUMBERS = [7, 3, 7, 5]
UUIDS = [UUID(int=number) for number in NUMBERS]


def pandas_forms(values, kinds):
    def made():
        pandas = pytest.importorskip("pandas")
        series = [pandas.Series(values, dtype=kind) for kind in kinds]
        return [
            form for one in series for form in (one, one.values, one.to_numpy(), one[::-1][::-1], pandas.Index(one))
        ]

    return made


def polars():
    return pytest.importorskip("polars")


FORMS = {
    "list": (NAMES, lambda: [NAMES, tuple(NAMES), np.array(NAMES), np.array(NAMES, object)]),
    "numpy strings": (NAMES, lambda: [np.array(NAMES, np.dtypes.StringDType())]),
    "pandas": (NAMES, pandas_forms(NAMES, [None, "string", "object", "category", "string[pyarrow]"])),
    "polars": (NAMES, lambda: [polars().Series(NAMES), polars().Series(NAMES).cast(polars().Categorical)]),
    "arrow": (NAMES, lambda: [pa.array(NAMES), pa.array(NAMES).dictionary_encode()]),
    "large arrow": (NAMES, lambda: [pa.array(NAMES, pa.large_string()), pa.array(NAMES, pa.string_view())]),
    "arrow in chunks": (NAMES, lambda: [pa.chunked_array([NAMES[:1], NAMES[1:]])]),
    "numbers": (NUMBERS, lambda: [NUMBERS, np.array(NUMBERS, np.int8), np.array(NUMBERS, object), pa.array(NUMBERS)]),
    "numpy scalars": (NUMBERS, lambda: [[np.int32(number) for number in NUMBERS]]),
    "pandas numbers": (NUMBERS, pandas_forms(NUMBERS, [None, "Int64", "category", "int64[pyarrow]", "object"])),
    "polars numbers": (NUMBERS, lambda: [polars().Series(NUMBERS)]),
    "uuid": ([str(one) for one in UUIDS], lambda: [UUIDS, np.array(UUIDS)]),
    "pandas uuid": ([str(one) for one in UUIDS], pandas_forms(UUIDS, [None])),
    "arrow uuid": ([str(one) for one in UUIDS], lambda: [pa.array([str(one) for one in UUIDS])]),
}  # fmt: skip


@pytest.mark.parametrize(("plain", "forms"), FORMS.values(), ids=FORMS)
def test_ids_in_every_form_are_the_same_people(plain, forms):
    for form in forms():
        population = Population.from_arrays(form, known_users=form[:1], x=[0.0, 1.0, 2.0, 3.0])
        assert population.user_ids.tolist() == sorted(set(plain))
        assert [user["x"].tolist() for user in population] == [
            [float(place) for place, name in enumerate(plain) if name == user] for user in sorted(set(plain))
        ]


def test_randomness_does_not_depend_on_the_form_of_the_ids():
    pandas = pytest.importorskip("pandas")
    one, other = (Population.from_arrays(ids, x=np.zeros(4)) for ids in (NAMES, pandas.Series(NAMES, dtype="category")))
    assert one.identities(np.arange(3)).tolist() == other.identities(np.arange(3)).tolist()


def missing_forms():
    yield from [[*NAMES, None, None], np.array([*NAMES, np.nan, None], object), pa.array([*NAMES, None, None])]
    yield from [[*NAMES, float("nan"), np.float32("nan")], [*NUMBERS, np.nan, np.nan], pa.array([*NUMBERS, None, None])]
    yield np.array([*NUMBERS, np.nan, np.nan])


def test_missing_ids_are_counted_and_refused_with_a_way_out():
    for form in missing_forms():
        refused(form)


@pytest.mark.parametrize("kind", [None, "string", "object", "category", "string[pyarrow]"])
def test_missing_ids_of_pandas_are_refused(kind):
    pandas = pytest.importorskip("pandas")
    series = pandas.Series([*NAMES, None, pandas.NA], dtype=kind)
    for form in (series, series.values, series.to_numpy(), [*NAMES, pandas.NaT, pandas.NA]):
        refused(form)
    refused(pandas.Series([*NUMBERS, None, None]))
    refused(pandas.Series([*NUMBERS, None, None], dtype="Int64"))
    with pytest.raises(PopulationError, match="user column 'u' has 2 of 6 ids missing"):
        Population.from_dataframe(pandas.DataFrame({"u": series, "x": np.zeros(6)}), user="u")


def test_missing_ids_of_polars_are_refused():
    for values in (NAMES, NUMBERS):
        refused(polars().Series([*values, None, None]))


def refused(form):
    with pytest.raises(PopulationError) as error:
        Population.from_arrays(form, x=np.zeros(6))
    assert str(error.value).startswith("user_ids has 2 of 6 ids missing (None, NaN or null)")
    assert "drop these examples" in str(error.value)
    assert not any(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["a", 1], "mixes types or holds objects (text, whole numbers)"),
        ([1, 2.5], "mixes types"),
        (["a", ""], "user_ids has 1 of 2 ids empty"),
        (["a", "a\0"], "ends in a NUL byte"),  # NumPy would drop it, and two users would be one
        ([2**64, 1], "mixes types or holds objects"),
        (np.array(["2026-01-01", "2026-01-02"], "M8[D]"), "user_ids are datetime64[D] but must be numbers or text"),
    ],
)
def test_ids_that_name_nobody_safely_are_refused(ids, words):
    with pytest.raises(PopulationError) as error:
        Population.from_arrays(ids, x=[1.0, 2.0])
    assert words in str(error.value)


def test_whole_numbers_of_64_bits_without_a_sign_are_ids():
    assert Population.from_arrays([2**64 - 1, 2**63], x=[1.0, 2.0]).user_ids.tolist() == [2**63, 2**64 - 1]

"""What is wrong with a table is told in the words of who asked."""

import json

import pytest

from clipline.errors import PopulationError, SettingError
from clipline.tasks.column_words import in_flags, in_keys_of

SAID = {
    'fill={column: 0} or missing=0 fills them, missing="zero-update" keeps them': (
        "--fill COLUMN=0 or --missing 0 fills them, --missing zero-update keeps them",
        '"fill": {"column": 0} or "missing": 0 fills them, "missing": "zero-update" keeps them '
        "(COLUMNS are in 'a.py')",
    ),
    """timestamps={'t': "hours since 2026-01-01"} counts""": (
        '--timestamps "t=hours since 2026-01-01" counts',
        '"timestamps": {"t": "hours since 2026-01-01"} counts (COLUMNS are in \'a.py\')',
    ),
    "give them one width with lengths={'t': 128}": (
        "give them one width with --lengths t=128",
        'give them one width with "lengths": {"t": 128} (COLUMNS are in \'a.py\')',
    ),
    "fill['age']='x' must be a finite number": (
        "--fill age='x' must be a finite number",
        'COLUMNS["fill"]["age"]=\'x\' must be a finite number',
    ),
    "categories names 'ctiy', which is no field": (
        "--categories names 'ctiy', which is no field",
        "COLUMNS[\"categories\"] names 'ctiy', which is no field",
    ),
    "pad=0.5 cannot stand in 't'": (
        "--pad 0.5 cannot stand in 't'",
        "\"pad\": 0.5 cannot stand in 't' (COLUMNS are in 'a.py')",
    ),
    "'a.csv' has no rows": ("'a.csv' has no rows", "'a.csv' has no rows"),
}


@pytest.mark.parametrize("said", SAID, ids=str)
@pytest.mark.parametrize("kind", [PopulationError, SettingError])
def test_a_message_in_pythons_words_becomes_one_in_flags_or_in_keys_of_the_file(said, kind):
    for words, expected in zip((in_flags(), in_keys_of("a.py")), SAID[said], strict=True):
        with pytest.raises(kind) as error, words:
            raise kind(said)
        assert str(error.value) == expected


def test_no_message_of_the_command_line_names_an_argument_of_python(tmp_path):
    """Each way in which a table may be wrong, asked of the real reader."""
    from clipline.data.column_options import ColumnOptions
    from clipline.data.readers.tables import read_table

    rows = {"gap": None, "text": "a", "when": "2026-01-01 10:00:00", "list": [1, 2]}
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"user": 1, **rows, "gap": 1.5}) + "\n" + json.dumps({"user": 2, **rows, "list": [1]}) + "\n"
    )
    (tmp_path / "t.csv").write_text("user,when\n1,2026-01-01 10:00:00\n")
    for column, file in (("gap", "t.jsonl"), ("when", "t.csv"), ("list", "t.jsonl")):
        with pytest.raises((PopulationError, SettingError)) as error, in_flags():
            list(read_table(tmp_path / file, "user", fields=[column], options=ColumnOptions()))
        assert not any(f"{word}=" in str(error.value) for word in ("fill", "missing", "timestamps", "lengths"))
        assert "--" in str(error.value)

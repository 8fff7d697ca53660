"""Predictions as a file: every column under a name of its own, whatever kinds of values were kept."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pytest

from clipline.cli.predict import _columns, _write
from clipline.errors import SettingError


def test_a_kept_column_is_not_overwritten_by_a_prediction_of_several_numbers():
    scores = np.array([[0.25, 0.75]])
    written = _columns({"id": np.array([7]), "prediction": scores})
    assert written == {"id": [7], "prediction_0": 0.25, "prediction_1": 0.75}
    with pytest.raises(SettingError, match="keep='prediction_1' must be named other than the predictions: rename"):
        _columns({"prediction_1": np.array([7]), "prediction": scores})


def test_kept_values_that_json_has_no_kind_for_are_written_as_text(tmp_path):
    values = [datetime.date(2026, 11, 16), Decimal("1.50"), b"abc", [1, 2]]
    _write({"kept": np.array([*values, None], object)}, tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["kept"] for line in lines] == ["2026-11-16", "1.50", "abc", [1, 2], None]


@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_lists_are_refused_where_the_file_has_no_place_for_them(tmp_path, ending):
    lists = np.array([[1], [2], None], object)[:2]
    with pytest.raises(SettingError, match=r"cannot hold these columns .*: give a file that ends in .jsonl"):
        _write({"kept": lists}, tmp_path / f"out.{ending}")
    assert not list(tmp_path.iterdir())


def test_any_name_may_stand_in_an_npz(tmp_path):
    _write({"file": np.array(["a"]), "allow_pickle": np.array([1.5])}, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as found:
        assert (found["file"].tolist(), found["allow_pickle"].tolist()) == (["a"], [1.5])

"""Predictions of classes have names, and the columns that were to be kept."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import clipline as cl
from clipline.errors import PopulationError, SettingError
from clipline.serve.new_data import arrays_of, class_names, named_columns

CARD = {
    "fields": {"km": {"dtype": "float32", "shape": []}, "mode": {"dtype": "int32", "shape": []}},
    "columns": {"categories": {"mode": ["bus", "tram"]}},
}


def test_the_names_are_those_given_or_the_categories_of_a_field_and_one_for_all_others():
    assert class_names(["no", "yes"], CARD) == ["no", "yes"]
    assert class_names("mode", CARD) == ["bus", "tram", "other"]
    assert class_names("km", CARD) is None
    with pytest.raises(SettingError, match="classes='mod' is no field of the training: did you mean 'mode'"):
        class_names("mod", CARD)
    for wrong in ([], ["a", "a"], 3, ["a", " "], ["a", None]):
        with pytest.raises(SettingError, match="a list of different names, or the field that is predicted"):
            class_names(wrong, CARD)


def test_the_most_likely_class_is_named_and_every_class_has_a_column():
    chances = np.array([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]])
    named = named_columns(chances, ["bus", "tram", "other"])
    assert list(named) == ["prediction", "probability_bus", "probability_tram", "probability_other"]
    assert named["prediction"].tolist() == ["tram", "bus"]
    assert named["probability_other"].tolist() == [0.3, 0.1]
    assert list(named_columns(chances * 2, ["a", "b", "c"]))[1] == "score_a"  # no chances: they do not add up to 1
    of_field = named_columns(chances[:, :2], ["bus", "tram", "other"], of_field=True)
    assert of_field["prediction"].tolist() == ["tram", "bus"]
    with pytest.raises(SettingError, match="as many as the model predicts, 2"):  # a given list has no spare name
        named_columns(chances[:, :2], ["bus", "tram", "other"])
    assert named_columns(chances, None)["prediction"].tolist() == [1, 0]
    assert named_columns(chances[:0], ["a", "b", "c"])["prediction"].shape == (0,)
    with pytest.raises(SettingError, match="as many as the model predicts, 3"):
        named_columns(chances, ["a"])
    with pytest.raises(SettingError, match="'NaN in 1 of 2 rows' must be numbers, to name a class"):
        named_columns(np.array([[0.2, 0.8], [np.nan, 1.0]]), ["a", "b"])


def chances(model, batch):
    return model(batch["km"].unsqueeze(1)).softmax(dim=1)


def test_a_loaded_model_names_classes_and_keeps_ids_in_the_order_of_the_rows(tmp_path):
    rides = pa.table({"who": ["a", "b"] * 20, "km": np.arange(40) / 8, "mode": ["bus", "tram", "boat", "tram"] * 10})
    people = cl.Population.from_dataframe(rides, user="who", categories={"mode": ["bus", "tram"]})
    training = cl.Training(
        nn.Linear(1, 3), lambda model, batch: -chances(model, batch).gather(1, batch["mode"].unsqueeze(1)).mean(),
        people, rounds=1, cohort_size=2, local=cl.LocalSGD(0.1), privacy=cl.Privacy(noise_multiplier=0), seed=0,
    )  # fmt: skip
    folder = training.run().save(tmp_path / "saved")
    plain = cl.load(folder, nn.Linear(1, 3), predict=chances)
    saved = cl.load(folder, nn.Linear(1, 3), predict=chances, classes="mode")
    (tmp_path / "new.csv").write_text("id,km\n007,0.5\n12,4\n3,-2\n")
    expected = plain.predict(tmp_path / "new.csv")
    assert expected.shape == (3, 3)  # without classes, as the function gives it
    for data in (tmp_path / "new.csv", {"id": ["007", "12", "3"], "km": [0.5, 4, -2]}):
        said = saved.predict(data, keep=["id"])
        assert list(said) == ["id", "prediction", "probability_bus", "probability_tram", "probability_other"]
        assert said["id"].tolist() == ["007", "12", "3"]
        assert said["prediction"].tolist() == [["bus", "tram", "other"][i] for i in expected.argmax(axis=1)]
        np.testing.assert_allclose(said["probability_tram"], expected[:, 1], rtol=1e-6)
    assert plain.predict(tmp_path / "new.csv", keep=["id"])["prediction"].shape == (3, 3)
    assert saved.predict(people, keep=["user"])["user"].tolist() == ["a"] * 20 + ["b"] * 20
    with pytest.raises(PopulationError, match="data has no column 'ids' to keep: did you mean 'id'"):
        saved.predict(tmp_path / "new.csv", keep=["ids"])
    with pytest.raises(SettingError, match="keep='id' must be a list of columns"):
        saved.predict(tmp_path / "new.csv", keep="id")
    with pytest.raises(SettingError, match="keep='prediction' must be named other than prediction, probability_bus"):
        saved.predict({"km": [1.0], "prediction": [2]}, keep=["prediction"])
    for one_number in (lambda model, batch: chances(model, batch)[:, 0], lambda model, batch: {"a": batch["km"]}):
        named = cl.load(folder, nn.Linear(1, 3), predict=one_number, classes=["no", "yes"])
        with pytest.raises(SettingError, match="left out where a prediction is no fraction for each class"):
            named.predict({"km": [1.0]})
    with pytest.raises(SettingError, match="left out where data have no names"):
        arrays_of(torch.ones(2, 1), ["x"], only="", keep=["id"])


@pytest.mark.parametrize("ids", [[2**63 + 1, 1], [2**63 + 1, -1]])
def test_large_ids_are_kept_to_the_last_digit(ids):
    new = arrays_of({"km": [1.0, 2.0], "id": ids}, ["km"], only="", keep=["id"])
    assert new.kept["id"].tolist() == ids  # 2^63 + 1 is no float64

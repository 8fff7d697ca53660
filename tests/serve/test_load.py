import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import small_training
from torch import nn

import clipline as cl
from clipline.errors import ModuleError, PopulationError, RunError, SettingError


def linear():
    return nn.Linear(6, 3, bias=False)


def scores(model, batch):
    return model(batch["x"])


@pytest.fixture(scope="module")
def result():
    return small_training(2).run([cl.Evaluate(lambda model: {"accuracy": 0.25})])


@pytest.fixture(scope="module")
def folder(result, tmp_path_factory):
    return result.save(tmp_path_factory.mktemp("saved") / "model")


X = np.random.default_rng(5).normal(size=(7, 6))


def expected(result):
    return X.astype(np.float32) @ result.model.weight.detach().numpy().T


def test_a_model_comes_back_with_its_guarantee_and_predicts(folder, result):
    given = linear()
    before = given.weight.detach().clone()
    saved = cl.load(folder, model=given, predict=scores)
    assert saved.guarantee == result.guarantee
    assert str(saved) == str(result.guarantee)
    assert (saved.metrics, saved.card["rounds"]) == ({"accuracy": 0.25}, 2)
    assert torch.equal(saved.model.weight, result.model.weight)
    assert torch.equal(given.weight, before)  # a copy was loaded
    assert not saved.model.training
    predicted = saved.predict({"x": X}, batch_size=3)  # 3 + 3 + 1
    np.testing.assert_allclose(predicted, expected(result), rtol=1e-5, atol=1e-6)


def test_a_result_predicts_as_the_saved_model_does_and_keeps_its_modes(result):
    result.model.train()
    np.testing.assert_allclose(result.predict(X, batch_size=3), expected(result), rtol=1e-5, atol=1e-6)
    named = result.predict({"x": X, "id": np.arange(7)}, scores, classes=["a", "b", "c"], keep=["id"])
    assert list(named) == ["id", "prediction", "score_a", "score_b", "score_c"]
    assert named["prediction"].tolist() == [["a", "b", "c"][place] for place in expected(result).argmax(axis=1)]
    assert result.model.training


def frozen_first():
    """A model of which only the second layer trains."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    return model


def test_a_result_saved_without_its_frozen_parameters_takes_them_from_the_model_given(tmp_path):
    result = small_training(1, model=frozen_first()).run()
    folder = result.save(tmp_path / "less", frozen=False)
    assert load_file(folder / "model.safetensors").keys() == {"2.weight", "2.bias"}
    assert "The parameters that did not train are not stored" in (folder / "card.md").read_text()
    saved = cl.load(folder, frozen_first)
    np.testing.assert_array_equal(saved.predict(X), result.predict(X))
    other = frozen_first()
    other[0].weight.data[0, 0] += 1
    with pytest.raises(
        ModuleError, match=r"'0.weight' is not stored in .* and the model given has another: give model="
    ):
        cl.load(folder, other)
    with pytest.raises(ModuleError, match="and the model given has none"):
        cl.load(folder, linear)


def test_a_function_makes_the_model_as_well(folder, result):
    np.testing.assert_allclose(cl.load(folder, linear).predict(X), expected(result), rtol=1e-5, atol=1e-6)


def test_a_stored_population_is_predicted_from_its_folder(folder, result, tmp_path):
    cl.Population.from_arrays(np.arange(7), x=X).save(tmp_path / "store")
    predicted = cl.load(folder, linear, predict=scores).predict(tmp_path / "store")
    np.testing.assert_allclose(predicted, expected(result), rtol=1e-5, atol=1e-6)


def test_predictions_may_have_names(folder):
    saved = cl.load(folder, linear, predict=lambda model, batch: {"best": model(batch["x"]).argmax(1)})
    assert saved.predict({"x": X})["best"].shape == (7,)
    assert saved.predict({"x": X[:0]})["best"].shape == (0,)


class Pair(nn.Module):
    """One parameter, and two inputs by name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, km, climb):
        return self.weight + km - climb


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    ones = np.ones(40, np.float32)
    rides = cl.Population.from_arrays(np.arange(40) % 20, km=np.arange(40) / 4, climb=ones, hours=ones)
    training = cl.Training(
        Pair(), lambda model, batch: (model(batch["km"], batch["climb"]) - batch["hours"]).square(), rides,
        rounds=1, cohort_size=10, local=cl.LocalSGD(lr=0.0001), privacy=cl.Privacy(noise_multiplier=0), seed=0,
    )  # fmt: skip
    return training.run().save(tmp_path_factory.mktemp("saved") / "pair")


def test_fields_go_to_the_arguments_of_their_names_and_labels_may_be_missing(pair):
    saved = cl.load(pair, Pair)
    weight = float(saved.model.weight.detach())
    np.testing.assert_allclose(saved.predict({"climb": [1, 1], "km": [3, 5]}), [2 + weight, 4 + weight], rtol=1e-6)


def test_a_batch_of_predictions_has_the_types_of_a_batch_of_the_training(tmp_path):
    """Codes of categories are stored as int32: one_hot and indexing take int64 alone."""
    ids = [f"u{place % 9}" for place in range(30)]
    table = pa.table({"who": ids, "city": ["Bern", "Rome", "Oslo"] * 10, "km": [1.0, 2.0, 3.0] * 10})
    categories = {"city": ["Bern", "Rome"]}
    population = cl.Population.from_dataframe(table, user="who", categories=categories)

    def predict(model, batch):
        return model(nn.functional.one_hot(batch["city"], 3).float()).squeeze(1)

    training = cl.Training(
        nn.Linear(3, 1), lambda model, batch: (predict(model, batch) - batch["km"]).square(), population,
        rounds=1, cohort_size=5, local=cl.LocalSGD(lr=0.1), privacy=cl.Privacy(noise_multiplier=1.0), seed=1,
    )  # fmt: skip
    saved = cl.load(training.run().save(tmp_path / "saved"), nn.Linear(3, 1), predict=predict)
    weight, bias = (param.detach().numpy() for param in saved.model.parameters())
    by_hand = weight[0, [1, 2]] + bias  # Rome, and what is not listed
    np.testing.assert_allclose(saved.predict({"city": ["Rome", "Kiel"], "km": [1, 2]}), by_hand, rtol=1e-5, atol=1e-6)


def test_a_model_whose_weights_take_no_plain_numbers_is_refused_in_a_sentence(folder):
    class Quantised(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
            errors.append("'Tensor' object has no attribute 'qdata'")

    words = r"has no attribute 'qdata'\): give the model as it was before its weights were"
    with pytest.warns(UserWarning, match="prints other layers"), pytest.raises(ModuleError, match=words):
        cl.load(folder, Quantised(6, 3, bias=False))


def test_models_of_other_shapes_types_or_names_are_refused_in_a_sentence(folder):
    for other, said in (
        (nn.Linear(6, 2, bias=False), r"'weight' is float32 \(3, 6\) in .* and float32 \(2, 6\) in the model given"),
        (linear().double(), r"'weight' is float32 \(3, 6\) in .* and float64 \(3, 6\) in the model given"),
        (nn.Linear(6, 3), r"'bias' is absent in .* and float32 \(3,\) in the model given"),
        (nn.Sequential(linear()), r"'0.weight' is absent in .* and float32"),
        (lambda: "linear", "model gave str but must give a torch.nn.Module"),
    ):
        with pytest.raises(ModuleError, match=said):
            cl.load(folder, other)
    with pytest.raises(SettingError, match="model=3 must be a module, a function that makes one"):
        cl.load(folder, 3)


def test_other_layers_of_the_same_shapes_are_warned_of(folder):
    class Squared(nn.Linear):
        def forward(self, x):
            return super().forward(x) ** 2

    with pytest.warns(UserWarning, match="prints other layers than the one saved"):
        cl.load(folder, Squared(6, 3, bias=False))


def test_without_a_model_the_way_out_is_told(folder):
    with pytest.raises(SettingError, match=r"does not say what makes its model.*give load\(path, model=MyModel\(\)\)"):
        cl.load(folder)


def test_a_model_whose_bytes_were_changed_is_refused(folder, tmp_path):
    data = bytearray((folder / "model.safetensors").read_bytes())
    for place in (len(data) - 1, data.index(b"epsilon")):  # a value of a tensor; a letter of the guarantee
        (tmp_path / "model.safetensors").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RunError, match="is damaged, its checksum is that of other content: restore it, or save"):
            cl.load(tmp_path, linear)
    save_file({"weight": torch.zeros(3, 6)}, tmp_path / "model.safetensors", {"card": "{}"})
    with pytest.raises(RunError, match="is damaged, it has no checksum"):
        cl.load(tmp_path, linear)


def test_an_unfinished_run_and_a_file_without_a_card_are_refused(tmp_path):
    with pytest.raises(RunError, match=r"must be a folder with model.safetensors, and has none"):
        cl.load(tmp_path, linear)
    (tmp_path / "checkpoint.safetensors").touch()
    with pytest.raises(RunError, match="holds an unfinished run"):
        cl.load(tmp_path, linear)
    save_file({"weight": torch.zeros(3, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"has no card, so clipline.load does not know its guarantee"):
        cl.load(tmp_path, linear)


def test_questions_that_cannot_be_answered_are_refused_in_a_sentence(folder, pair):
    labels = np.zeros(7, np.int64)
    for data, words in (
        ({"y": labels}, "data has no field 'x' but y: give it"),
        ({"x": X[:, :5]}, r"shape of 'x'=\(5,\) must be \(6,\) for each example, as in the training"),
        (X, "data='ndarray' must be fields by name"),
        ({"X": X, "y": labels}, r"data has no field 'x' but y: did you mean 'X'\? Then rename it to 'x'"),
    ):
        with pytest.raises(SettingError, match=words):
            cl.load(folder, linear, predict=scores).predict(data)
    for data, error, words in (
        ({"x": X, "y": labels}, SettingError, "predict=None must be given where the model takes input and the data"),
        ({"y": labels}, PopulationError, r"data has no 'x', which the training had, .* give it, by that name"),
        ({"X": X}, PopulationError, r"none of the fields trained on, .* did you mean 'X'\? Then rename it to 'x'"),
    ):
        with pytest.raises(error, match=words):
            cl.load(folder, linear).predict(data)
    with pytest.raises(SettingError, match="data has no field 'km' but climb, hours: give it, by that name"):
        cl.load(pair, Pair).predict({"climb": [1], "hours": [1.0]})
    with pytest.raises(SettingError, match="prediction='shape \\(\\)' must be a tensor with 7 rows"):
        cl.load(folder, linear, predict=lambda model, batch: model(batch["x"]).sum()).predict({"x": X})
    with pytest.raises(ZeroDivisionError):  # an error of the user's own function is not covered up
        cl.load(folder, linear, predict=lambda model, batch: 1 / 0).predict({"x": X})


def test_a_run_directory_of_the_library_loads_too(tmp_path):
    result = small_training(2).run([cl.RunDirectory(tmp_path / "run")])
    saved = cl.load(tmp_path / "run", linear)
    assert saved.guarantee == result.guarantee
    assert torch.equal(saved.model.weight, result.model.weight)


def letters(texts):
    return np.array([[text.count(letter) for letter in "ab"] for text in texts], np.float32)


def test_a_model_that_was_trained_on_texts_predicts_with_the_function_that_reads_them(tmp_path):
    ids = [f"u{place % 9}" for place in range(30)]
    table = pa.table({"who": ids, "x": ["aab", "b", "ab"] * 10, "y": [0, 1, 1] * 10})
    population = cl.Population.from_dataframe(table, user="who", text=letters)
    training = cl.Training(
        nn.Linear(2, 2), lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]), population,
        rounds=1, cohort_size=5, local=cl.LocalSGD(lr=0.1), privacy=cl.Privacy(noise_multiplier=1.0), seed=1,
    )  # fmt: skip
    result = training.run()
    saved = cl.load(result.save(tmp_path / "saved"), nn.Linear(2, 2), predict=scores)
    weight, bias = (param.detach().numpy() for param in result.model.parameters())
    by_hand = np.array([[2, 1], [0, 0]], np.float32) @ weight.T + bias  # "baa" has two a and one b
    (tmp_path / "new.csv").write_text("x\nbaa\nzoo\n")
    for data in (tmp_path / "new.csv", pa.table({"x": ["baa", "zoo"]}), {"x": ["baa", "zoo"]}):
        np.testing.assert_allclose(saved.predict(data, text=letters), by_hand, rtol=1e-5, atol=1e-6)
    with pytest.raises(PopulationError, match="field 'x' is text"):
        saved.predict(tmp_path / "new.csv")

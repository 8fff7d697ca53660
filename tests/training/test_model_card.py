import json
import tomllib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from samples import small_population, small_training

from clipline import Evaluate, FixedClip, LocalSGD, Privacy
from clipline.privacy.accountant import account
from clipline.training.model_card import guarantee_from, guarantee_json

SEED = 914_237_555


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, and the result it was saved from."""
    path = tmp_path_factory.mktemp("saved") / "model"
    privacy = Privacy(noise_multiplier=0.7, delta=0.01)
    training = small_training(2, local=LocalSGD(lr=0.25), privacy=privacy, server=None, seed=SEED)
    result = training.run([Evaluate(lambda model: {"accuracy": 0.25, "loss": float("nan")})])
    assert result.save(path) == path
    return path, result


def test_the_folder_has_the_model_and_its_card_for_people_and_programs(saved):
    path, result = saved
    assert sorted(file.name for file in path.iterdir()) == ["card.json", "card.md", "model.safetensors"]
    assert torch.equal(load_file(path / "model.safetensors")["weight"], result.model.weight)
    card = json.loads((path / "card.json").read_text())
    with safe_open(path / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["card"]) == card
    assert card["guarantee"]["text"] == str(result.guarantee)
    metrics = {"accuracy": 0.25, "loss": None, "last/accuracy": 0.25, "last/loss": None}  # of the average, and the last
    assert (card["rounds"], card["stopped"], card["metrics"]) == (2, "finished", metrics)
    assert card["fields"] == {"x": {"dtype": "float64", "shape": [6]}, "y": {"dtype": "int64", "shape": []}}
    assert (card["settings"]["local"]["lr"], card["settings"]["cohort_size"]) == (0.25, 20)
    assert (card["resolved"]["parameters"], card["resolved"]["users"]) == (18, 60)


def test_the_page_can_be_read(saved):
    path, result = saved
    page = (path / "card.md").read_text()
    assert f"\n{result.guarantee}\n" in page
    assert "* accuracy: 0.25\n* loss: not finite\n" in page
    settings = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    assert settings["privacy"]["noise_multiplier"] == 0.7


def test_neither_the_seed_nor_times_nor_data_are_in_it(saved):
    path, _ = saved
    secrets = [str(SEED), "seconds", *(repr(float(number)) for number in small_population().fields["x"][0])]
    for file in path.iterdir():
        stored = file.read_bytes().decode("latin-1")
        assert not [secret for secret in secrets if secret in stored], file


@pytest.mark.filterwarnings("ignore::clipline.federated.sampling.DeclaredUsersWarning")
def test_a_declared_number_of_users_is_told_and_not_the_real_one():
    privacy = Privacy(noise_multiplier=0.7, population_size=1234)
    about = small_training(1, privacy=privacy).run().about
    assert "users" not in about["resolved"]
    assert about["settings"]["privacy"]["population_size"] == 1234


def test_beside_a_folder_in_use_the_model_is_saved_all_the_same(saved, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "card.md").write_text("keep me")
    (tmp_path / "model-2").write_text("a file, kept too")
    with pytest.warns(UserWarning, match=r"path='.*/model' is in use and stays .* is saved in '.*/model-3'"):
        folder = saved[1].save(tmp_path / "model")
    assert folder == tmp_path / "model-3"
    assert torch.equal(load_file(folder / "model.safetensors")["weight"], saved[1].model.weight)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["card.md"]
    assert (tmp_path / "model" / "card.md").read_text() == "keep me"
    assert (tmp_path / "model-2").read_text() == "a file, kept too"
    monkeypatch.chdir(tmp_path / "model")
    with pytest.warns(UserWarning, match="is in use"):
        assert saved[1].save(".") == tmp_path / "model-4"


@pytest.mark.parametrize("noise_multiplier", [0.5, 0.0])
def test_a_guarantee_is_read_back_whether_there_is_one_or_not(noise_multiplier):
    training = small_training(1, noise_multiplier=noise_multiplier)
    guarantee = training.planned
    assert guarantee_from(json.loads(json.dumps(guarantee_json(guarantee), allow_nan=False))) == guarantee


def test_infinite_settings_are_json_too(tmp_path):
    result = small_training(1, clip=FixedClip(float("inf")), noise_multiplier=0.0).run()
    result.save(tmp_path / "m")
    card = json.loads((tmp_path / "m" / "card.json").read_text(), parse_constant=pytest.fail)
    assert card["settings"]["clip"]["clip"] == "inf"
    assert account(result.state.ledger, delta=0.01, relation=result.guarantee.relation).noisy is False

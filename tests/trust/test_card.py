import hashlib
import json
import shutil

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from clipline.cli.parser import app
from clipline.errors import RunError
from clipline.training.durable import save_tensors
from clipline.trust.card import FILL_IN, write_cards
from clipline.trust.verify import verify

# From schemas/deployments-schema.yaml of opendp/deployments-registry-data (November 2026).
REQUIRED = {
    "": {"approved", "registry_author", "deployment"},
    "deployment": {
        "short_name", "data_curator", "intended_use", "data_product_type", "data_product_description",
        "publication_date",
    },
    "dp_flavor": {"name", "data_domain", "unprotected_quantities"},
    "privacy_loss": {"privacy_unit", "privacy_parameters"},
    "privacy_parameters": set(),
    "model": {"model_type", "release_type", "interactivity"},
    "additional_dp_information": {"post_processing", "composition"},
    "implementation": {"pre_processing_eda_hyperparameter_tuning", "mechanisms", "justification"},
}  # fmt: skip
OPTIONAL = {
    "deployment": {"additional_information_url", *list(REQUIRED)[2:]} - {"privacy_parameters"},
    "privacy_loss": {"privacy_unit_description", "privacy_parameters_description"},
    "privacy_parameters": {"epsilon", "rho", "delta"},
    "model": {"actors", "model_type_description", "release_type_description", "interactivity_description"},
}
CHOICES = {
    "dp_flavor.name": {"Pure DP", "Approximate DP", "Zero Concentrated DP", "other"},
    "model.model_type": {"Local", "Central", "Shuffle", "Federated"},
    "model.release_type": {"One-shot", "Continual"},
    "model.interactivity": {"Interactive", "Non-interactive"},
}


def tables(text):
    """Each mapping of the entry by its name: lines of `name:` or `name: JSON`, indented by two."""
    found, above = {"": {}}, [""]
    for line in text.splitlines():
        name, _, value = line.strip().partition(": ")
        above = above[: (len(line) - len(line.lstrip())) // 2 + 1]
        if value:
            found[above[-1]][name] = json.loads(value)
        else:
            name = name.removesuffix(":")
            found[above[-1]][name] = found[name] = {}
            above.append(name)
    return found


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("card")
    write_cards(run, out, "a steward", "2026-01-02")
    return out


def test_the_statement_has_the_numbers_of_the_run(run, written):
    text, found = (written / "statement.md").read_text(), verify(run)
    digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    for part in (str(found.guarantee), found.seal, digest, "60 users, declared by a steward on 2026-01-02", FILL_IN):
        assert part in text
    assert "noise from a seed" in text
    assert "| 0.001 | 0." in text


def test_the_registry_entry_fits_the_schema(written):
    found = tables((written / "deployment.yaml").read_text())
    assert set(found) == set(REQUIRED)
    for name, entries in found.items():
        assert REQUIRED[name] <= set(entries) <= REQUIRED[name] | OPTIONAL.get(name, set())
    for name, allowed in CHOICES.items():
        table, _, key = name.partition(".")
        assert found[table][key] in allowed
    assert found["privacy_parameters"]["epsilon"] == pytest.approx(8.0, abs=1e-3)


def test_the_model_card_has_front_matter(written):
    front = (written / "README.md").read_text().split("---")[1]
    assert "library_name: clipline" in front
    assert "differential-privacy" in front


def test_a_run_that_is_not_in_order_has_no_card(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="clipline verify names all"):
        write_cards(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_control_characters_of_files_do_not_reach_the_pages(run, tmp_path):
    odd = "safe\x1b[2J\u202e\x9b\n---\nlicense: mit"
    copy = shutil.copytree(run, tmp_path / "a\x1b[1mb\nc")
    with safe_open(copy / "model.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    card = json.loads(metadata["card"])
    card["model"]["class"] = odd
    card["fields"] = {odd: {"dtype": odd, "shape": [3]}}
    save_tensors(tensors, copy / "model.safetensors", {**metadata, "card": json.dumps(card)})
    for path in write_cards(copy, tmp_path / "out", odd, odd):
        text = path.read_text()
        assert all(one.isprintable() or one == "\n" for one in text)
        assert "\nlicense: mit" not in text


def test_the_command_says_what_is_left_to_fill_in(run, tmp_path):
    done = CliRunner().invoke(app, ["card", str(run), "--out", str(tmp_path)], standalone_mode=False)
    assert done.stdout.count(FILL_IN) == 3

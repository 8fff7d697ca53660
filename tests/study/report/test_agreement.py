import json
import re
import shutil

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from samples import small_training

from clipline import RunDirectory
from clipline.study.report.content import warnings, words
from clipline.study.report.reading import collect


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("agreement") / "run"
    small_training(4).run([RunDirectory(path)])
    return path


def read_changed(run, tmp_path, file, pattern, text):
    """The run as a reader finds it after somebody has edited one of its files."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    before = (copy / file).read_text()
    (copy / file).write_text(re.sub(pattern, text, before, flags=re.MULTILINE))
    assert (copy / file).read_text() != before
    (found,) = collect([copy]).runs
    return found


def test_the_files_of_an_honest_run_agree(run):
    (found,) = collect([run]).runs
    assert found.problems == []
    assert words(found) == str(small_training(4).planned)  # also that the noise comes from a seed


@pytest.mark.parametrize(
    ("file", "pattern", "text", "problem"),
    [
        ("ledger.jsonl", r'"noise_multiplier": [\d.]+', '"noise_multiplier": 5.0', "noise multiplier of 5, settings"),
        ("ledger.jsonl", r'"rate": [\d.]+', '"rate": 0.001', "Poisson sampling at rate 0.001, settings.toml has"),
        ("ledger.jsonl", r'.*"round": 3.*\n', "", "lacks 1 of the rounds in metrics.jsonl"),
        ("settings.toml", r"^# delta = .*", "# delta = 0.05", "delta is 0.05 in settings.toml"),
        (
            "settings.toml",
            r"^# relation = .*",
            "# relation = 'replace-one'",
            "relation is replace-one in settings.toml",
        ),
        ("settings.toml", r"^cohort_size = .*", "cohort_size = 1", "settings.toml has 1 of"),
        (
            "settings.toml",
            r'^noise_source = "seed"',
            'noise_source = "system"',
            "from the system by settings.toml, and not",
        ),
        ("metrics.jsonl", r'"epsilon": [\d.]+', '"epsilon": 999.0', "metrics.jsonl says 999"),
    ],
)
def test_no_guarantee_is_shown_where_one_file_was_changed(run, tmp_path, file, pattern, text, problem):
    found = read_changed(run, tmp_path, file, pattern, text)
    assert found.promise is None
    assert any(problem in told and "no guarantee is shown" in told for told in found.problems), found.problems
    assert "no guarantee is on record" in warnings(found)


def test_rounds_that_are_gone_from_ledger_and_metrics_are_missed_by_the_card(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    for file in ("ledger.jsonl", "metrics.jsonl"):
        (copy / file).write_text("".join((copy / file).read_text().splitlines(keepends=True)[:-1]))
    (found,) = collect([copy]).runs
    assert found.promise is None
    assert any("lacks 1 of the rounds that the model's card covers" in told for told in found.problems)


def test_a_curve_below_what_was_charged_is_told_and_leaves_the_guarantee(run, tmp_path):
    found = read_changed(run, tmp_path, "metrics.jsonl", r'"epsilon": [\d.]+', '"epsilon": 0.001')
    assert found.promise is not None
    assert any("metrics.jsonl ends at epsilon 0.001" in told for told in found.problems)


def test_a_card_below_what_was_charged_is_told(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    with safe_open(copy / "model.safetensors", framework="numpy") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    card = json.loads(metadata["card"])
    card["guarantee"]["epsilon"] = 0.1
    save_file(tensors, copy / "model.safetensors", {**metadata, "card": json.dumps(card)})
    (found,) = collect([copy]).runs
    assert any("the model's card says epsilon 0.1" in told for told in found.problems)

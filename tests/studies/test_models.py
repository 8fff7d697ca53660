"""The table of models that were tried: what the script finds, and that the page has a line for each."""

import pytest
from samples import ROOT, load_script

models = load_script(ROOT / "studies" / "models.py")
CASES = {case.name: case for case in models.CASES}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("MLP", "stacks", ""),
        ("GRU (`nn.GRU`)", "stacks", ""),
        ("RNN (`nn.RNN`)", "trains one by one", "aten::rnn_tanh"),
        ("CNN with BatchNorm", "refused", "keeps running statistics of users' data"),
    ],
)
def test_a_model_stacks_trains_one_by_one_or_is_refused_with_a_reason(name, answer, words):
    row = models.tried(CASES[name])
    assert (row.name, row.answer) == (name, answer)
    assert words in row.words


def test_the_page_has_a_line_for_every_model():
    lines = models.PAGE.read_text(encoding="utf-8").splitlines()
    told = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    assert told == ["model", "---", *CASES]

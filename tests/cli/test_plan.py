import json
import subprocess
import sys

import matplotlib.image
import pytest

from clipline.cli import planner

ASK = ["--users", "40000", "--cohort", "300", "--rounds", "150"]


@pytest.fixture
def ask(clipline):
    return lambda *arguments: clipline("plan", *arguments)


def test_a_plan_prints_and_speaks_json(ask):
    code, out, err = ask(*ASK, "--epsilon", "4")
    assert code == 0, err
    assert out.startswith("(epsilon 4.00, delta 8.67e-06)-DP for add-or-remove one user")
    code, out, _ = ask(*ASK, "--epsilon", "4", "--json")
    answer = json.loads(out)
    for key in ("epsilon", "delta", "noise_multiplier", "delta_noise_multiplier", "count_stddev", "cohort", "users"):
        assert answer[key] > 0
    assert (answer["sampling"], answer["relation"], answer["rounds"]) == ("poisson", "add-or-remove", 150)


def test_the_papers_convention_comes_with_a_warning(ask):
    code, out, _ = ask(
        "--users", "1000000", "--rounds", "1500", "--epsilon", "5", "--scale", "m=100,z=0.1", "--sampling", "fixed",
        "--relation", "paper",
    )  # fmt: skip
    assert code == 0
    assert out.startswith("WARNING, not a guarantee")
    assert "513 exactly" in out


def test_a_training_file_is_a_question_too(ask, tmp_path):
    (tmp_path / "t.toml").write_text("users = 40000\ncohort = 300\nrounds = 150\nepsilon = 4.0\nserver_lr = 0.5\n")
    _, by_file, _ = ask("--config", "t.toml", "--json")
    _, by_flags, _ = ask(*ASK, "--epsilon", "4", "--json")
    assert json.loads(by_file) == json.loads(by_flags)
    _, out, _ = ask("--config", "t.toml", "--noise-multiplier", "1.0", "--json")
    assert json.loads(out)["found"] == "epsilon"


def test_the_plan_of_a_training_names_the_relation_that_the_training_will_name(ask, tmp_path):
    file = tmp_path / "t.toml"
    plan = "cohort = 300\nrounds = 150\nepsilon = 4.0\n"

    def planned(text, *flags):
        file.write_text(plan + text)
        code, out, err = ask("--config", "t.toml", "--json", *flags)
        assert code == 0, err
        return json.loads(out)["users"], json.loads(out)["relation"]

    assert planned("users = 40000\n") == (40_000, "add-or-remove")
    assert planned('users = 40000\ndata = "stand-in"\n') == (40_000, "add-or-remove")
    assert planned('users = 40000\ndata = "store"\n') == (40_000, "zero-out")
    assert planned('users = 40000\ndata = "store"\n', "--relation", "replace-one") == (40_000, "replace-one")
    assert planned('users = 40000\ndata = "store"\n', "--sampling", "fixed") == (40_000, "replace-one")
    assert planned('population_size = 50000\ndata = "store"\n') == (50_000, "add-or-remove")
    assert planned("users = 40000\npopulation_size = 50000\n") == (50_000, "add-or-remove")


def test_a_plan_says_that_its_users_are_declared_where_that_matters(ask):
    _, out, _ = ask(*ASK, "--epsilon", "4")
    assert "users             40,000 declared beforehand; counted in the data instead, the same epsilon" in out
    for flags in (["--relation", "zero-out"], ["--sampling", "fixed"]):
        assert "declared" not in ask(*ASK, "--noise-multiplier", "1", *flags)[1]


def test_a_plot_is_drawn_once(ask, tmp_path):
    code, _, err = ask(*ASK, "--noise-multiplier", "1", "--plot", "p.png")
    assert code == 0, err
    assert matplotlib.image.imread(tmp_path / "p.png").std() > 0.02
    code, _, err = ask(*ASK, "--noise-multiplier", "1", "--plot", "p.png")
    assert code == 2
    assert "plot='p.png' must be a new file" in err


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_plan_that_costs_nothing_beyond_its_delta_is_printed(ask, sampling):
    # One round moves the sum by at most 1/100 of its noise: the distributions are never 0.5 apart, so epsilon is 0.
    asked = ["--users", 1000, "--cohort", 5, "--rounds", 1, "--noise-multiplier", 100, "--delta", 0.5]
    code, out, err = ask(*asked, "--sampling", sampling)
    assert (code, err) == (0, "")
    assert out.startswith("(epsilon 0, delta 0.5)-DP")
    code, out, _ = ask(*asked, "--sampling", sampling, "--json")
    assert json.loads(out)["epsilon"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cohort", "3"], "users is missing"),
        ([*ASK], "exactly one must be left out"),
        ([*ASK, "--epsilon", "4", "--count-stddev", "-5"], "count_stddev=-5.0"),
        ([*ASK, "--epsilon", "4", "--plot", "x.abc"], "must be a new file that ends in .png"),
        ([*ASK, "--epsilon", "4", "--plot", "bad.toml/x.png"], "bad.toml"),
        ([*ASK, "--epsilon", "x"], "--epsilon"),
        (["--users", "100", "--rounds", "3", "--epsilon", "1", "--scale", "100x0.1"], "of the form m=100,z=0.03"),
        (["--config", "bad.toml"], "unknown key 'chort': did you mean 'cohort'?"),
        ([*ASK, "--config", "digits.toml"], "epsilon='a number of too many digits'"),
        (["--users", "1" + "0" * 24, *ASK[2:], "--epsilon", "4"], "users='a number of too many digits'"),
    ],
)
def test_bad_questions_get_one_sentence(ask, tmp_path, arguments, words):
    (tmp_path / "bad.toml").write_text("chort = 3\n")
    (tmp_path / "digits.toml").write_text("epsilon = 1" + "0" * 24)
    code, _, err = ask(*arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_planning_needs_no_torch():
    code = (
        "import sys; sys.argv = ['clipline', 'plan', '--users', '1000', '--cohort', '10', '--rounds', '5', "
        "'--noise-multiplier', '1', '--json']\n"
        "from clipline.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'matplotlib', 'scipy') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


PLAIN = [
    [*ASK, "--epsilon", "4"],
    [*ASK, "--noise-multiplier", "1", "--json", "--delta", "1e-6"],
    ["--users", "40000", "--rounds", "90", "--epsilon", "2", "--scale", "m=20,z=0.2"],
    ["--users", "900", "--cohort", "9", "--noise-multiplier", "2.", "--epsilon", "3e0", "--sampling", "fixed"],
    [*ASK, "--noise-multiplier", "1", "--relation", "replace-one", "--count-stddev", "20"],
    [*ASK, "--relation", "nobody", "--epsilon", "4"],  # a mistake that typer does not see either
]


@pytest.mark.parametrize("arguments", PLAIN)
def test_a_plain_question_gets_the_same_answer_without_typer(ask, arguments, monkeypatch):
    assert planner._plain_question(["plan", *arguments]) is not None
    quickly = ask(*arguments)
    monkeypatch.setattr("clipline.cli.answered", lambda arguments: False)
    assert ask(*arguments) == quickly


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--help"], [*ASK, "--epsilon"], [*ASK, "--epsilon", "-1"], [*ASK, "--epsilon", "four"], ["3"],
        [*ASK, "--epsilon=4"], [*ASK, "--users", "3"], [*ASK, "--cohort", "1.5"], [*ASK, "--epsilom", "4"],
        ["--users", "٣"], ["--config", "t.toml"], [*ASK, "--plot", "p.png"], [*ASK, "--noise_multiplier", "1"],
    ],
)  # fmt: skip
def test_any_other_question_is_left_to_typer(arguments):
    assert planner._plain_question(["plan", *arguments]) is None
    assert planner._plain_question(["train", *arguments]) is None


def test_a_plain_question_starts_neither_typer_nor_torch():
    code = (
        "import sys; from clipline.cli import main; main(); print([m for m in ('typer', 'torch') if m in sys.modules])"
    )
    asked = [sys.executable, "-c", code, "plan", *ASK, "--noise-multiplier", "1"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"

import inspect
import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from samples import CommandLine

import clipline
from clipline.cli.plan import ASKED
from clipline.data.store import write_store
from clipline.settings import SETTINGS

ASK = ["--population-size", "40000", "--cohort-size", "300", "--rounds", "150"]


@pytest.fixture
def ask(clipline):
    return CommandLine(clipline, "plan")


def test_a_plan_prints_and_speaks_json(ask):
    out, _ = ask.ok(*ASK, "--epsilon", "4")
    assert out.startswith("(epsilon 4.00, delta 8.67e-06)-DP for add-or-remove one user")
    out, _ = ask.ok(*ASK, "--epsilon", "4", "--json")
    answer = json.loads(out)
    for key in ("epsilon", "delta", "noise_multiplier", "delta_noise_multiplier", "count_stddev", "cohort_size",
                "population_size"):  # fmt: skip
        assert answer[key] > 0
    assert (answer["sampling"], answer["relation"], answer["rounds"]) == ("poisson", "add-or-remove", 150)


def test_the_papers_convention_comes_with_a_warning(ask):
    out, _ = ask.ok(
        "--population-size", "1000000", "--rounds", "1500", "--epsilon", "5", "--scale", "m=100,z=0.1", "--sampling",
        "fixed", "--relation", "paper",
    )  # fmt: skip
    assert out.startswith("WARNING, not a guarantee")
    assert "513 exactly" in out


def test_a_warning_is_one_sentence_without_a_place_in_the_code():
    command = [sys.executable, "-m", "clipline", "plan", *ASK, "--epsilon", "4", "--delta", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("warning: delta=0.01 is above 1 / (number of users)")
    assert ".py" not in done.stderr


def test_the_plan_of_a_training_names_the_relation_that_the_training_will_name(ask, tmp_path):
    file = tmp_path / "t.toml"
    plan = "cohort_size = 3\nrounds = 15\nepsilon = 4.0\n"
    write_store(tmp_path / "both" / "train", [(np.arange(40), {"x": np.zeros(40)})], source="by hand")
    write_store(tmp_path / "one", [(np.arange(50), {"x": np.zeros(50)})], source="by hand")

    def planned(text, *flags):
        file.write_text(plan + text)
        out, _ = ask.ok("--config", "t.toml", "--json", *flags)
        return json.loads(out)["population_size"], json.loads(out)["relation"]

    assert planned("population_size = 400\n") == (400, "add-or-remove")
    assert planned('population_size = 400\ndata = "stand-in"\n') == (400, "add-or-remove")
    assert planned('data = "both"\n') == (40, "zero-out")  # as many as the store has, and the training counts them
    assert planned('data = "one"\n') == (50, "zero-out")
    assert planned('data = "both"\n', "--relation", "replace-one") == (40, "replace-one")
    assert planned('data = "both"\n', "--sampling", "fixed") == (40, "replace-one")
    assert planned('population_size = 500\ndata = "both"\n') == (500, "add-or-remove")
    assert planned('population_size = 400\ndata = "both"\n', "--population-size", "500") == (500, "add-or-remove")
    file.write_text(plan + 'data = "nowhere"\n')
    assert "'nowhere' holds no population.json" in ask.refused("--config", "t.toml")


def test_a_plot_is_drawn_once(ask, tmp_path):
    ask.ok(*ASK, "--noise-multiplier", "1", "--plot", "p.png")
    assert matplotlib.image.imread(tmp_path / "p.png").std() > 0.02
    assert "--plot 'p.png' must be a new file" in ask.refused(*ASK, "--noise-multiplier", "1", "--plot", "p.png")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cohort-size", "3"], "population_size is missing: give --population-size"),
        ([*ASK], "exactly one must be left out"),
        (["--users", "100"], "or epsilon alone for a table"),
        ([*ASK, "--epsilon", "4", "--plot", "x.abc"], "must be a new file that ends in .png"),
        (["--users", "100", "--rounds", "3", "--epsilon", "1", "--scale", "100x0.1"], "of the form m=100,z=0.03"),
        (["--users", "9", "--epsilon", "3", "--plot", "x.png"], "give --cohort-size and --rounds for one plan"),
        ([*ASK, "--epsilon", "4", "--parameters", "1", "--model", "so_lr"], "left out with --model 'so_lr'"),
        ([*ASK, "--epsilon", "4", "--model", "so_r"], "did you mean 'so_lr'?"),
        (["--config", "bad.toml"], "unknown key 'chort_size': did you mean 'cohort_size'?"),
        (["--users", "1" + "0" * 24, *ASK[2:], "--epsilon", "4"], "population_size='a number of too many digits'"),
    ],
)
def test_bad_questions_get_one_sentence(ask, tmp_path, arguments, words):
    (tmp_path / "bad.toml").write_text("chort_size = 3\n")
    err = ask.refused(*arguments)
    assert words in err
    assert "Traceback" not in err


def test_the_flags_of_a_plan_are_the_keywords_of_the_function():
    keywords = inspect.signature(clipline.plan).parameters
    assert [*ASKED, "parameters", "scale"] == list(keywords)
    assert keywords["sampling"].default == SETTINGS["sampling"].default


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["plan", *ASK, "--noise-multiplier", "1"],
        ["plan", *ASK, "--noise-multiplier=1", "--json"],
        ["plan", *ASK[:4], "--rounds", "9", "--epsilon", "3", "--model", "emnist_cr"],
        ["tasks"],
        ["data", "list"],
    ],
)
def test_what_needs_no_training_starts_without_torch_rich_and_scipy(arguments):
    code = (
        "import sys; from clipline.cli import main; main()\n"
        "print([m for m in ('torch', 'rich', 'scipy', 'matplotlib', 'h5py', 'pyarrow') if m in sys.modules])"
    )
    asked = [sys.executable, "-c", code, *arguments]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"


def test_users_and_epsilon_alone_give_a_table(ask):
    out, _ = ask.ok("--population-size", 500, "--epsilon", 3)
    assert out.startswith("(epsilon 3.00, delta 0.00108) for add-or-remove one user, Poisson sampling, 500 users")
    for words in ("bands of the noise", "  200 ", "3,000 rounds", "most parameters", "--noise banded"):
        assert words in out
    assert max(len(line) for line in out.splitlines() if line.startswith("    ")) <= 80
    answer = json.loads(ask("--population-size", 20_000, "--epsilon", 3, "--rounds", 300, "--json")[1])
    assert [cell["cohort_size"] for cell in answer["table"]] == [200, 500, 1000, 2000, 5000, 10_000]
    assert {cell["rounds"] for cell in answer["table"]} == {300}
    # The exact noise at one of them, which the other command finds.
    exact = json.loads(
        ask("--users", 20_000, "--epsilon", 3, "--rounds", 300, "--cohort-size", 500, "--noise", "banded", "--json")[1]
    )
    assert exact["bands"] == answer["table"][1]["bands"] == 6
    assert exact["noise_multiplier"] <= answer["table"][1]["noise_multiplier"] <= 1.002 * exact["noise_multiplier"]


def test_a_model_gets_a_verdict_and_what_would_help(ask):
    asked = ["--population-size", 20_000, "--epsilon", 3, "--cohort-size", 500, "--rounds", 1000]
    out, _ = ask.ok(*asked, "--parameters", "1206590")
    assert "hopeless: the noise is 2.9 times the longest possible mean update" in out
    answer = json.loads(ask(*asked, "--model", "emnist_cr", "--json")[1])
    assert (answer["parameters"], answer["verdict"]) == (1_206_590, "hopeless")
    # By hand: the noise on the mean is its multiplier over 500 users, times sqrt(1,206,590) = 1098.45.
    assert answer["noise_norm"] == pytest.approx(answer["delta_noise_multiplier"] / 500 * 1098.45, rel=1e-5)
    fewer = answer["remedies"]["parameters"]
    assert json.loads(ask(*asked, "--parameters", str(fewer), "--json")[1])["verdict"] == "feasible"
    assert json.loads(ask(*asked, "--parameters", str(fewer + 10), "--json")[1])["verdict"] == "doubtful"


def test_the_parameters_of_a_file_are_counted_and_its_adapters_too(ask, tmp_path):
    (tmp_path / "m.py").write_text(
        "from torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))\n"
    )
    asked = ["--population-size", 20_000, "--epsilon", 3, "--cohort-size", 500, "--rounds", 1000]
    answer = json.loads(ask(*asked, "--model", "m.py", "--json")[1])
    assert answer["parameters"] == 1000 * 1000 + 1000 + 1000 * 10 + 10
    # A rank trains 1000 + 1000 and 10 + 1000 numbers; 5 is the most that spares a matrix of 10 rows anything.
    assert (answer["remedies"]["adapter_rank"], answer["remedies"]["adapter_parameters"]) == (5, 5 * 3010)
    assert "of rank 5 on its 2 matrices" in ask(*asked, "--model", "m.py")[1]
    # Of adapters on a frozen model only these count, and no adapters on adapters are proposed.
    (tmp_path / "m.py").write_text(
        "from torch import nn\ndef model():\n    model = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 2))\n"
        "    model[0].requires_grad_(False)\n    return model\n"
    )
    asked = ["--population-size", 100, "--epsilon", 0.1, "--cohort-size", 2, "--rounds", 9]
    answer = json.loads(ask(*asked, "--model", "m.py", "--json")[1])
    assert (answer["parameters"], answer["verdict"]) == (16, "hopeless")
    assert answer["remedies"]["adapter_rank"] is None
    # What stays with its user gets no noise: of 7 x 2 weights and 2 biases the biases are left.
    with (tmp_path / "m.py").open("a") as file:
        file.write('PERSONAL = ["1.w*"]\n')
    assert json.loads(ask(*asked, "--model", "m.py", "--json")[1])["parameters"] == 2


def test_a_file_whose_model_cannot_be_counted_is_refused_in_a_sentence(ask, tmp_path):
    for text, words in (
        ("TASK = 3\n", "defines TASK, whose model depends on its data: give --parameters instead"),
        ("from torch import nn\ndef model():\n    return nn.ReLU()\n", "one with a parameter to train"),
    ):
        (tmp_path / "m.py").write_text(text)
        code, _, err = ask(*ASK, "--epsilon", "4", "--model", "m.py")
        assert (code, "Traceback" in err) == (2, False)
        assert words in err

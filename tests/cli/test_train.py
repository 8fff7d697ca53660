import json
import math
import os
import re
import shutil
import signal
import tomllib
from pathlib import Path

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file

from clipline import HopelessNoiseWarning
from clipline.privacy.accountant import account
from clipline.privacy.ledger import Ledger
from clipline.tasks.handwriting import HandwritingNet
from clipline.training.progress import Progress
from clipline.trust.verify import seal

SMALL = ["--population-size", "300", "--cohort-size", "30", "--rounds", "4", "--workers", "1"]
FILES = ["curves.png", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "report.html", "settings.toml"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_everything_that_a_reviewer_needs_and_a_summary_to_quote(clipline, real_curves, tmp_path):
    out, err = clipline.ok("train", *SMALL, "--noise-multiplier", "0.7", "--seed", 2**61, "--out", "run")
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == FILES
    metrics = lines(run / "metrics.jsonl")
    assert [line["round"] for line in metrics] == [0, 1, 2, 3]
    assert not any("seconds" in line for line in (run / "metrics.jsonl").read_text().splitlines())
    assert "accuracy" in metrics[-1]
    ledger = Ledger.read(run / "ledger.jsonl")
    assert ledger.rounds == 4
    again = account(ledger, delta=300**-1.1, relation="add-or-remove")
    assert again.epsilon == metrics[-1]["epsilon"]  # to the last digit
    model = HandwritingNet(10)
    model.load_state_dict(load_file(run / "model.safetensors"))
    assert torch.isfinite(model(torch.zeros(1, 28, 28))).all()
    assert matplotlib.image.imread(run / "curves.png").shape[2] == 4
    text = (run / "settings.toml").read_text()
    settings = tomllib.loads(text)
    assert (settings["population_size"], settings["noise_multiplier"], settings["task"]) == (300, 0.7, "handwriting")
    assert "# count_stddev = 3.8614" in text  # resolved: 30 / 20 would cost 2.8% of noise, this costs 0.4%
    assert "# delta_noise_multiplier = 0.70289" in text  # (0.7^-2 - (2 * 3.8614)^-2)^(-1/2)
    for words in ("accuracy 0.", "(epsilon ", "delta 0.00", "add-or-remove one user", "Poisson", "4 rounds", "run"):
        assert words in out
    said = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("warning: "))
    assert said["result"].endswith(" on users outside the training population")
    assert "follow it with  clipline report --live run\n" in err.split("round ")[0]  # before the first round
    assert "round 4/4" in err  # progress is on standard error
    assert "round 4/4" not in out
    assert said["seal"].startswith(seal(run))
    assert seal(run) in (run / "report.html").read_text()
    assert said["report"] == str(Path("run") / "report.html")
    # What is stored trains the same model again.
    clipline("train", "--config", "run/settings.toml", "--no-report", "--out", "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    # The next training stops before it passes what two of these four rounds cost.
    limit = metrics[1]["epsilon"]
    code, out, _ = clipline("train", *SMALL, "--noise-multiplier", "0.7", "--max-epsilon", limit, "--json")
    answer = json.loads(out.splitlines()[-1])
    assert (code, answer["stopped"], answer["rounds"], answer["epsilon"]) == (0, "budget", 2, limit)


def test_without_a_seed_the_noise_is_the_systems_and_a_seed_for_it_has_to_be_given(clipline, tmp_path):
    flags = [*SMALL[:4], "--rounds", "1", "--noise-multiplier", "0.7", "--no-report"]
    out, _ = clipline.ok("train", *flags, "--out", "r")
    assert "seed" not in out
    settings = tomllib.loads((tmp_path / "r" / "settings.toml").read_text())
    assert settings["noise_source"] == "system"
    assert "resume.key" not in [path.name for path in (tmp_path / "r").iterdir()]
    err = clipline.refused("train", *flags, "--noise-source", "seed", "--out", "s")
    assert "seed is missing, from which --noise-source 'seed' draws: give --seed 7, or leave --noise-source out" in err


def test_json_is_the_last_line_of_standard_output(clipline, tmp_path):
    out, _ = clipline.ok("train", *SMALL, "--sampling", "fixed", "--epsilon", "6", "--delta", "1e-3", "--json")
    answer = json.loads(out.splitlines()[-1])
    for key in ("task", "metric", "metric_name", "epsilon", "delta", "relation", "sampler", "accountant", "rounds"):
        assert key in answer
    assert (answer["task"], answer["metric_name"], answer["rounds"]) == ("handwriting", "accuracy", 4)
    assert (answer["relation"], answer["sampler"], answer["population_size"]) == ("replace-one", "fixed", 300)
    assert 5.9 < answer["epsilon"] <= 6
    assert (answer["delta"], answer["stopped"], answer["users"]) == (1e-3, "finished", 300)
    run = Path(answer["run_dir"])
    assert run.parent == Path("runs")
    assert run.name.startswith("handwriting-")
    assert answer["report"] == str(run / "report.html")
    # Everybody is above the first clip, 0.0035: it grows by e^(0.2 * 0.5) a round, but for the noise on the fraction.
    assert answer["clip"] == pytest.approx(0.0035 * math.exp(4 * 0.1), rel=0.5)
    assert answer["clip"] == lines(run / "metrics.jsonl")[-1]["clip"]  # the one that the last round used
    assert answer["private"] is True
    assert answer["seed"] is None  # a secret, and what programs print is kept in logs
    assert "seconds" not in out
    assert "seconds" not in (tmp_path / run / "metrics.jsonl").read_text()


def test_a_training_that_fails_says_so_before_and_after_and_on_its_report(clipline, tmp_path):
    out, err = clipline.ok("train", *SMALL, "--noise-multiplier", "0.3", "--seed", 2**61, "--out", "r")
    assert re.search(r"^server rate 1 may have to be lower: .* The noise here is 0\.7\d clips\.$", err, re.MULTILINE)
    # 5,994 parameters: 0.3 / 30 * sqrt(5994) = 0.774 clips, and a little more for the count
    assert re.search(
        r"^can it train\?  feasible: the noise is 0\.7\d times the longest possible mean", err, re.MULTILINE
    )
    first, *warned = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert out.startswith("".join(f"{line}\n" for line in [first, *warned]) + "result ")  # above it
    assert re.match(r"warning: accuracy is 0\.\d+, (no|hardly) better than 0\.1\d+ without a model\.", first)
    assert ["warning: The clip has not arrived: it went from 0.0035 to 0.00" in line for line in warned] == [True]
    assert "best accuracy" not in out  # it is the last
    data = json.loads(
        re.search(r'id="data">(.*?)</script>', (tmp_path / "r" / "report.html").read_text(), re.DOTALL)[1]
    )
    assert [f"warning: {entry['text']}" for entry in data["failures"]] == [first, *warned]
    assert data["runs"][0]["best_and_last"]["last_rounds"] == 4
    code, checked, _ = clipline("study", "check", "r")
    assert (code, checked.count("  warning: ")) == (0, 2)
    with pytest.warns(HopelessNoiseWarning, match=r"^The training is hopeless: the noise is 7\.[89]"):
        _, out, err = clipline("train", *SMALL, "--noise-multiplier", "3", "--json", "--no-report", "--out", "h")
    assert "can it train?" not in err
    assert "hopeless_noise" in [one["kind"] for one in json.loads(out.splitlines()[-1])["findings"]]


def test_early_stopping_gives_the_best_model_and_charges_all_rounds(clipline, tmp_path):
    flags = ["--noise-multiplier", "3", "--evaluate-every", "1", "--rounds", "60", "--early-stopping", "accuracy"]
    out, _ = clipline.ok("train", *SMALL, *flags, "--seed", 2**61, "--out", "r", "--json")
    answer = json.loads(out.splitlines()[-1])
    done = len(lines(tmp_path / "r" / "metrics.jsonl"))
    assert (answer["stopped"], answer["rounds"], done < 60) == ("early", 60, True)
    assert (answer["model_rounds"], answer["best"]["last_rounds"]) == (done - 5, done)  # patience
    assert answer["metric"] == answer["best"]["best"]
    code, _, err = clipline("train", *SMALL, "--early-stopping", "acuracy", "--out", "x")
    assert (code, "--early-stopping 'acuracy' must be one of accuracy" in err) == (2, True), err
    assert not (tmp_path / "x").exists()
    code, checked, _ = clipline("study", "check", "r")
    assert (code, f"stopped early: {done} of 60 rounds, of which all are charged" in checked) == (0, True)
    code, _, err = clipline("train", "--resume", "r")
    assert (code, "is a finished run" in err) == (2, True)


def test_event_files_on_request_and_no_report_on_request(clipline, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    out, _ = clipline.ok("train", *SMALL, "--noise-multiplier", "0.7", "--tensorboard", "--no-report", "--out", "r")
    assert "report" not in out
    events = [path.name for path in (tmp_path / "r").iterdir() if path.name not in FILES]
    assert len(events) == 1
    assert events[0].startswith("events.out.tfevents.")
    assert not (tmp_path / "r" / "report.html").exists()


def test_times_of_rounds_are_stored_on_request_and_the_settings_show_it(clipline, tmp_path):
    flags = [*SMALL[:4], "--rounds", "1", "--workers", "1", "--noise-multiplier", "0.7", "--no-report"]
    clipline.ok("train", *flags, "--unprivate-timing", "--out", "timed")
    assert all(line["unprivate_seconds"] > 0 for line in lines(tmp_path / "timed" / "metrics.jsonl"))
    assert tomllib.loads((tmp_path / "timed" / "settings.toml").read_text())["unprivate_timing"] is True


def test_without_noise_it_says_not_private_everywhere(clipline, tmp_path):
    code, out, err = clipline("train", *SMALL, "--noise-multiplier", "0", "--clip", "none", "--json", "--out", "run")
    answer = json.loads(out.splitlines()[-1])
    assert (code, answer["epsilon"], answer["private"]) == (0, None, False)
    assert "not private" in answer["guarantee"]
    assert "not private" in err
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["epsilon"] is None


def interrupted_after(rounds):
    """What to put in the place of `Progress.on_round`: Ctrl-C after so many rounds."""

    def show(self, report, state):
        if report.round_index == rounds - 1:
            os.kill(os.getpid(), signal.SIGINT)

    return show


def test_an_interrupted_run_resumes_to_the_same_model_with_any_number_of_workers(clipline, tmp_path, monkeypatch):
    flags = [*SMALL[:4], "--rounds", "6", "--noise-multiplier", "0.7", "--seed", "1", "--workers", "1"]
    _, _, err = clipline("train", *flags, "--out", "whole")
    assert "training 6 rounds on 300 users for (epsilon" in err
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "on_round", interrupted_after(3))
        code, out, _ = clipline("train", *flags, "--out", "part")
    assert code == 130  # so that what follows in a script does not take it for a finished one
    assert "\nresume     clipline train --resume part\n" in out
    assert "\nplanned    (epsilon " in out
    assert Ledger.read(tmp_path / "part" / "ledger.jsonl").rounds == 3
    assert '"state":"interrupted"' in (tmp_path / "part" / "report.html").read_text()
    shutil.copytree(tmp_path / "part", tmp_path / "shared")
    clipline.ok("train", "--resume", "part")
    whole, part = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    for name in ("ledger.jsonl", "settings.toml"):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "part" / name).read_text()
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == FILES
    code, _, err = clipline("train", "--resume", "part")
    assert (code, "is a finished run" in err) == (2, True)
    _, err = clipline.ok("train", "--resume", "shared", "--workers", "2")
    assert "training 6 rounds on 300 users by 2 workers for (epsilon" in err
    assert Ledger.read(tmp_path / "shared" / "ledger.jsonl").rounds == 6
    shared = load_file(tmp_path / "shared" / "model.safetensors")
    assert all((whole[name] - shared[name]).norm() <= 1e-5 * whole[name].norm() for name in whole)


def test_a_folder_in_which_another_process_is_at_work_is_refused_and_stays_as_it_was(clipline, tmp_path):
    from clipline.training.durable import DirectoryLock

    (tmp_path / "run").mkdir()
    with DirectoryLock(tmp_path / "run"):
        for flags in (["--noise-multiplier", "0", "--out", "run"], ["--resume", "run"]):
            code, out, err = clipline("train", *(SMALL if "--out" in flags else []), *flags)
            assert (code, out) == (2, "")
            assert "another process is at work there: wait until it has ended, or stop it" in err.splitlines()[-1]
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--population-size", "20"], "--cohort-size 30 must be at most the population, 20 users"),
        (["--relation", "add-or-remove", "--sampling", "fixed"], "--relation 'add-or-remove' must be replace-one or"),
        (["final.toml"], "or FILE.py: give settings as --config final.toml"),
        (["handwritting"], "emnist_cr, shakespeare, so_lr, so_nwp: did you mean 'handwriting'?"),
        (["--epsilon", "2", "--noise-multiplier", "1"], "one follows from the other"),
        (
            ["--clip", "quantil"],
            "--clip 'quantil' must be one of quantile, fixed, none or a number: did you mean 'quan",
        ),
        (["--clip", "none"], "clip=inf must be finite where noise is added"),
        (["--device", "gpu"], "--device 'gpu' must be auto, cpu or cuda: did you mean 'cuda'?"),
        (["--config", "missing.toml"], "--config 'missing.toml' does not exist"),
        (["--config", "bad.toml"], "config 'bad.toml' has the unknown key 'ronds': did you mean 'rounds'?"),
        (["--config", "broken.toml"], "cannot be read as TOML"),
        (
            ["--noise-multiplier", "9", "--count-stddev", "1"],
            "raise --count-stddev or --cohort-size, or lower --noise-mul",
        ),
        (["--out", "bad.toml/x"], "bad.toml"),
        (["--resume", "nowhere"], "does not exist"),
    ],
)
def test_bad_input_is_one_sentence_exit_code_2_and_no_directory(clipline, tmp_path, arguments, words):
    (tmp_path / "bad.toml").write_text("ronds = 3\n")
    (tmp_path / "broken.toml").write_text("rounds = = 3\n")
    before = sorted(tmp_path.rglob("*"))
    base = [] if arguments[0] == "--resume" else ["--population-size", "300", "--cohort-size", "30", "--rounds", "2"]
    out = [] if arguments[0] in ("--out", "--resume") else ["--out", "new"]
    err = clipline.refused("train", *base, *out, *arguments)
    last = err.splitlines()[-1]
    assert words in last
    assert last.startswith("error: ")
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


def test_help_is_there_for_everything(clipline):
    out, _ = clipline.ok("--help")
    assert "train" in out
    assert "reproduce" in out
    code, out, _ = clipline("train", "-h")
    assert (code, out) == clipline("train", "--help")[:2]
    assert out.count("\n  --") <= 13  # those of a first week
    assert "--help-all" in out
    assert "--sampling" not in out
    code, out, _ = clipline("train", "--help-all")
    for flag in ("--config", "--rounds", "--cohort-size", "--sampling", "--clip", "--quantile", "--noise-multiplier",
                 "--epsilon", "--delta", "--seed", "--out", "--device", "--workers", "--unprivate-timing",
                 "--json"):  # fmt: skip
        assert flag in out
    code, out, _ = clipline("--version")
    assert out.strip() == "clipline 0.1.0"


def test_a_seed_that_is_easily_guessed_is_not_private_wherever_one_looks(clipline):
    few = [*SMALL[:4], "--rounds", "2", "--workers", "1", "--noise-multiplier", "0.9", "--seed", "7"]
    out, _ = clipline.ok("train", *few, "--out", "guessed")
    assert "not private: cohorts and noise come from seed 7, which is easily guessed" in out
    code, _, err = clipline("study", "check", "guessed")
    assert code == 1
    assert err.startswith("not private: the seed of its noise is known or easily guessed")
    code, out, _ = clipline("train", *few, "--noise-source", "system", "--json", "--out", "system")
    answer = json.loads(out.splitlines()[-1])
    assert (code, answer["private"], answer["seed"]) == (0, True, None)  # another run may have the same seed
    assert clipline("study", "check", "system")[0] == 0


def test_a_run_that_a_program_made_is_resumed_by_that_program(clipline, tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "settings.toml").write_text("rounds = 4\n[local]\nlr = 0.1\n")
    err = clipline.refused("train", "--resume", "made")
    assert "was made by a program" in err
    assert "training.resume('made')" in err

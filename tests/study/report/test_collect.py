import math
import re

import pytest
from oracle_rows import gaussian_epsilon
from reported_runs import add_rounds, end_run, write_record, write_run
from samples import small_training

from clipline import EarlyStopping, Evaluate, RunDirectory
from clipline.errors import RunError
from clipline.study.report.content import content, warnings, words
from clipline.study.report.reading import collect


def test_a_run_is_read_with_its_settings_facts_circumstances_and_curves(tmp_path):
    end_run(write_run(tmp_path / "r"))
    (run,) = collect([tmp_path / "r"]).runs
    assert (run.name, run.task, run.state, run.clip, run.target) == ("r", "rides", "finished", "quantile 0.5", 0.5)
    assert list(run.round) == list(range(1, 21))
    assert run.metrics == ["accuracy"]
    assert run.final == {"accuracy": pytest.approx(1 - 0.9**20)}
    assert run.circumstances == {"clipline": "0.1.0", "torch": "2.13.0", "machine": "Linux x86_64, 2 cores"}
    assert run.about["data"] == "own"
    assert run.problems == []


def test_epsilon_is_that_of_the_ledger_and_not_of_the_last_metrics(tmp_path):
    write_run(tmp_path / "r", rounds=9)
    with (tmp_path / "r" / "ledger.jsonl").open("a") as ledger:  # charged, and then the machine crashed
        ledger.write('{"version": 1, "round": 9, "sampling": "none", "noise_multiplier": 1.0}\n')
    (run,) = collect([tmp_path / "r"]).runs
    assert run.promise.rounds == 10
    assert run.promise.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(10), 1e-5), rel=1e-3)
    assert run.promise.epsilon >= gaussian_epsilon(math.sqrt(10), 1e-5) - 1e-6


def test_the_files_of_an_honest_run_agree_and_without_that_no_guarantee_is_shown(tmp_path):
    """What else is compared: tests/trust/test_verify.py."""
    small_training(4).run([RunDirectory(tmp_path / "r")])
    (run,) = collect([tmp_path / "r"]).runs
    assert (run.problems, words(run)) == ([], str(small_training(4).planned))  # also that the noise comes from a seed
    ledger = tmp_path / "r" / "ledger.jsonl"
    ledger.write_text(re.sub(r'"noise_multiplier": [\d.]+', '"noise_multiplier": 5.0', ledger.read_text()))
    (run,) = collect([tmp_path / "r"]).runs
    assert run.promise is None
    assert any("noise multiplier of 5, settings.toml has" in told for told in run.problems)
    assert "no guarantee is on record" in warnings(run)


def test_a_run_that_stopped_by_what_it_measured_is_charged_all_planned_rounds(tmp_path):
    losses = iter(range(1, 9))
    worse = Evaluate(lambda model: {"loss": float(next(losses))}, every=1)
    stopping = EarlyStopping("loss", mode="min", patience=1)
    result = small_training(8).run([worse, stopping, RunDirectory(tmp_path / "r")])
    assert result.state.round_index < 8
    (run,) = collect([tmp_path / "r"]).runs
    assert run.promise.rounds == 8
    assert run.promise.epsilon == pytest.approx(result.guarantee.epsilon)


def test_states(tmp_path):
    run = write_run(tmp_path / "r", rounds=10)
    assert collect([run]).runs[0].state == "not ended"
    end_run(run)
    assert collect([run]).runs[0].state == "budget"  # 10 of 20 rounds
    (run / "checkpoint.safetensors").touch()
    assert collect([run]).runs[0].state == "interrupted"


def test_lines_that_are_cut_short_or_damaged_are_left_out(tmp_path):
    run = write_run(tmp_path / "r", rounds=3)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('no json\n[1]\n{"round": -1}\n{"round": 3, "clip": 0.')
    with (run / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"version": 1, "round": 3, "samp')
    (read,) = collect([run]).runs
    assert list(read.round) == [1, 2, 3]
    assert read.promise.rounds == 3  # a line that was never finished belongs to a round that was not released
    assert read.problems == ["3 of 6 lines of metrics.jsonl are damaged and left out"]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("ledger.jsonl", "{}\n", "ledger.jsonl cannot be read"),
        ("ledger.jsonl", "", "metrics.jsonl has 20 rounds and ledger.jsonl charges 0: no guarantee is shown"),
        ("settings.toml", "= broken", "settings.toml cannot be read"),
        ("settings.toml", "rounds = 20", "relation is not on record"),
    ],
)
def test_no_epsilon_is_shown_without_a_sound_ledger_and_its_terms(tmp_path, file, text, problem):
    run = write_run(tmp_path / "r")
    (run / file).write_text(text)
    (read,) = collect([run]).runs
    assert read.promise is None
    assert any(problem in told for told in read.problems)
    assert len(read.round) == 20
    assert "no guarantee is on record" in warnings(read)
    (shown,) = content(collect([run]))["runs"]
    assert (shown["private"], shown["epsilon"], "epsilon" in shown["released"]) == (False, None, False)


def test_a_study_is_read_and_a_damaged_record_is_named(tmp_path):
    write_record(tmp_path, 1, unprivate_quantile_0_5=[0.1] * 300)
    write_record(tmp_path, 2, outcome="diverged", z=0.1)
    changed = write_record(tmp_path, 3)
    changed.write_text(changed.read_text().replace('"finished"', '"diverged"'))
    found = collect([tmp_path])
    assert [run.state for run in found.runs] == ["finished", "diverged"]
    assert found.runs[0].noise_multiplier == 0.03
    assert "unprivate_seconds" not in found.runs[0].circumstances
    (problem,) = found.problems
    assert "was changed after it was written" in problem


def test_what_is_no_run_is_refused_with_what_was_looked_for(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        collect([tmp_path / "nothing"])
    with pytest.raises(RunError, match=r"holds no run.*metrics\.jsonl.*study\.json"):
        collect([tmp_path])


def test_a_round_that_was_run_again_counts_as_it_came_last(tmp_path):
    run = write_run(tmp_path / "r", rounds=3)
    add_rounds(run, 2, 3, clip=7.0)
    (run / "ledger.jsonl").write_text("".join((run / "ledger.jsonl").read_text().splitlines(keepends=True)[:3]))
    (read,) = collect([run]).runs
    assert list(read.round) == [1, 2, 3]
    assert read.columns["clip"][-1] == 7.0


def test_a_run_of_the_library_is_understood_too(tmp_path):
    run = write_run(tmp_path / "r")
    noise = "# noise_multiplier = 1.0\n# delta_noise_multiplier = 1.0\n"
    tables = '[clip]\ntype = "FixedClip"\nclip = 0.25\n[privacy]\nnoise_source = "system"\n[facts]\ntask = "mine"\n'
    (run / "settings.toml").write_text(f"rounds = 20\n{tables}# delta = 1e-05\n# relation = 'replace-one'\n{noise}")
    (read,) = collect([run]).runs
    assert (read.clip, read.target, read.task, read.setting("noise_source")) == ("fixed 0.25", None, "mine", "system")
    assert read.promise.relation == "replace-one"

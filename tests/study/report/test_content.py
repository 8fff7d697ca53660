from reported_runs import end_run, write_record, write_run

from clipline.study.report.content import content, drawn
from clipline.study.report.page import page
from clipline.study.report.reading import collect


def test_of_many_rounds_ends_extremes_and_evenly_spaced_ones_are_drawn():
    column = [0.0] * 1000
    column[501], column[777] = 9.0, -9.0
    kept = drawn(1000, [column, [None] * 1000], points=10)
    assert kept == [0, 111, 222, 333, 444, 501, 555, 666, 777, 888, 999]


def test_runs_of_a_study_that_differ_by_seed_alone_share_a_label(tmp_path):
    for number, (quantile, seed) in enumerate([(0.5, 0), (0.5, 1), (0.1, 0)]):
        write_record(tmp_path, number, quantile=quantile, seed=seed)
    labels = [run["label"] for run in content(collect([tmp_path]))["runs"]]
    assert labels == ["clip quantile 0.1", "clip quantile 0.5", "clip quantile 0.5"]


def test_an_epsilon_that_does_not_hold_is_void_and_has_no_curve(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=7)
    write_run(tmp_path / "c", z=0.0)
    made = content(collect([tmp_path]))
    assert [run["private"] for run in made["runs"]] == [True, False, False]
    assert ["epsilon" in run["released"] for run in made["runs"]] == [True, False, False]
    assert [len(run["reasons"]) for run in made["runs"]] == [0, 1, 1]
    good, guessed, silent = made["statements"]  # the words of the first two are the same, and one does not hold
    assert good["words"] == guessed["words"]
    assert (good["void"], silent["void"]) == ([], [])  # the last has no epsilon that could be struck through
    assert "can subtract the noise" in guessed["void"][0]
    text = page(made)
    assert f"<s>{guessed['words']}</s>" in text
    assert f"<p>a: {good['words']}</p>" in text


def test_equal_promises_are_stated_once(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", z=0.0)
    stated = content(collect([tmp_path]))["statements"]
    assert [entry["runs"] for entry in stated] == [["a", "b"], ["c"]]
    assert [entry["private"] for entry in stated] == [True, False]


def test_a_run_says_how_large_it_is_what_to_type_and_how_to_use_its_model(tmp_path):
    run = write_run(tmp_path / "a run", task='"rides.py"')
    made = content(collect([run]))
    assert made["scale"] == "20 rounds, 100 users a round, 100 users"
    assert (made["command"], made["use"]) == (f"clipline train rides.py --config '{run}/settings.toml'", [])  # no model
    end_run(run)
    assert content(collect([run]))["use"][1] == f"saved = clipline.load({str(run)!r}, 'rides.py')"
    (run / "checkpoint.safetensors").touch()
    assert content(collect([run]))["command"] == f"clipline train rides.py --resume '{run}'"
    assert content(collect([run, run.parent]))["command"] == f"clipline report '{run}' {tmp_path}"

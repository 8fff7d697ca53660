import json

import pytest
from samples import small_training

from clipline import Evaluate, RunDirectory


def run(*callbacks):
    evaluate = Evaluate(lambda model: {"accuracy": 0.25}, every=2)
    return small_training(3).run([evaluate, *callbacks])


def test_the_history_is_what_the_run_directory_has_as_columns(tmp_path):
    result = run(RunDirectory(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    columns = result.history()
    assert list(columns) == ["round", "clip", "fraction_within", "epsilon", "delta", "accuracy"]
    assert columns["accuracy"] == [None, 0.25, 0.25]  # after every second round and after the last
    for number, line in enumerate(lines):
        assert {name: column[number] for name, column in columns.items() if name in line} == line
    assert all(seconds > 0 for seconds in result.history(unprivate_timing=True)["unprivate_seconds"])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_the_history_makes_a_dataframe_in_one_call(library):
    frames = pytest.importorskip(library)
    frame = frames.DataFrame(run().history())
    assert frame.shape == (3, 6)
    assert list(frame["round"]) == [0, 1, 2]

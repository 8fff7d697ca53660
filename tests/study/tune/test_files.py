from concurrent.futures import ThreadPoolExecutor

import pytest

from clipline.errors import RunError
from clipline.privacy.planning import plan
from clipline.study.tune.answer import check_out, write_final

SETTINGS = {"population_size": 100_000, "cohort_size": 500, "rounds": 100, "noise_multiplier": 0.8}


def test_a_file_that_costs_more_than_was_asked_is_never_written(tmp_path):
    final = tmp_path / "final.toml"
    guarantee = write_final(final, SETTINGS, words="a word", epsilon=4.0)
    assert guarantee.epsilon == plan(**SETTINGS).guarantee.epsilon <= 4
    assert "# a word\n" in final.read_text(encoding="utf-8")
    before = final.read_text(encoding="utf-8")
    with pytest.raises(RunError, match="at most 4 was asked"):
        write_final(final, {**SETTINGS, "noise_multiplier": 0.3}, words="", epsilon=4.0)
    assert final.read_text(encoding="utf-8") == before
    assert [path.name for path in tmp_path.iterdir()] == ["final.toml"]


def test_a_folder_of_other_things_is_not_written_into(tmp_path):
    check_out(tmp_path)  # empty
    check_out(tmp_path / "new")
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunError, match="holds other files"):
        check_out(tmp_path)
    (tmp_path / "study.json").touch()
    check_out(tmp_path)
    (tmp_path / "just_begun" / "claims").mkdir(parents=True)  # by another process, or by one that was killed
    check_out(tmp_path / "just_begun")


def test_two_processes_that_end_at_once_both_write(tmp_path):
    def write(_):
        return write_final(tmp_path / "final.toml", SETTINGS, words="", epsilon=4.0).epsilon

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(write, range(12)))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["final.toml"]

"""Whole trainings against a peer: what is planned, how time is shared and estimated, and one that really runs."""

import json
import sys

import numpy as np
import pytest
from samples import ROOT

from clipline.data.store import write_store


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def whole():
    from trainings import whole

    return whole


@pytest.fixture
def store(tmp_path):
    """Tag prediction by four users of 1, 5, 0 and 2 posts."""
    users = np.repeat([0, 1, 3], [1, 5, 2])
    words, weights = np.full((8, 128), 10_000, np.int16), np.zeros((8, 128), np.float32)
    words[:, 0], weights[:, 0] = np.arange(8), 1
    fields = {"words": words, "weights": weights, "tags": np.arange(8, dtype=np.int16)[:, None]}
    for split in ("train", "test"):
        folder = tmp_path / "articles" / split
        write_store(folder, [(users, fields)], source="made up", tasks=("so_lr",), known_users=[2])
    return tmp_path / "articles"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--data", "made-up"], "'made-up' but must name some of real, even"),
        (["--tasks", "mnist"], "'mnist' but must name some of so_lr"),
        (["--systems", "fedjax"], "must name some of clipline, second, pfl"),
        (["--rounds", "1"], "--rounds 1 must be at least 2"),
        (["--budget", "0"], "--budget 0.0 must be at least 1"),
        (["--peer-precision", "bf16"], "--peer-precision bf16 needs --device cuda"),
    ],
)
def test_wrong_flags_are_refused_with_what_is_right(whole, flags, says, capsys):
    with pytest.raises(SystemExit):
        whole.arguments(flags)
    assert says in capsys.readouterr().err


def test_another_precision_of_either_side_is_another_measurement(whole, tmp_path):
    results = tmp_path / "results.jsonl"
    flags = ["--tasks", "so_lr", "--device", "cuda", "--rounds", "10", "--results", str(results)]
    done = {
        "kind": "training",
        "machine": "here",
        "task": "so_lr",
        "users": 100,
        "rounds": 10,
        "turn": 0,
        "data": "real",
    }
    lines = [{**done, "system": "clipline", "precision": "bf16"}, {**done, "system": "pfl"}]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def missing(*more):
        return [one.system for one in whole.plan(whole.arguments([*flags, *more]), "here")]

    assert missing("--precision", "bf16") == []
    assert missing("--precision", "bf16", "--peer-precision", "float32") == []  # its default
    assert missing("--precision", "bf16", "--peer-precision", "bf16") == ["pfl"]
    assert missing() == missing("--precision", "float32") == ["clipline"]


def test_only_what_is_missing_or_failed_is_measured_real_users_first(whole, tmp_path):
    results = tmp_path / "results.jsonl"
    wanted = whole.arguments(["--data", "even,real", "--tasks", "so_lr", "--results", str(results), "--rounds", "10"])
    done = {"kind": "training", "machine": "here", "task": "so_lr", "users": 100, "rounds": 10, "turn": 0}
    lines = [{**done, "data": "real", "system": "clipline"}, {**done, "data": "even", "system": "pfl", "failed": "why"}]
    lines.append({**done, "data": "even", "system": "clipline", "rounds": 9})  # another training
    results.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "trai')  # a line cut off
    left = [(one.data, one.system) for one in whole.plan(wanted, "here")]
    assert left == [("real", "pfl"), ("even", "clipline"), ("even", "pfl")]
    wanted.again = True
    assert len(whole.plan(wanted, "here")) == 4


def test_a_budget_is_shared_in_proportion_and_what_is_left_goes_to_the_rest(whole):
    """On a GPU so_lr wants 25 and 10: of 100 s the first gets 500 / 7; if it takes only 10 s, the second gets 90."""
    ours, pfl = (whole.Measurement("so_lr", "real", system, 100, 100, 0) for system in ("clipline", "pfl"))
    assert whole.share([ours, pfl], "cuda", 100) == pytest.approx(500 / 7)
    assert whole.share([pfl], "cuda", 90) == 90


def test_a_second_start_needs_the_first_in_the_same_command(whole, tmp_path):
    wanted, again = whole.arguments([]), whole.Measurement("so_lr", "real", "second", 100, 10, 0)
    assert "needs clipline before it" in whole.measure(again, wanted, 10, tmp_path)["failed"]


def marks(*at, result=None):
    lines = [{"at": x, "processor": x / 2, "round": number} for number, x in enumerate(at)]
    lines[0]["ready"] = "some system"
    del lines[0]["round"]
    return [*lines, *([] if result is None else [{"at": result, "processor": result / 2, "result": True}])]


def test_a_peer_is_estimated_by_batches_and_its_first_round_counts_once():
    """Started at 100, ready at 103; rounds of 4, 2 and 6 s with 5, 2 and 6 batches: 1 s a batch after the first.

    The process ended after 16 s. Of the five rounds 3 + 4 batches are missing: 16 + 7 = 23 s.
    """
    from trainings.process import summed, times_of

    found = {"wall_s": 16.0, **times_of(marks(103, 107, 109, 115, result=115.5), begun=100)}
    made = summed(found, "pfl", [5, 2, 6, 3, 4], threads=1)
    assert (made["seconds"], made["estimated"], made["rounds_done"]) == (23, True, 3)
    assert (made["start_s"], made["first_round_s"], made["later_round_s"]) == (3, 4, 4)
    assert made["usual_round_s"] == 4  # 20 batches in five rounds
    assert made["processor_seconds"] == 115.5 / 2 + 7 / 2


def test_what_we_were_not_given_time_for_is_estimated_by_the_later_half_of_the_rounds():
    """Ready after 3 s; rounds of 8, 2, 1 and 1 s, and ended in the fifth: 15 s, and six rounds of 1 s are missing."""
    from trainings.process import summed, times_of

    found = {"wall_s": 15.9, **times_of(marks(103, 111, 113, 114, 115), begun=100)}
    assert summed(found, "clipline", [7] * 10, None)["seconds"] == 21
    finished = {"wall_s": 15.9, **times_of(marks(103, 111, 113, 114, 115, result=115.2), begun=100)}
    made = summed(finished, "clipline", [7] * 4, None)
    assert (made["seconds"], made["estimated"]) == (15.9, False)
    assert "processor_seconds" not in made  # there may be workers


def test_a_process_is_ended_at_its_limit_and_keeps_the_rounds_that_it_did():
    from trainings.process import timed

    say = (
        "import json, time; t = lambda **k: print(json.dumps({'at': time.monotonic(), 'processor': 0} | k), flush=True)"
    )
    endless = f"{say}; t(ready='x'); t(round=1); t(round=2); time.sleep(60)"
    found = timed([sys.executable, "-c", endless], {}, limit=1)
    assert (found["rounds_done"], found["finished"]) == (2, False)
    assert "failed" not in found
    assert found["wall_s"] < 20
    early = timed([sys.executable, "-c", f"{say}; t(ready='x'); t(round=1); time.sleep(60)"], {}, limit=0.5)
    assert early["failed"].startswith("did ")
    broken = timed([sys.executable, "-c", "raise SystemExit('no such thing')"], {}, limit=20)
    assert broken["failed"] == "stopped with code 1: no such thing"


def test_even_users_are_as_many_on_the_same_rows_with_the_mean_of_the_examples(store):
    """1, 5, 0 and 2 posts: two each. Of at most three a user 1, 3, 0 and 2 are kept: the mean is 1.5, rounded down."""
    from trainings.users import StoredUsers, even_offsets

    offsets = np.array([0, 1, 6, 6, 8])
    assert even_offsets(offsets, None).tolist() == [0, 2, 4, 6, 8]
    assert even_offsets(offsets, 3).tolist() == [0, 1, 2, 3, 4]
    real = StoredUsers(store, even=False, max_examples=3)
    assert real.sizes().tolist() == [1, 3, 0, 2]
    assert real.fields(1)["words"][:, 0].tolist() == [1, 2, 3]
    assert StoredUsers(store, even=True, max_examples=None).fields(2)["words"][:, 0].tolist() == [4, 5]


def test_a_peer_is_given_the_users_whom_our_training_draws(store):
    from trainings.cohorts import cohorts_of
    from trainings.users import StoredUsers

    import clipline
    from clipline.training.loop import draws_of

    task = clipline.task_named("so_lr")
    settings = task.settings.overridden({"data": str(store), "cohort_size": 2, "rounds": 9, "seed": 5}, "the test")
    training = task.training(settings)
    draws = draws_of(training, until=9)
    ours = [draws.take(number)[0].users.tolist() for number in range(9)]
    draws.close()
    drawn = cohorts_of(StoredUsers(store, even=False, max_examples=None), 2, 9, batch_size=2, seed=5)
    batches = {0: 1, 1: 3, 3: 1}  # of 1, 5 and 2 posts, two at a time
    for ours_of_round, users, count in zip(ours, drawn.users, drawn.batches, strict=True):
        assert users == ([user for user in ours_of_round if user != 2] or [0])
        assert count == sum(batches[user] for user in users)


def test_a_whole_training_is_measured_and_written_down(whole, store, tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    flags = ["--data", "even", "--tasks", "so_lr,shakespeare", "--systems", "clipline", "--users", "2", "--rounds", "2"]
    flags += ["--stores", str(store.parent), "--shared", str(tmp_path), "--results", str(results), "--commit", "abc"]
    whole.main([*flags, "--threads", "1"])
    measured, missing = (json.loads(line) for line in results.read_text().splitlines())
    assert (measured["rounds_done"], measured["finished"], measured["estimated"]) == (2, True, False)
    assert measured["seconds"] >= measured["start_s"] + measured["first_round_s"] > 0
    assert (measured["commit"], measured["data"], measured["users"]) == ("abc", "even", 2)
    assert missing["failed"].startswith("has no data: neither ")
    assert "so_lr, even users, clipline" in capsys.readouterr().err


def test_a_second_start_asks_for_all_rounds_and_ends_after_a_few(whole, store, tmp_path, monkeypatch):
    """What is compiled depends on how many rounds there are: with a few it would find nothing of the first start's."""
    commands, wanted = [], whole.arguments(["--stores", str(store.parent), "--pfl-rounds", "2"])
    monkeypatch.setattr(whole, "timed", lambda command, *_: commands.append(command) or {"failed": "not run"})
    for system in ("clipline", "second"):
        whole.measure(whole.Measurement("so_lr", "real", system, 2, 5, 0), wanted, 10, tmp_path)
    first, second = commands
    assert first[first.index("--rounds") + 1] == second[second.index("--rounds") + 1] == "5"
    assert "--stop-after" not in first
    assert second[second.index("--stop-after") + 1] == "2"


def test_a_training_that_is_to_stop_early_does_so_many_rounds(whole, store, tmp_path):
    results = tmp_path / "results.jsonl"
    flags = ["--data", "real", "--tasks", "so_lr", "--systems", "clipline,second", "--users", "2", "--rounds", "5"]
    flags += ["--stores", str(store.parent), "--results", str(results), "--commit", "abc", "--pfl-rounds", "3"]
    whole.main([*flags, "--threads", "1"])
    first, second = (json.loads(line) for line in results.read_text().splitlines())
    assert (first["rounds_done"], first["estimated"]) == (5, False)
    assert (second["rounds_done"], second["finished"], second["estimated"]) == (3, False, True)

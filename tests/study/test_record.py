import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from study_task import tiny_task

from clipline.errors import RunError, SettingError
from clipline.study.record import COMPUTES, RunRecord, RunSpec, identity_of


def spec(**changes):
    return RunSpec(replace(tiny_task().settings, **changes))


def record(accuracies=(None, 0.5, None, 0.7), outcome="finished", **changes):
    parts = spec(rounds=4).parts("generated", "abc")
    columns = {
        "round": [0, 1, 2, 3],
        "clip": [0.1] * 4,
        "fraction_within": [0.0, 0.5, 0.5, 1.0],
        "accuracy": list(accuracies),
    }
    made = RunRecord(identity_of(parts), parts, outcome, columns, {"accuracy": accuracies[-1]}, None, {})
    return replace(made, **changes)


def test_an_identity_is_the_hash_of_the_canonical_text_of_its_parts():
    parts = {"b": [1, None], "a": {"y": 0.5, "x": "text"}}
    text = '{"a":{"x":"text","y":0.5},"b":[1,null]}'
    assert identity_of(parts) == hashlib.sha256(text.encode()).hexdigest()[:20]
    assert spec().identity("d", "c") == identity_of(spec().parts("d", "c"))
    assert spec().parts("d", None)["computes"] == COMPUTES  # the version of what computes


@pytest.mark.parametrize(
    "changes", [{"workers": 2}, {"device": "cuda"}, {"engine": "stacked"}, {"unprivate_timing": True}], ids=str
)
def test_what_changes_no_number_is_no_part_of_the_identity(changes):
    assert spec(**changes).identity("d") == spec().identity("d")


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1}, {"rounds": 7}, {"quantile": 0.51}, {"client_lr": 0.5001}, {"precision": "bf16"},
        {"evaluate_every": 3}, {"clip": 1.0}, {"noise_multiplier": 0.1}, {"population_size": 61}, {"delta": 1e-5},
    ],
    ids=str,
)  # fmt: skip
def test_what_decides_a_number_is_part_of_the_identity(changes):
    assert spec(**changes).identity("d") != spec().identity("d")


def test_settings_that_came_later_enter_where_they_are_set_so_that_older_records_keep_their_names():
    later = {"client_optimiser", "client_momentum", "client_weight_decay", "client_proximal"}
    assert not later & spec().parts("d", None)["settings"].keys()
    assert spec(client_momentum=0.5).parts("d", None)["settings"]["client_momentum"] == 0.5
    changed = [
        {"client_optimiser": "adam"}, {"client_momentum": 0.5}, {"client_lr_schedule": "cosine"},
        {"server_lr_schedule": "linear"}, {"client_clip_norm": 1.0}, {"client_proximal": 0.1},
    ]  # fmt: skip
    assert len({spec(**one).identity("d") for one in ({}, *changed)}) == 7


def test_data_code_and_what_is_recorded_are_part_of_the_identity():
    base = spec()
    ids = {base.identity("d"), base.identity("e"), base.identity("d", "code")}
    ids |= {replace(base, **more).identity("d") for more in ({"unprivate_quantiles": True}, {"evaluate_last": 5})}
    assert len(ids) == 5


def test_paths_are_no_part_of_the_identity():
    here, there = spec(task="/a/b/own.py"), spec(task="c/own.py")
    assert here.identity("d", "code") == there.identity("d", "code")
    text = json.dumps(spec(task="/a/b/own.py").parts("d", "code"))
    assert "/a" not in text
    assert str(Path.cwd()) not in text


def test_equal_numbers_have_one_form():
    assert spec(client_lr=1).identity("d") == spec(client_lr=1.0).identity("d")
    quarter = 10**0.25
    assert spec(client_lr=quarter).identity("d") == spec(client_lr=math.nextafter(quarter, 2)).identity("d")
    assert spec(clip=math.inf).identity("d") == spec(clip="none").identity("d")


def test_noise_that_nobody_can_draw_again_is_refused():
    with pytest.raises(SettingError, match="noise_source='system' must be 'seed' in a study"):
        spec(noise_source="system", noise_multiplier=1.0)


def test_a_diverged_run_is_worse_than_any_other():
    assert record(outcome="diverged").average("accuracy") == -math.inf
    assert record(outcome="diverged").average("mean_squared_error") == math.inf
    assert record(outcome="diverged").average("rmse") == math.inf


def test_a_record_survives_the_file():
    assert RunRecord.from_json(record().to_json()) == record()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0.7]", "0.8]", "was changed after it was written"),
        ('"seed": 0', '"seed": 1', "was changed after it was written"),
        ('"outcome"', '"outcomes"', "is no record of a run"),
        ("{", "[", "is no record of a run"),
    ],
)
def test_a_record_that_was_changed_is_refused(old, new, says):
    with pytest.raises(RunError, match=says):
        RunRecord.from_json(record().to_json().replace(old, new, 1), "'x.json'")


def test_a_record_under_another_id_or_with_ragged_columns_is_refused():
    with pytest.raises(RunError, match="has another identity than its id 0123"):
        RunRecord.from_json(record(id="0123").to_json())
    with pytest.raises(RunError, match="columns of different lengths"):
        RunRecord.from_json(record(rounds={"round": [0], "clip": [], "fraction_within": [0]}).to_json())

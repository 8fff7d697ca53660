"""The rules on made-up rounds. Distances are worked out by hand: at 100 users a round and no noise on the count, a mean
of w fractions is off by 0.05 / sqrt(w), and four times that is let pass."""

import pytest
from samples import StopAfter, small_training

from clipline import Evaluate, HopelessNoiseWarning, RunDirectory
from clipline.study.report.reading import read_run_directory
from clipline.training.diagnosis import Known, best_and_last, diagnose

KNOWN = Known(target=0.5, cohort_size=100, count_stddev=0.0)
# accuracy after every tenth round of `clipline train --population-size 3000 --cohort-size 100`, with the clip
RUNAWAY = [0.087, 0.113, 0.250, 0.489, 0.647, 0.661, 0.627, 0.512, 0.175, 0.094, 0.105, 0.099, 0.093, 0.099, 0.102]


def rounds(count=40, clip=lambda t: 0.5, within=lambda t: 0.5, accuracy=None, every=1, name="accuracy", **more):
    lines = [{"round": t, "clip": clip(t), "fraction_within": within(t)} for t in range(count)]
    for place, value in enumerate(accuracy or []):
        lines[(place + 1) * every - 1] |= {name: value, **more}
    return lines


def kinds(lines, known=KNOWN):
    return [one.kind for one in diagnose(lines, known)]


def test_a_flat_training_at_its_target_gets_no_sentence():
    assert kinds(rounds()) == []
    assert kinds(rounds(accuracy=[0.5, 0.8, 0.9, 0.92], every=10)) == []


def test_a_clip_is_away_from_its_target_beyond_a_fifth_and_four_standard_deviations():
    # The last fifth of 40 rounds are 8: 0.2 + 4 * 0.05 / sqrt(8) = 0.2707
    assert kinds(rounds(within=lambda t: 0.5 - 0.26)) == []
    assert kinds(rounds(within=lambda t: 0.5 - 0.28)) == ["clip_not_arrived"]
    assert kinds(rounds(within=lambda t: 0.5 + 0.28)) == ["clip_not_arrived"]
    noisy = Known(target=0.5, cohort_size=100, count_stddev=10.0)  # 4 * hypot(0.1, 0.05) / sqrt(8) = 0.158
    assert kinds(rounds(within=lambda t: 0.5 - 0.35), noisy) == []
    assert kinds(rounds(within=lambda t: 0.5 - 0.37), noisy) == ["clip_not_arrived"]


def test_no_update_within_a_clip_that_only_grows_is_told_from_one_that_is_on_its_way():
    nothing = {"within": lambda t: 0.01}
    assert kinds(rounds(clip=lambda t: 0.1 * 1.1**t, **nothing)) == ["nothing_within"]  # 0.1 to 4.1
    assert kinds(rounds(clip=lambda t: 1e-6 * 1.1**t, **nothing)) == ["clip_not_arrived"]  # 1e-6 to 4e-5


@pytest.mark.parametrize(("factor", "kind"), [(1.1, "clip_ran_away"), (1 / 1.1, "clip_fell")])
def test_a_clip_that_moved_far_since_it_arrived_is_told_unless_the_model_is_well(factor, kind):
    # 1.1^35 = 28 from the fifth round to the fortieth: beyond 10, which counts beside a metric, and below 100.
    far = {"clip": lambda t: 0.1 * factor**t}
    assert kinds(rounds(**far)) == []
    assert kinds(rounds(**far, accuracy=[0.6, 0.9, 0.85, 0.8], every=10)) == [kind]
    assert kinds(rounds(**far, accuracy=[0.6, 0.9, 0.9, 0.9], every=10)) == []
    assert kinds(rounds(count=80, **far)) == [kind]  # 1.1^75 = 1271


def test_a_metric_that_lost_a_fifth_of_its_best_and_a_third_of_its_gain_has_collapsed():
    # The bends of 0.1, 0.5, 0.9, 0.75, 0.6 are 0, 0.55 and 0: their median is no scatter.
    assert kinds(rounds(accuracy=[0.1, 0.5, 0.9, 0.78, 0.66], every=8)) == []  # lost 0.24 of 0.8: less than a third
    assert kinds(rounds(accuracy=[0.1, 0.5, 0.9, 0.75, 0.6], every=8)) == ["collapsed"]  # 0.3 of 0.8
    assert kinds(rounds(accuracy=[0.8, 0.85, 0.9, 0.825, 0.75], every=8)) == []  # 0.15: less than a fifth of 0.9
    errors = {"name": "error", "every": 8}
    assert kinds(rounds(accuracy=[9.0, 5.0, 1.0, 3.0, 5.0], **errors)) == ["collapsed"]
    assert kinds(rounds(accuracy=[9.0, 5.0, 1.0, 0.9, 0.8], **errors)) == []
    assert kinds(rounds(accuracy=[0.1, 0.9, 0.75, 0.6], every=10)) == []  # four values tell nothing of their scatter


def test_the_training_that_went_from_0_66_to_chance_has_a_sentence_with_best_and_last():
    lines, known = rounds(150, accuracy=RUNAWAY, every=10), Known(facts={"baseline": "0.1055"})
    assert kinds(lines, known) == ["collapsed", "baseline"]
    assert "0.102 at the end, and it was 0.661 after 60 rounds" in diagnose(lines, known)[0].text
    ends = best_and_last(lines, known)
    assert (ends.best, ends.best_rounds, ends.last, ends.last_rounds) == (0.661, 60, 0.102, 150)


def test_the_baseline_is_beaten_by_a_twentieth_of_what_is_left_to_gain():
    shares = {"share_no": 0.6, "share_yes": 0.4}  # 0.6 + 0.05 * 0.4 = 0.62
    assert kinds(rounds(accuracy=[0.61] * 4, every=10, **shares)) == ["baseline"]
    assert kinds(rounds(accuracy=[0.63] * 4, every=10, **shares)) == []
    errors = {"name": "absolute_error", "every": 10, "baseline_error": 10.0}
    assert kinds(rounds(accuracy=[9.6] * 4, **errors)) == ["baseline"]
    assert kinds(rounds(accuracy=[9.4] * 4, **errors)) == []
    assert kinds(rounds(accuracy=[0.4292] * 4, every=10), Known(facts={"baseline": "0.4292"})) == ["baseline"]


def test_a_metric_still_rises_if_the_last_third_has_a_quarter_of_the_gain():
    assert kinds(rounds(accuracy=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], every=5)) == ["still_rising"]
    assert kinds(rounds(accuracy=[0.1, 0.4, 0.5, 0.55, 0.57, 0.6], every=5)) == []
    assert kinds(rounds(accuracy=[8, 6, 5, 4, 3.5, 2], every=5, name="error")) == ["still_rising"]
    # From a baseline of 20 the gain is 18, and the last third's 2 is less than a quarter.
    assert kinds(rounds(accuracy=[8, 6, 5, 4, 3.5, 2], every=5, name="error", baseline_error=20.0)) == []


def test_what_is_not_finite_no_round_and_hopeless_noise_are_told():
    assert kinds(rounds(accuracy=[0.5, None], every=20)) == ["not_finite"]
    assert kinds([]) == ["no_rounds"]
    assert kinds(rounds(), Known(noise_norm=2.1)) == ["hopeless_noise"]
    assert kinds(rounds(), Known(noise_norm=1.9)) == []


def test_a_run_that_goes_on_is_not_judged_by_where_it_stands():
    going = Known(target=0.5, cohort_size=100, ended=False)
    assert kinds(rounds(within=lambda t: 0.0), going) == []
    assert kinds([], going) == []
    assert kinds(rounds(accuracy=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], every=5), going) == []
    assert kinds(rounds(accuracy=[0.1, 0.5, 0.9, 0.5, 0.1], every=8), going) == ["collapsed"]


def test_a_clip_that_never_arrived_is_told_also_where_the_model_has_learned():
    # As of `clipline train --population-size 3000 --cohort-size 100 --rounds 60`: 0.667 is 0.63 of the way to 1.
    slow = {"clip": lambda t: 0.0035 * 1.1**t, "within": lambda t: 0.01, "count": 64, "every": 10}
    known = Known(target=0.5, cohort_size=100, facts={"baseline": "0.105"})
    assert kinds(rounds(**slow, accuracy=[0.109, 0.169, 0.229, 0.578, 0.624, 0.667]), known) == ["clip_not_arrived"]
    assert kinds(rounds(**slow, accuracy=[0.109, 0.169, 0.229, 0.24, 0.245, 0.25]), known) == ["nothing_within"]
    # Without a baseline from the first value: 0.982 has more than half of what 0.7 leaves, and 0.84 has less.
    away = {"within": lambda t: 0.05, "count": 10, "every": 2}
    assert kinds(rounds(**away, accuracy=[0.7, 0.9, 0.97, 0.98, 0.982])) == ["clip_not_arrived"]
    assert kinds(rounds(**away, accuracy=[0.7, 0.81, 0.82, 0.83, 0.84])) == ["clip_not_arrived"]


def test_no_update_within_is_judged_by_the_last_rounds_too():
    # 3 rounds of 20 over the second half, and the last 8 of 40 have 0.3: above 0.05 + 4 * 0.05 / sqrt(8) = 0.12
    grows = {"clip": lambda t: 0.1 * 1.1**t}
    assert kinds(rounds(**grows, within=lambda t: 0.0)) == ["nothing_within"]
    assert "nothing_within" not in kinds(rounds(**grows, within=lambda t: 0.3 if t >= 37 else 0.13 * (t >= 32)))
    text = diagnose(rounds(**grows, within=lambda t: 0.0), KNOWN)[0].text
    assert text.startswith("Nearly every update was cut, though the clip grew from 0.1 to 4.1. With a table ")


@pytest.mark.parametrize("said", ["2024-01-01", "-", "1.2.3", "e", "nan", "most common label"])
def test_a_baseline_that_is_no_number_is_left_out(said):
    assert kinds(rounds(accuracy=[0.5, 0.8, 0.9, 0.92], every=10), Known(facts={"baseline": said})) == []
    beside = rounds(accuracy=[0.5] * 4, every=10, baseline_share=0.5)
    assert kinds(beside, Known(facts={"baseline": said})) == ["baseline"]


def test_the_model_that_was_kept_is_judged_and_not_the_last():
    lines, known = rounds(150, accuracy=RUNAWAY, every=10), {"facts": {"baseline": "0.1055"}}
    assert kinds(lines, Known(**known)) == ["collapsed", "baseline"]
    assert kinds(lines, Known(**known, kept=60)) == []
    assert kinds(lines, Known(**known, kept=10)) == ["baseline"]
    lost = rounds(50, accuracy=[0.6, 0.8, 0.9, None, None], every=10)
    assert (kinds(lost, Known()), kinds(lost, Known(kept=30))) == (["not_finite"], [])
    # Kept after a resume, which does not know of the best before it.
    (text,) = [str(one) for one in diagnose(lines, Known(kept=140)) if one.kind == "collapsed"]
    assert "0.099 after 140 rounds, in the model that was kept, and it was 0.661 after 60 rounds" in text


def test_what_is_worse_than_at_first_does_not_still_get_better():
    # An error of 2 that went to 9 and back to 4: before, the gain from the baseline of 20 was taken for all of it.
    errors = rounds(accuracy=[2, 2, 9, 8.9, 6, 4], every=5, name="error", baseline_error=20.0)
    assert "still_rising" not in kinds(errors)


def test_an_interrupted_run_is_judged_only_by_what_cannot_come_right():
    lines = rounds(20, within=lambda t: 0.0, accuracy=[0.1, 0.11, 0.1, 0.11], every=5)
    facts = {"baseline": "0.1"}
    assert kinds(lines, Known(target=0.5, cohort_size=100, facts=facts)) == ["baseline", "clip_not_arrived"]
    assert kinds(lines, Known(target=0.5, cohort_size=100, facts=facts, ended=False)) == []

    assert small_training(3).run([StopAfter(0)]).findings == ()
    result = small_training(9).run([StopAfter(2), Evaluate(lambda model: {"accuracy": 0.1, "baseline": 0.1}, every=1)])
    assert (result.stopped, result.findings) == ("interrupted", ())


def test_after_a_resume_the_whole_run_is_judged_as_in_its_files(tmp_path):
    values = iter([0.3, 0.5, 0.9, 0.9, 0.4, 0.1, 0.1, 0.1])
    evaluate = Evaluate(lambda model: {"accuracy": next(values)}, every=1)
    small_training(8).run([RunDirectory(tmp_path / "run"), evaluate, StopAfter(4)])
    result = small_training(8).resume(tmp_path / "run", [evaluate])
    assert [one.kind for one in result.findings] == ["collapsed"]
    assert (result.best.best, result.best.best_rounds, result.best.last_rounds) == (0.9, 3, 8)
    run = read_run_directory(tmp_path / "run")
    assert ([str(one) for one in result.findings], result.best) == (run.findings, run.best)


def test_a_call_that_ran_no_round_does_not_say_that_the_model_is_as_at_the_start():
    first = small_training(2).run()
    assert small_training(2).run(state=first.state).findings == ()


def test_hopeless_noise_warns_before_the_first_round_and_stands_in_the_result():
    hopeless = small_training(2, noise_multiplier=0.5 * 2.5 / small_training(2, noise_multiplier=0.5).noise_norm)
    assert hopeless.noise_norm == pytest.approx(2.5, rel=0.15)  # the count takes more of more noise
    with pytest.warns(HopelessNoiseWarning, match=r"^The training is hopeless: the noise is 2\.\d times the longest"):
        result = hopeless.run()
    assert "hopeless_noise" in [one.kind for one in result.findings]
    assert "warning: The training is hopeless" in str(result)


def test_the_noise_norm_is_that_of_the_planner():
    training = small_training(2)
    mechanism = training.algorithm.mechanism
    each = float(mechanism.delta_noise_multiplier) / training.cohort_size
    assert training.noise_norm == pytest.approx(each * 18**0.5)  # 6 features, 3 classes

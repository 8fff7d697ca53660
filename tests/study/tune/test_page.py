import re
from dataclasses import replace

import pytest
from study.tune.made_up import question_of

from clipline.study.tune.answer import Files, page
from clipline.study.tune.question import least_cohort, scale_up
from clipline.study.tune.recipe import Tuned
from clipline.study.tune.trials import Metric, Rates, Trial


@pytest.fixture
def question(tmp_path):
    """Epsilon 6 for 2,000 users, which 100 of them a round meet at z = 0.75."""
    asked, _ = question_of(tmp_path)
    return replace(asked, target=replace(asked.target, epsilon=6.0, population_size=2_000))


def answer(question, *noises, borne):
    """A tuning in which these noises were tried, and `borne` is the most that did not cost too much."""
    trials = [Trial(0.5, 1.0, z, 0.9 if z <= borne else 0.5, "run") for z in noises]
    chosen = next(trial for trial in trials if trial.noise_multiplier == borne)
    rates, target = Rates((trials[0],), trials[0]), question.target
    enough, scaled = target.enough_noise(), scale_up(target, borne)
    return Tuned(question, Metric("accuracy", False), rates, tuple(trials), chosen, enough, scaled)


def cohorts(text):
    """Promise -> cohort in the last table."""
    last = text.split("The same model with another promise")[1]
    return dict(re.findall(r'<tr><td class="words">([^<]*)</td><td class="number">([^<]*)</td>', last))


def test_a_promise_for_which_more_noise_would_have_to_be_tried_is_not_said_to_need_more_users(question, tmp_path):
    enough = question.target.enough_noise()
    strict = replace(question.target, epsilon=1.5)
    assert least_cohort(strict, enough) is None
    assert least_cohort(strict, 2 * enough) is not None  # what a tuning for it would find if the model tolerates that
    text = page(answer(question, 0.01, 0.3, enough, borne=enough), Files.named(tmp_path))
    found = cohorts(text)
    assert (found["as asked"], found["epsilon 12"], found["epsilon 1.5"]) == ("100", "100", "not tried")
    assert found["epsilon 3"] == f"at most {least_cohort(replace(strict, epsilon=3.0), enough)}"
    assert "more than there are" not in text.split("The same model")[1]
    assert "More noise than z = 0.75" in text


def test_where_more_noise_was_too_much_the_users_are_what_is_missing(question, tmp_path):
    borne, enough = 0.7, question.target.enough_noise()
    text = page(answer(question, 0.01, borne, enough, borne=borne), Files.named(tmp_path))
    found = cohorts(text)
    assert found["epsilon 1.5"] == "more than there are"
    assert not any("at most" in cohort or "not tried" in cohort for cohort in found.values())
    assert "More noise than" not in text

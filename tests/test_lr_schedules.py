import pickle

import pytest
import torch

from clipline import LocalSGD, ServerSGD, SettingError
from clipline.lr_schedules import check_schedule, lr_factor, schedule_text, tabulated

ROUNDS = 40


def factors(schedule):
    return [lr_factor(schedule, t, ROUNDS) for t in range(ROUNDS)]


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS)),
        ("cosine:0.1", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS, eta_min=0.1)),
        ("linear:0.25", lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, ROUNDS)),
        ("step:15:0.5", lambda o: torch.optim.lr_scheduler.StepLR(o, 15, 0.5)),
        ("constant", lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    ],
)
def test_factors_are_those_of_torchs_schedulers_over_all_rounds(schedule, make):
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, expected = make(optimiser), []
    for _ in range(ROUNDS):
        expected.append(scheduler.get_last_lr()[0])
        optimiser.step()
        scheduler.step()
    assert factors(schedule) == pytest.approx(expected, abs=1e-9)


def test_a_warm_up_reaches_one_and_parts_are_multiplied():
    assert factors("warmup:4")[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    both = factors("warmup:4, linear")
    assert both[:2] == pytest.approx([0.25, 0.5 * 39 / 40])
    assert both[20] == pytest.approx(0.5)
    assert both[-1] == pytest.approx(1 / 40)
    assert factors(None) == [1.0] * ROUNDS


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("cosinus", "did you mean 'cosine'"),
        ("", "must be made of constant, warmup"),
        ("cosine:-1", "cosine or cosine:END, with finite numbers"),
        ("step:10", "step:EVERY:FACTOR"),
        ("warmup", "warmup:ROUNDS"),
        (3, "a function of the round"),
    ],
)
def test_other_texts_are_refused_with_the_form_that_is_meant(schedule, words):
    with pytest.raises(SettingError, match=words):
        check_schedule("client_lr_schedule", schedule)
    with pytest.raises(SettingError, match="client_lr_schedule="):
        LocalSGD(0.1, lr_schedule=schedule)
    with pytest.raises(SettingError, match="server_lr_schedule="):
        ServerSGD(1.0, lr_schedule=schedule)


def test_a_function_gives_the_factor_and_is_recorded_by_what_it_gives():
    assert LocalSGD(0.5, lr_schedule=lambda t: 0.5**t).rate(2, ROUNDS) == 0.125
    first, same = (schedule_text(lambda t: 1 / (1 + t), ROUNDS) for _ in range(2))
    assert first == same
    assert first.startswith("a function, 1 in the first round, 0.025 in the last")
    assert schedule_text(lambda t: 1 / (1 + t) if t != 7 else 0.0, ROUNDS) != first
    assert schedule_text("cosine", ROUNDS) == "cosine"
    for bad in (-1.0, float("nan"), "half", None):
        with pytest.raises(SettingError, match=r"in round 3 but must give a finite number at least 0"):
            lr_factor(lambda t, bad=bad: bad, 3, ROUNDS)


def test_a_table_asks_once_a_round_in_order_and_gives_the_same_ever_after():
    asked = []

    def halves(t):
        asked.append(t)
        return 0.5 ** len(asked)  # depends on the calls, not on the round

    table = tabulated(halves, 4)
    again = [[lr_factor(table, t, 4) for t in (3, 0, 2, 1)] for _ in range(2)]
    assert again == [[0.0625, 0.5, 0.125, 0.25]] * 2
    assert asked == [0, 1, 2, 3]
    assert tabulated(table, 4) is table
    assert schedule_text(table, 4) == schedule_text(lambda t: 0.5 ** (t + 1), 4)
    assert pickle.loads(pickle.dumps(table))(2) == 0.125
    assert (tabulated("cosine", 4), tabulated(None, 4)) == ("cosine", None)
    with pytest.raises(SettingError, match="round 4 must be below 4, the rounds that lr_schedule was tabulated for"):
        tabulated(table, 5)


def fails(t):
    return 1.0 if t < 2 else 1 / 0


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (torch.optim.lr_scheduler.CosineAnnealingLR, r"CosineAnnealingLR must .* in round 0 \(TypeError.*a function"),
        (fails, r"lr_schedule=fails must give .* failed in round 2 \(ZeroDivisionError"),
        (lambda t: [1.0, 1.0, -2.0][t], "gave -2.0 in round 2 but"),
        (lambda t: 10**400, "in round 0 but"),
    ],
)
def test_a_function_that_does_not_give_a_factor_is_refused_with_the_round(schedule, words):
    with pytest.raises(SettingError, match=words):
        tabulated(schedule, 3)

import pytest

from clipline.errors import SettingError
from clipline.tasks import task_named
from clipline_paper.facts import ENTRIES
from clipline_paper.study.protocol import SCALES, differences, protocol_for

# Table 1: rounds, client and server rate.
TABLE_1 = {
    "cifar100": (4000, 0.1, 0.32),
    "emnist_cr": (1500, 0.032, 1.0),
    "emnist_ae": (3000, 3.2, 1.78),
    "shakespeare": (1200, 1.0, 0.32),
    "so_nwp": (1500, 0.18, 1.78),
    "so_lr": (1500, 320.0, 1.78),
}


@pytest.mark.parametrize("task", TABLE_1)
def test_the_scale_paper_is_the_papers_protocol(task):
    protocol = protocol_for(task, "paper")
    rounds, client_lr, server_lr = TABLE_1[task]
    assert (protocol.rounds, protocol.cohort_size, protocol.average_over, protocol.seeds) == (rounds, 100, 100, 20)
    assert (protocol.client_lr, protocol.server_lr) == pytest.approx((client_lr, server_lr), rel=0.02)
    assert protocol.quantiles == (0.1, 0.3, 0.5, 0.7, 0.9)
    assert protocol.noises == (0.0, 0.01, 0.03, 0.1)
    assert protocol.server_rates == pytest.approx((1, 10**0.25, 10**0.5, 10**0.75, 10))
    assert protocol.clip_start == 0.1
    base = protocol.base(task_named(task).settings)
    assert (base.sampling, base.clip_lr, base.server_momentum, base.client_epochs) == ("fixed", 0.2, 0.9, 1)
    assert (base.evaluate_on, base.noise_multiplier, base.count_stddev) == ("validation", 0.0, None)
    # Table 10 of Reddi et al. and offsets up to a half reach Table 1's rates, which were found so.
    assert any(pair == pytest.approx((protocol.client_lr, protocol.server_lr)) for pair in protocol.searched_rates())
    assert len(set(protocol.searched_rates())) == 25
    listed = {what for what, *_ in differences(protocol, "the original")}
    assert listed == {"data", "chosen on, reported on"}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("task", ENTRIES)
def test_every_task_has_every_scale(task, scale):
    protocol = protocol_for(task, scale)
    base = protocol.base(task_named(task).settings)
    runs = [
        protocol.adaptive(base, 0.5, protocol.noises[1], 10.0),
        protocol.fixed(base, 0.5, protocol.noises[-1], 1.0),
        protocol.unclipped(base, 0.1, 1.0),
        protocol.tested(base, 7),
    ]
    assert all(run.cohort_size == protocol.cohort_size for run in runs)
    assert runs[3].evaluate_on == "test"
    assert {0.1, 0.5, 0.9} <= set(protocol.quantiles)
    if scale != "paper":
        said = {what: (ours, papers) for what, ours, papers in differences(protocol, "here")}
        assert said["clip of the first round"][1] == "0.1"
        assert said["users a round"] == (str(protocol.cohort_size), "100")


def test_noise_is_that_of_100_users_a_round():
    protocol = protocol_for("emnist_cr", "small")
    assert protocol.cohort_size == 50
    assert protocol.noise_multiplier(0.1) == 0.05  # 0.05 clips on 50 users are 0.1 clips on 100
    assert protocol_for("emnist_cr", "paper").noise_multiplier(0.1) == 0.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"noises": (0.1,)}, "a list with 0"),
        ({"quantiles": (0.5, 1.0)}, r"quantiles=\[0.5, 1.0\] must be different numbers above 0 and below 1"),
        ({"seeds": 0}, "seeds=0 must be at least 1"),
        ({"evaluate_every": 60}, "evaluate_every=60 must be at most average_over=50"),
        ({"epochs": 2}, "protocol has no 'epochs'"),
    ],
)
def test_what_makes_no_study_is_refused(overrides, message):
    with pytest.raises(SettingError, match=message):
        protocol_for("emnist_cr", "small", **overrides)

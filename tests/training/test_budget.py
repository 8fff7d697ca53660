"""The budget of a training and the accountant that chose its noise agree."""

import numpy as np
import pytest
from samples import flat_training
from torch import nn

from clipline import LocalSGD
from clipline.data.population import Population
from clipline.errors import SettingError

USERS, EXAMPLES = 200, 5
RNG = np.random.default_rng(20240601)
FIELDS = {
    "x": RNG.normal(size=(USERS * EXAMPLES, 3)).astype(np.float32),
    "y": RNG.normal(size=(USERS * EXAMPLES, 1)).astype(np.float32),
}
POPULATION = Population(np.arange(0, USERS * EXAMPLES + 1, EXAMPLES), FIELDS)


def training(**settings):
    return flat_training(
        nn.Linear(3, 1),
        lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        POPULATION,
        rounds=12,
        cohort_size=20,
        local=LocalSGD(0.1),
        seed=1,
        **settings,
    )


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_plan_calibrated_to_its_budget_is_not_cut_short(sampling):
    result = training(epsilon=4.0, sampling=sampling).run()
    assert (result.stopped, len(result.reports)) == ("finished", 12)
    assert 3.999 <= result.guarantee.epsilon <= 4.0
    epsilons = [report.guarantee.epsilon for report in result.reports]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == result.guarantee.epsilon


def test_the_budget_stops_before_the_round_that_would_pass_it():
    unlimited = training(noise_multiplier=1.0).run()
    epsilons = [report.guarantee.epsilon for report in unlimited.reports]
    limit = (epsilons[6] + epsilons[7]) / 2
    stopped = training(noise_multiplier=1.0, max_epsilon=limit).run()
    assert (stopped.stopped, len(stopped.reports)) == ("budget", 7)
    assert stopped.guarantee.epsilon == epsilons[6] <= limit
    resumed = training(noise_multiplier=1.0, max_epsilon=limit).run(state=stopped.state)
    assert (resumed.stopped, len(resumed.reports)) == ("budget", 0)


def test_pitfall_the_paper_convention_is_refused_for_training():
    with pytest.raises(SettingError, match="relation='paper' must be one that a guarantee can be given for"):
        training(noise_multiplier=1.0, sampling="fixed", relation="paper")

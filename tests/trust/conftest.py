import pytest
from samples import cross_entropies, linear_float32, small_population

import clipline as cl


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of 12 rounds with an adaptive clip, by the library."""
    path = tmp_path_factory.mktemp("runs") / "run"
    training = cl.Training(
        linear_float32(), cross_entropies, small_population(), rounds=12, cohort_size=12, local=cl.LocalSGD(lr=0.1),
        privacy=cl.Privacy(epsilon=8.0, population_size=60), seed=1 << 60,
    )  # fmt: skip
    accuracy = cl.Evaluate(lambda model: {"accuracy": 0.5 + float(model.weight[0, 0])}, every=3)
    training.run(callbacks=[accuracy, cl.RunDirectory(path)])
    return path

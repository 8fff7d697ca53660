import numpy as np
import pytest
import torch

from clipline.tasks.handwriting import TASK, HandwritingNet, loss, writers_population


def loaded(**changes):
    return TASK.load(TASK.settings.overridden({"population_size": 40, "cohort_size": 5, **changes}, "the test"))


def test_the_clip_starts_a_hundred_times_below_the_median_update_norm():
    training = TASK.training(
        TASK.settings.overridden({"population_size": 300, "cohort_size": 30, "noise_multiplier": 0.5}, "the test")
    )
    norms = training.one_by_one.block(training.problem.model.initial, np.arange(300), 0).norms()
    assert np.median(norms) / TASK.settings.clip_start > 100


def test_the_small_network_has_the_parameters_that_arithmetic_gives():
    # 8 (25 + 1) + 16 (8 * 25 + 1) + 10 (16 * 16 + 1)
    assert sum(p.numel() for p in HandwritingNet(10).parameters()) == 208 + 3216 + 2570
    assert HandwritingNet(62)(torch.zeros(3, 28, 28, dtype=torch.uint8)).shape == (3, 62)


def test_paper_is_zero_and_ink_is_one_to_the_network():
    net = HandwritingNet(10)
    blank, bias = torch.full((1, 28, 28), 255, dtype=torch.uint8), torch.zeros(1, 1, 28, 28)
    seen = []
    net.conv1.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    net(blank)
    net(torch.zeros(1, 28, 28, dtype=torch.uint8))
    assert torch.equal(seen[0], bias)
    assert torch.equal(seen[1], bias + 1)


@pytest.mark.parametrize("classes", [2, 10, 36, 62])
def test_any_number_of_classes_up_to_62(classes):
    task = loaded(classes=classes)
    labels = np.concatenate([task.population.of(user)["labels"] for user in range(40)])
    assert labels.max() < classes
    batch = {"pixels": torch.from_numpy(task.population.of(0)["pixels"]), "labels": torch.from_numpy(labels[:1])}
    batch["pixels"] = batch["pixels"][:1]
    assert loss(task.make(0), batch).item() == pytest.approx(np.log(classes), rel=0.35)  # untrained: about chance


def test_the_population_does_not_depend_on_the_training_seed_and_the_model_does():
    first, second = loaded(seed=0), loaded(seed=1)
    np.testing.assert_array_equal(first.population.fields["pixels"], second.population.fields["pixels"])
    assert not torch.equal(first.make(0).conv1.weight, second.make(1).conv1.weight)
    assert torch.equal(first.make(0).conv1.weight, second.make(0).conv1.weight)


def test_test_writers_are_nobody_of_the_training_population():
    from clipline.tasks import handwriting

    train = writers_population(0, 500, 10).fields["pixels"]
    test = writers_population(handwriting._TEST_FIRST, 500, 10).fields["pixels"]
    shared = {image.tobytes() for image in train} & {image.tobytes() for image in test}
    assert not shared
    assert handwriting._TEST_FIRST > 10**10  # far above any population that can be drawn


def test_accuracy_is_the_share_of_right_answers():
    task = loaded()

    class Always(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, pixels):
            return torch.nn.functional.one_hot(torch.full((len(pixels),), 3), 10).float()

    population = writers_population(1 << 36, 1000, 10)
    test = population.fields["labels"]
    assert task.evaluate(Always())["accuracy"] == pytest.approx((test == 3).mean(), abs=1e-12)
    # Validation and test are every other writer, from the first and from the second on.
    writer = np.repeat(np.arange(1000), np.diff(population.offsets))
    for part, first in (("validation", 0), ("test", 1)):
        half = test[writer % 2 == first]
        found = loaded(evaluate_on=part).evaluate(Always())["accuracy"]
        assert found == pytest.approx((half == 3).mean(), abs=1e-12)

"""Every task trains in a stack as it does one by one, with dropout and crops on; float64, where only sums differ."""

import numpy as np
import pytest
from samples import one_by_one, rows_of

from clipline import LocalSGD, Population, task_named
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams
from clipline_paper.facts import ENTRIES

# Numbers of examples of the users, batch size, epochs, and a learning rate of the task's own size. The first user takes
# several steps, the last without a full batch.
CASES = {
    "handwriting": ([6, 3, 1, 0], 4, 2, 0.5),
    "emnist_cr": ([6, 3, 1, 0], 4, 2, 0.03),
    "emnist_ae": ([5, 2, 0], 4, 2, 1.0),
    "cifar100": ([3, 1, 0], 2, 1, 0.1),
    "shakespeare": ([5, 1, 0], 4, 1, 1.0),
    "so_nwp": ([3, 1, 0], 2, 1, 0.2),
    "so_lr": ([6, 3, 1, 0], 4, 2, 100.0),
}


FEW_WORDS = 400  # of so_nwp, whose 10,004 take minutes in float64


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    """Networks with all their layers and fewer numbers: those of full width train in test_paper_tasks.py."""
    narrow = {"so_nwp.WORD_IDS": FEW_WORDS, "so_nwp.STATE": 50, "shakespeare.STATE": 20, "emnist_cr.HIDDEN": 8}
    narrow["cifar100.WIDTHS"] = (8, 8, 8, 10, 10, 12, 12, 14, 14)
    narrow["emnist_ae.WIDTHS"] = (784, 100, 50, 25, 30, 25, 50, 100, 784)
    for name, value in narrow.items():
        monkeypatch.setattr(f"clipline_paper.tasks.{name}", value)
    monkeypatch.setattr("clipline.engine.stacked.rounding._BYTES", 1 << 20)  # made-up users before the first round


def cut(population, sizes):
    """Users with these numbers of examples, from the first rows of the users that there are."""
    rows = np.concatenate([population.offsets[user] + np.arange(size) for user, size in enumerate(sizes)])
    fields = {name: field[rows.astype(np.int64)] for name, field in population.fields.items()}
    if fields.get("tokens", rows).dtype == np.int16:
        fields["tokens"] = np.minimum(fields["tokens"], FEW_WORDS - 1)
    return Population(np.concatenate([[0], np.cumsum(sizes)]), fields)


def engine_of(name, **changes):
    task = task_named(name)
    small = {"population_size": 4, "cohort_size": 4} | ({} if name == "handwriting" else {"test_users": 2})
    small |= {"group_count": 2} if name == "cifar100" else {}
    loaded = task.load(task.settings.overridden({**small, **changes}, "the test"))
    sizes, batch_size, epochs, lr = CASES[name]
    local = LocalSGD(lr, batch_size, epochs, reduction=loaded.reduction)
    users = cut(loaded.population, sizes)
    return one_by_one(loaded.make(0).double(), loaded.loss, users, local, Streams(3), row_fields=loaded.row_fields)


def compare(engine, users, per_example=True):
    expected = rows_of(engine, users, 2)
    stack = Stacked(engine, len(users))
    assert stack._step.per_example == per_example
    ours = rows_of(stack, users, 2)
    for row, wanted in zip(ours, expected, strict=True):
        assert (row - wanted).norm() <= 1e-12 * wanted.norm()
    return expected


@pytest.mark.parametrize("name", ENTRIES)
def test_a_stack_trains_every_task_as_one_by_one(name):
    engine = engine_of(name)
    sizes = CASES[name][0]
    expected = compare(engine, np.arange(len(sizes)))
    assert expected[:-1].any(dim=1).all()  # all move but the one without examples
    assert not expected[-1].any()
    drawing = {"emnist_cr": 2, "cifar100": 1}
    assert len(engine.problem.model.random_layers) == drawing.get(name, 0)


def test_a_loss_that_leaves_padding_out_is_one_number_and_stacks_by_size_of_batch():
    engine = engine_of("shakespeare", padding_in_loss=False)
    compare(engine, np.arange(3), per_example=False)

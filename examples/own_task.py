"""A task of one's own, for `clipline train examples/own_task.py --data rides.csv --user-column rider`.

docs/howto/own_model.md says what such a file may define.
"""

import torch
from torch import nn

SETTINGS = {"rounds": 60, "cohort_size": 100, "client_lr": 0.02, "batch_size": 10, "epsilon": 4.0}


def model():
    """How long a ride takes, from its length and its climb."""
    return nn.Linear(2, 1)


def predict(model, batch):
    """(examples,) hours; the columns of a table are the fields of a batch."""
    return model(torch.stack([batch["km"] / 10, batch["climb"] / 100], dim=1)).squeeze(1)


def loss(model, batch):
    """(examples,) squared errors: one number for each example trains faster than their mean."""
    return (predict(model, batch) - batch["hours"]).square()


def metrics(model, batch):
    """Of users who do not train: names, and a number for each example."""
    error = (predict(model, batch) - batch["hours"]).abs()
    return {"within_15_minutes": (error < 0.25).float(), "absolute_error": error}

"""A federation in one process whose every update is known: user i always moves by `UPDATES[i]`."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import clipline as cl
from clipline.federation.flower_client import InProcessGrid, clipped

USERS, DIM = 6, 5
UPDATES = torch.randn(USERS, DIM, generator=torch.Generator().manual_seed(0)) * 0.3


class Vector(torch.nn.Module):
    """Two parameters, so that their order matters."""

    def __init__(self):
        super().__init__()
        self.z = torch.nn.Parameter(torch.zeros(2))
        self.a = torch.nn.Parameter(torch.zeros(DIM - 2))


def loss(model, batch):
    return -(batch["x"] * torch.cat([model.z, model.a])).sum(dim=1)  # one step at rate 1 moves by x


def training(upload=None, noise_multiplier=0.0, rounds=4, cohort_size=USERS, population_size=USERS, **options):
    people = cl.Population.from_arrays(list(range(USERS)), x=UPDATES.numpy())
    options = {"count_stddev": None if noise_multiplier else 0.0, **options}
    privacy = cl.Privacy(noise_multiplier=noise_multiplier, population_size=population_size, **options)
    return cl.Training(
        Vector(), loss, people, rounds=rounds, cohort_size=cohort_size, local=cl.LocalSGD(lr=1.0),
        clip=cl.QuantileClip(start=0.3), privacy=privacy, upload=upload,
    )  # fmt: skip


def app(upload=None, **options):
    """A client app, as its author writes it, with one line for clipline."""
    made = ClientApp()

    @made.train(mods=[clipped(upload, **options)])
    def train(message, context):
        arrays = message.content["arrays"].to_torch_state_dict()
        update = UPDATES[context.node_config["partition-id"]]
        moved = {"a": arrays["a"] + update[2:], "z": arrays["z"] + update[:2]}  # in another order
        metrics = MetricRecord({"num-examples": 17, "loss": 0.5})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return made


def grid(upload=None, nodes=USERS, **options):
    return InProcessGrid(app(upload), nodes, **options)

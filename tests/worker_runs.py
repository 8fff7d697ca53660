"""A small run with dropout and uneven users, for one process or several."""

import multiprocessing
import os
import signal
from functools import cache

import torch
import torch.distributed as dist
from samples import LOCAL, cross_entropy, flat_training, small_population

HERE = os.getpid()
TOLERANCE = 1e-12  # of the parameters' norm, in float64
POPULATION = small_population()  # users of 0 to 30 examples: some have none and some four times the steps of others


def model_with_dropout(dtype=torch.float64):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def training(loss=cross_entropy, dtype=torch.float64, **changes):
    settings = {"rounds": 4, "cohort_size": 20, "local": LOCAL, "seed": 1, "noise_multiplier": 0.5, **changes}
    return flat_training(model_with_dropout(dtype), loss, POPULATION, **settings)


@cache
def alone(**changes):
    return training(**changes).run()


def killed(model, batch):
    """A loss that ends worker 1 as the system would for want of memory."""
    if multiprocessing.current_process().name == "clipline worker 1":
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(model, batch)


def distance(result, other):
    return float((result.state.params - other.state.params).norm() / other.state.params.norm())


def users_of(run):
    """The users of every round."""
    streams = run.problem.runs[0].streams
    return [run.algorithm.sampler.draw(streams.sampling(t)).users for t in range(run.rounds)]


def nothing_is_left():
    return not multiprocessing.active_children() and not dist.is_initialized()

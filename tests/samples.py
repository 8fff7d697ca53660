"""Small models, populations and scripts that several tests use."""

import importlib.util
import io
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import clipline
from clipline import LocalSGD, Population, ServerSGD
from clipline.engine.choose import make_problem
from clipline.engine.core.one_by_one import OneByOne
from clipline.engine.stacked.layers import MatrixLSTM, PatchConv2d
from clipline.engine.stacked.trainer import Stacked
from clipline.federated.backend import CohortRequest
from clipline.federated.clipping import PartialSums
from clipline.federated.draws import PlainDraws
from clipline.federated.mechanism import GaussianMechanism
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling
from clipline.training import loop
from clipline.training.callbacks import Callback
from clipline.training.options import Compute, Privacy
from clipline.training.training import Training

ROOT = Path(__file__).parents[1]
SOURCE = Path(clipline.__file__).parent  # of the package under test, which may be an installed one


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def linear_model(features: int = 6, classes: int = 3, dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    """A linear classifier without bias that starts at zero: the model of the reference."""
    model = torch.nn.Linear(features, classes, bias=False, dtype=dtype)
    torch.nn.init.zeros_(model.weight)
    return model


def linear_float32(features: int = 6, classes: int = 3) -> torch.nn.Linear:
    """The same in float32."""
    return linear_model(features, classes, torch.float32)


def cross_entropy(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Mixed(nn.Module):
    """16 features to 3 classes by a convolution, normalisation, a pool, a recurrence, dropout and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = PatchConv2d(1, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.MaxPool2d(2)
        self.lstm, self.drop, self.out = MatrixLSTM(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.pool(torch.relu(self.norm(self.conv(x.view(-1, 1, 4, 4)))))
        return self.out(self.drop(self.lstm(maps.flatten(2).transpose(1, 2))[:, -1]))


def small_population(users: int = 60, features: int = 6, classes: int = 3, seed: int = 0) -> Population:
    """Users with 0 to 30 examples of a noisy linear rule."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(features, classes))
    sizes = rng.integers(0, 31, users)
    ids = np.repeat(np.arange(users), sizes)
    x = rng.normal(size=(len(ids), features))
    y = (x @ truth + rng.normal(size=(len(ids), classes))).argmax(axis=1)
    return Population.from_arrays(ids, known_users=np.arange(users), x=x, y=y)


def without(population, user):
    """The neighbour: everybody but this user, with the same data."""
    ids = np.repeat(population.user_ids, np.diff(population.offsets))
    kept = ids != population.user_ids[user]
    fields = {name: field[kept] for name, field in population.fields.items()}
    return Population.from_arrays(ids[kept], known_users=np.delete(population.user_ids, user), **fields)


def cross_entropies(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same, one for each example."""
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def population_of(sizes: list[int], features: int = 6, classes: int = 3, seed: int = 0) -> Population:
    """Users with these numbers of examples."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    fields = {"x": rng.normal(size=(offsets[-1], features)), "y": rng.integers(0, classes, offsets[-1])}
    return Population(offsets, fields)


def one_by_one(*args, **kwargs) -> OneByOne:
    """The plain trainer of this problem."""
    return OneByOne(make_problem(*args, **kwargs))


def request(params: Tensor, users, round_index: int = 0, clip: float = 1.0, run: int = 0, sampling=None):
    """What a round asks of a backend or a trainer."""
    cohort = Cohort(np.asarray(users, np.int64), PoissonSampling(0.5) if sampling is None else sampling)
    return CohortRequest(params, cohort, round_index, lambda: clip, run)


def rows_of(trainer: OneByOne | Stacked, users: NDArray[np.int64], round_index: int = 0, params: Tensor | None = None):
    """(users, dim): the updates of these users in this order, as `train` gives them."""
    problem = trainer.problem
    params = problem.model.initial if params is None else params
    wanted, places = [request(params, users, round_index)], []
    with _noting_places(trainer, places) if isinstance(trainer, Stacked) else nullcontext():
        blocks = [updates.dense(problem.model.dim) for updates, _ in trainer.train(wanted)]
    rows = torch.cat([params.new_zeros(0, problem.model.dim), *blocks])
    order = np.concatenate(places) if places else np.arange(len(users))
    in_order = torch.empty_like(rows)
    in_order[torch.from_numpy(order)] = rows
    return in_order


def _noting_places(stack: Stacked, places: list[NDArray[np.int64]]):
    """Within, the places in the cohort of the users of each block that the stack yields are noted."""
    updates_of = stack._updates_of

    def noted(requests, trained):
        places.append(trained.block.places)
        return updates_of(requests, trained)

    return mock.patch.object(stack, "_updates_of", noted)


def aggregate(blocks, clip: float, dim: int, sampling=None, device="cpu"):
    """The `ClippedSum` of blocks of updates."""
    sums = PartialSums(torch.empty(1, dim + 1, dtype=torch.float64, device=device))
    for updates in blocks:
        sums.add(updates, [clip], np.zeros(len(updates), np.int64))
    (total,) = sums.finished([clip], [PoissonSampling(0.5) if sampling is None else sampling])
    return total


def opened(total) -> Tensor:
    """(dim + 1,) float64: what is in a private sum, by the only way there is, a release without noise."""
    release = GaussianMechanism(1, 0.0, 0.0).release(total, np.random.default_rng(0))
    return torch.cat([release.mean, torch.tensor([release.fraction_within - 0.5], device=release.mean.device)])


def summed(training: Training, params: Tensor, users, round_index: int = 0, clip: float = 1.0) -> Tensor:
    """What is in the private sum of these users, by the training's own backend."""
    sampling = training.algorithm.sampler.sampling
    (total,) = training.backend.sums([request(params, users, round_index, clip, sampling=sampling)])
    return opened(total)


PRIVACY = Privacy.__dataclass_fields__
COMPUTE = Compute.__dataclass_fields__


def flat_training(model, loss, population, **settings) -> Training:
    """A `Training` by the paper's server, from plain keywords: those of `Privacy` and `Compute` go there."""
    settings.setdefault("server", ServerSGD())
    privacy = Privacy(**{name: settings.pop(name) for name in PRIVACY if name in settings})
    compute = Compute(**{name: settings.pop(name) for name in COMPUTE if name in settings})
    return Training(model, loss, population, privacy=privacy, compute=compute, **settings)


def one_round(training: Training, state=None):
    """The state after one round, and what it released."""
    state = training.init() if state is None else state
    draws = PlainDraws(training.algorithm.sampler, training.problem.runs[0].streams, training.dim, training.device)
    return loop.one_round(training.algorithm, state, draws, training.backend)


class Observer(Callback):
    """Calls `look(report, state)` after every round."""

    def __init__(self, look) -> None:
        self._look = look

    def on_round(self, report, state) -> None:
        self._look(report, state)


LOCAL = LocalSGD(lr=0.2, batch_size=8)


def small_training(rounds: int, clip=None, noise_multiplier: float = 0.5, noise_source=None, **options) -> Training:
    """A short private training of a linear model in float32."""
    usual = {
        "model": linear_float32(), "loss": cross_entropies, "population": small_population(), "cohort_size": 20,
        "local": LOCAL, "server": ServerSGD(), "seed": 3,
        "privacy": Privacy(noise_multiplier=noise_multiplier, noise_source=noise_source),
    }  # fmt: skip
    return Training(rounds=rounds, clip=clip, **{**usual, **options})


class Gone(Exception):
    """The power, or the process."""


class GoneAfter(Callback):
    """Ends a run as a crash does, once so many rounds are written."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, report, state) -> None:
        if state.round_index == self.rounds:
            raise Gone


class StopAfter(Callback):
    """Asks to stop once so many rounds are done."""

    reads_guarantee = False

    def __init__(self, rounds: int) -> None:
        self.rounds, self.stop_requested = rounds, rounds == 0

    def on_release(self, state) -> None:
        self.stop_requested = state.round_index >= self.rounds


class Uncompiled:
    """A traced step that runs operation by operation, in place of a compiled one: compiling takes minutes, or a GPU."""

    one_number = False

    def __init__(self, graph, inputs, by_user):
        self.graph = graph

    def serves(self, users):
        return True

    def __call__(self, inputs):
        with torch.no_grad():
            self.graph(*inputs)


class CommandLine:
    """Runs `clipline` with these arguments: gives exit code, standard output and standard error."""

    def __init__(self, call, *first):
        self.call, self.first = call, first

    def __call__(self, *arguments):
        return self.call(*self.first, *arguments)

    def ok(self, *arguments):
        """Standard output and standard error of a command that must succeed."""
        code, out, err = self(*arguments)
        assert code == 0, err
        return out, err

    def refused(self, *arguments):
        """What a command says that must be refused."""
        code, _, err = self(*arguments)
        assert (code, "Traceback" in err) == (2, False), err
        return err


class _Screen(io.StringIO):
    def isatty(self):
        return True


def terminal_of(monkeypatch, columns, stream="stderr"):
    """What is written to a colour terminal of so many columns, to which this stream goes from now on."""
    for name, value in (("COLUMNS", str(columns)), ("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, stream, _Screen())
    return getattr(sys, stream)


def everything_in(thing, found=None):
    """All bytes that can be reached from an object."""
    found = [] if found is None else found
    if isinstance(thing, bytes | bytearray):
        found.append(bytes(thing))
    elif isinstance(thing, np.ndarray):
        found.append(thing.tobytes())
    elif isinstance(thing, dict):
        for key, value in thing.items():
            everything_in(key, found)
            everything_in(value, found)
    elif isinstance(thing, list | tuple | set):
        for one in thing:
            everything_in(one, found)
    elif hasattr(thing, "__dict__"):
        everything_in(vars(thing), found)
    return found

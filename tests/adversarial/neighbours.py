"""The instrument: what the private sum of a round does when one user comes, goes, is renamed or has other data.

A world is a population and a `Training` on it, from its making through several rounds. Neighbouring worlds differ in
one user. The sums of two worlds must differ by that user's own vector (the clipped update, then the bit less 1/2),
which a third world tells in which nobody else lives. Where the user is not sampled the sums must be equal to the last
bit.
"""

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from adversarial.entry import Entry
from samples import flat_training, summed
from torch import Tensor, nn

from clipline import FixedClip, LocalSGD, Population, Training
from clipline.errors import CliplineError

CLIP = 0.05  # so that some users are within it and some are not
TOLERANCE = 1e-9  # clips: models are float64, so that rounding is some 1e-15 of the parameters
LOCAL = LocalSGD(lr=0.1, batch_size=3)
FEATURES, CLASSES, HEIGHT, WIDTH = 4, 3, 600, 60

User = dict[str, np.ndarray]  # the fields of one user
Users = Mapping[str, User]


@dataclass(frozen=True)
class Case:
    """An entry of the zoo, and who trains it."""

    entry: Entry
    engine: str = "auto"
    workers: int = 1
    device: str = "cpu"
    local: LocalSGD = LOCAL
    numbered: bool = False  # whether users' ids are whole numbers, in the order of their names


@dataclass(frozen=True)
class Ask:
    """One round: these users train from the initial parameters, or from random ones."""

    round_index: int
    users: tuple[str, ...]
    initial: bool = False


@dataclass(frozen=True)
class Refused:
    """What a world said instead of training."""

    error: Exception
    made: bool = False  # whether the training could be made, so that it was a round that failed

    @property
    def sentence(self) -> str:
        """What it says first: a worker's error has the traceback behind it."""
        return (str(self.error).splitlines() or [""])[0]


@dataclass(frozen=True)
class Finding:
    """A broken promise, and by how many clips (or half bits, if those are more)."""

    neighbour: str
    what: str
    clips: float = float("inf")

    def __str__(self) -> str:
        size = f" by {self.clips:.3g} clips" if np.isfinite(self.clips) else ""
        return f"{self.neighbour}: {self.what}{size}"


def examples(count: int, seed: int, data: str = "dense", wide: bool = False) -> User:
    """A user with so many examples. Of "words", a `wide` user's are all different and fill every place."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, count)
    if data == "dense":
        return {"x": rng.normal(size=(count, FEATURES)), "y": y}
    words = 1 + rng.permutation(HEIGHT - 1)[: count * WIDTH].reshape(count, WIDTH)
    values = 0.5 + rng.random((count, WIDTH))
    if not wide:
        words[:, 3:], values[:, 3:] = 0, 0.0  # padding
    return {"words": words, "values": values, "y": y}


def everybody(data: str = "dense") -> dict[str, User]:
    """Six users with 0, 1 or 2 batches. The first of all has most examples, one in the middle the fewest."""
    sizes = {"a": 5, "d": 3, "h": 0, "m": 1, "t": 2, "z": 4}
    return {name: examples(size, seed, data, wide=name == "a") for seed, (name, size) in enumerate(sizes.items())}


def filled(user: User, value: float) -> User:
    """The same user with this value in all numbers that are not whole, where there is anything but padding."""
    return {
        name: np.where(field != 0, value, 0.0) if field.dtype.kind == "f" else field for name, field in user.items()
    }


def id_of(case: Case, name: str) -> str | int:
    """The user's id in the population."""
    return int.from_bytes(name.encode()[:6].ljust(6), "big") if case.numbered else name


def population_of(case: Case, users: Users) -> Population:
    """Everybody, also those without examples; the arrays are new."""
    known = np.array([id_of(case, name) for name in users])
    ids = np.repeat(known, [len(user["y"]) for user in users.values()])
    fields = {field: np.concatenate([user[field] for user in users.values()]) for field in next(iter(users.values()))}
    return Population.from_arrays(ids, known_users=known, missing="zero-update", **fields)


def training_of(case: Case, users: Users) -> Training:
    """A training on these users, all else being equal."""
    seed_everything()
    model, loss = case.entry.make()
    return flat_training(
        model, loss, population_of(case, users), rounds=9, cohort_size=1, local=case.local, seed=0,
        noise_multiplier=1.0, delta=1e-5, clip=FixedClip(CLIP), sampling="poisson", engine=case.engine,
        workers=case.workers, device=case.device, row_fields=case.entry.row_fields or {},
    )  # fmt: skip


def private_sum(training: Training, params: Tensor, users: np.ndarray, round_index: int) -> Tensor:
    """(dim + 1,) float64: what the mechanism of this round would add noise to. `users` are positions."""
    return summed(training, params, users, round_index, CLIP)


def initial_params(training: Training) -> Tensor:
    """What round 0 starts from."""
    return training.problem.model.initial.clone()


def sums(case: Case, users: Users, asks: Sequence[Ask]) -> list[Tensor] | Refused:
    """The private sums of a world, round after round in one training."""
    made = False
    with _as_found():
        try:
            training = training_of(case, users)
            made = True
            with training.backend.running():
                return [_round(case, training, ask) for ask in asks]
        except Exception as error:
            return Refused(error, made)


def _round(case: Case, training: Training, ask: Ask) -> Tensor:
    """The sum of one round, on the processor; it must leave the round's parameters and the data alone."""
    params = initial_params(training)
    if not ask.initial:
        drawn = np.random.default_rng(99).normal(size=len(params))
        params += 0.5 * torch.from_numpy(drawn).to(params)
    before = params.clone()
    fields = {name: field.copy() for name, field in training.population.fields.items()}
    positions = np.searchsorted(training.population.user_ids, sorted(id_of(case, name) for name in ask.users))
    total = private_sum(training, params, positions, ask.round_index)
    if not torch.equal(params, before):
        raise AssertionError("the round's own parameters were written to")
    for name, field in fields.items():
        if not np.array_equal(training.population.fields[name], field, equal_nan=field.dtype.kind == "f"):
            raise AssertionError(f"field {name!r} of the population was written to")
    return total.cpu()


def seed_everything() -> None:
    """Every world begins with the same global generators: what differs then was caused by users."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes the caller's stack for each kind of device
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    np.random.seed(0)  # noqa: NPY002  # the very generator that careless models draw from
    random.seed(0)


@contextmanager
def _as_found() -> Iterator[None]:
    """Models of the zoo leave things about: the next world must not find them."""
    dtype = torch.get_default_dtype()
    with warnings.catch_warnings(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(True)


@dataclass(frozen=True)
class Neighbour:
    """A world in which one user of `everybody` is another, is gone or is new."""

    name: str
    before: str | None  # the user's id in the first world
    after: str | None  # and here
    users: Users

    @property
    def at_first(self) -> bool:
        """Whether it is tried at the initial parameters too, which costs time and rarely shows more."""
        return self.name == "first and largest user removed"

    @property
    def asks(self) -> list[Ask]:
        """A round of all, for some one more at the initial parameters, and then one without that user."""
        rest = tuple(name for name in self.users if name != self.after)
        more = [Ask(0, tuple(self.users), initial=True)] if self.at_first else []
        return [Ask(2, tuple(self.users)), *more, Ask(1, rest)]

    @property
    def relations(self) -> int:
        """How many users' worth the sums may differ by: 1, or 2 where one went and another came."""
        return (self.before is not None) + (self.after is not None)


def neighbours(data: str = "dense", chosen: Sequence[str] = ()) -> list[Neighbour]:
    """Those of `everybody`, or the `chosen` ones."""
    first = everybody(data)

    def changed(name: str, user: str, other: User | None, after: str | None = None) -> Neighbour:
        rest = {key: own for key, own in first.items() if key != user}
        after = None if other is None else after or user
        return Neighbour(
            name, user if user in first else None, after, rest if after is None else {**rest, after: other}
        )

    every = [
        changed("first and largest user removed", "a", None),
        # A longer name than all others: ids of another width in memory.
        changed("first and largest user renamed to be last", "a", first["a"], "zz-longer"),
        changed("first and largest user NaN", "a", filled(first["a"], np.nan)),
        changed("first and largest user huge", "a", filled(first["a"], 1e30)),
        changed("middle and smallest user removed", "m", None),
        changed("middle and smallest user replaced", "m", examples(4, 77, data)),
        changed("last user emptied", "z", examples(0, 0, data)),
        changed("largest user of all added", "e", examples(7, 55, data, wide=True)),
    ]
    return [one for one in every if not chosen or any(word in one.name for word in chosen)]


def findings(case: Case, chosen: Sequence[str] = ()) -> list[Finding] | Refused:
    """All broken promises of a case; or how it was refused, if every world refuses it."""
    data = case.entry.data
    first, others = everybody(data), neighbours(data, chosen)
    everyone = tuple(first)
    without = {one.before: tuple(name for name in everyone if name != one.before) for one in others}
    asks = [Ask(2, everyone), Ask(0, everyone, initial=True), *(Ask(1, users) for users in without.values())]
    base = sums(case, first, asks)
    if isinstance(base, Refused):
        return _all_refuse(case, base, others)
    unsampled = dict(zip(without, base[2:], strict=True))
    own = {None: [torch.zeros_like(base[0])] * 2}
    found = []
    for one in others:
        there = sums(case, one.users, one.asks)
        vectors = [_alone(case, one, name, users, own) for name, users in ((one.before, first), (one.after, one.users))]
        refused = next((each for each in (there, *vectors) if isinstance(each, Refused)), None)
        if refused is not None:
            faults = (
                sentence_faults(case, refused) if case.entry.by_data else f"refused here alone: {described(refused)}"
            )
            found += [Finding(one.name, faults)] if faults else []
            continue
        before, after = vectors
        for i, what in enumerate(("random", "initial")[: len(there) - 1]):
            found += _compared(one, f"sum at {what} parameters", base[i] - there[i], before[i], after[i])
        if not torch.equal(unsampled[one.before], there[-1]):
            apart = _clips(unsampled[one.before] - there[-1])
            found.append(Finding(one.name, "sum without that user moves", apart))
    return found


def _alone(case: Case, one: Neighbour, name: str | None, users: Users, known: dict) -> list[Tensor] | Refused:
    """A user's own vectors, as in all rounds but the last of `one.asks`, from a world without anybody else."""
    if name is None:
        return known[None]
    if not len(users[name]["y"]):  # who has no examples sends zeros, which are within
        vector = torch.zeros_like(known[None][0])
        vector[-1] = 0.5
        return [vector, vector]
    key = (name, id(users[name]))
    if key not in known:  # the first neighbour asks most of the users that it shares with others
        asks = [replace(ask, users=(name,)) for ask in one.asks[:-1]]
        known[key] = sums(replace(case, workers=1), {name: users[name]}, asks)
    return known[key]


def _compared(one: Neighbour, what: str, moved: Tensor, before: Tensor, after: Tensor) -> list[Finding]:
    """The sum moves by the user's own vectors and nothing else, and each is within the clip and half a bit."""
    found = []
    for own in (before, after):
        if float(own[:-1].norm()) > CLIP * (1 + TOLERANCE) or abs(float(own[-1])) > 0.5 or not own.isfinite().all():
            found.append(Finding(one.name, f"{what}: the user's own vector is beyond its bound", _clips(own)))
    apart = _clips(moved - (before - after))
    if not apart <= TOLERANCE:
        found.append(Finding(one.name, f"{what}: others move", apart))
    limit = one.relations
    if float(moved[:-1].norm()) > limit * CLIP * (1 + TOLERANCE) or abs(float(moved[-1])) > limit / 2:
        found.append(Finding(one.name, f"{what}: beyond {limit} clips and {limit}/2, moves", _clips(moved)))
    return found


def _clips(vector: Tensor) -> float:
    """The length in clips, or twice the bit's, whichever is more."""
    size = max(float(vector[:-1].norm()) / CLIP, 2 * abs(float(vector[-1])))
    return size if np.isfinite(size) else float("inf")


def _all_refuse(case: Case, base: Refused, others: Sequence[Neighbour]) -> list[Finding] | Refused:
    """A refusal tells of the module, and not of one user: all worlds refuse alike."""
    said = sentence_faults(case, base)
    if said:
        return [Finding("everybody", said)]
    if case.entry.by_data:
        return base
    there = {one.name: sums(case, one.users, one.asks) for one in others}
    trained = [
        Finding(name, "trains, and another is refused") for name, made in there.items() if isinstance(made, list)
    ]
    return trained or base


def sentence_faults(case: Case, refused: Refused) -> str:
    """What is wrong with the words of a refusal: nothing if it is one sentence of ours that names what it refuses."""
    if not isinstance(refused.error, CliplineError):
        return f"no sentence but {described(refused)}"
    if "\n" in str(refused.error) and case.workers == 1:
        return f"more than one line: {described(refused)}"
    seed_everything()
    model, loss = case.entry.make()
    names = {"loss", getattr(loss, "__name__", "loss"), *getattr(loss, "__dict__", ()), *_names(model)}
    names |= _names(loss) if isinstance(loss, nn.Module) else set()
    with suppress(Exception), warnings.catch_warnings(action="ignore"):  # what it creates as it goes may be named too
        made_up = examples(2, 0, case.entry.data)
        loss(model, {name: torch.from_numpy(field) for name, field in made_up.items()})
    names |= _names(model)
    words = {word.strip(".,:;()'\"`") for word in refused.sentence.split()}
    tails = {word.rpartition(".")[2] for word in words}
    return (
        "" if (names - {"", "training"}) & (words | tails) else f"nothing of the module is named: {described(refused)}"
    )


def _names(model: nn.Module) -> set[str]:
    """Of the model's parts, their classes, parameters, buffers and attributes."""
    names = set()
    for path, part in model.named_modules():
        names |= {type(part).__name__, path, *vars(part), *part._parameters.keys(), *part._buffers.keys()}
    return names


def described(refused: Refused) -> str:
    when = "in a round" if refused.made else "when made"
    return f"{type(refused.error).__name__} {when}: {refused.sentence[:200]}"

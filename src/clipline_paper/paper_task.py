"""A task of the paper: its facts as settings, its fields checked, its data a prepared store or a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clipline import Population
from clipline.data import open_store
from clipline.errors import PopulationError
from clipline.settings import STAND_IN
from clipline.tasks import LoadedTask, Task, TrainSettings

from .facts import FACTS

# What one example of a field looks like: its shape (None is any length), and "whole" or "fraction".
Fields = Mapping[str, tuple[tuple[int | None, ...], str]]
Build = Callable[[TrainSettings, Population, Population], LoadedTask]

TEST_FIRST = 1 << 36  # test users are numbered far above any training user, so that nobody is both
STAND_IN_SEED = 2021  # the population is the same whatever the seed of the training


def paper_task(
    name: str,
    *,
    title: str,
    stand_in: Callable[[int, int], Population],
    fields: Fields,
    build: Build,
    test_users: int,
    **options: Any,
) -> Task:
    """The task of this name, with the paper's settings: 100 users a round, z* as noise, C* as fixed clip, C0 = 0.1.

    `stand_in(first, users)` generates users from number `first` on. No epsilon is aimed at: populations of this size
    cannot give one that means anything (section 3 of the paper), so the noise is set and epsilon is what it is.
    """
    facts = FACTS[name]
    settings = TrainSettings(
        task=name,
        rounds=facts.rounds,
        cohort_size=100,
        client_lr=facts.client_lr,
        batch_size=facts.batch_size,
        server="sgd",
        server_lr=facts.server_lr,
        fixed_clip=facts.best_clip,
        population_size=facts.stand_in_users,
        noise_multiplier=facts.noise_at_100,
        clip_start=0.1,
        max_examples=facts.max_examples,
        data=STAND_IN,
        test_users=test_users,
        evaluate_on="validation",
        **options,
    )

    def load(settings: TrainSettings) -> LoadedTask:
        if settings.stored:
            population, test = open_store(str(settings.data), name)
        else:
            population = stand_in(0, settings.drawn_users())
            test = stand_in(TEST_FIRST, settings.test_users or test_users)
        return build(settings, narrowed(population, fields), narrowed(test, fields))

    return Task(name, f"stand-in for {title}", facts.metric_name, settings, load, data=STAND_IN)


def narrowed(population: Population, fields: Fields) -> Population:
    """The population with these fields, checked, and no other: a store may serve two tasks."""
    check_fields(population, fields)
    return Population(population.offsets, {name: population.fields[name] for name in fields}, population.user_ids)


def check_fields(population: Population, fields: Fields) -> Population:
    """The population itself, if it has these fields, whoever made it; otherwise a refusal that names the first."""
    for name, (shape, kind) in fields.items():
        if name not in population.fields:
            known = ", ".join(population.fields)
            raise PopulationError(f"population has no field {name!r} but {known}: prepare it for this task")
        field = population.fields[name]
        same = len(field.shape) == len(shape) + 1 and all(
            want in (None, have) for want, have in zip(shape, field.shape[1:], strict=True)
        )
        if not same or field.dtype.kind not in ("iu" if kind == "whole" else "f"):
            wanted = ", ".join("any" if side is None else str(side) for side in shape)
            raise PopulationError(
                f"field {name!r} is {field.dtype} of shape {field.shape} but must hold {kind} numbers, "
                f"({wanted}) for each example: prepare it for this task"
            )
    return population

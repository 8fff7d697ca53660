"""Many rounds: settings to parts, parts to a trained model, with a budget that is never passed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..engine.choose import ENGINES, Engine, choose_trainer
from ..engine.one_by_one import OneByOne
from ..engine.parallel.group import Backend
from ..engine.parallel.torchrun import TorchrunBackend, Workers, choose_backend
from ..engine.precision import PRECISIONS, Precision
from ..engine.sparse.row_fields import RowFields
from ..errors import SettingError, check_choice, check_number, check_whole, refuse
from ..federated.clip_controllers import ClipController, QuantileClip
from ..federated.local_sgd import LocalSGD, Loss, OnError
from ..federated.mechanism import GaussianMechanism
from ..federated.population import Population
from ..federated.round import Algorithm, TrainState
from ..federated.sampling import relation_for, sampler_named
from ..federated.server_optimisers import ServerOptimiser, ServerSGD
from ..privacy.accountant import account
from ..privacy.calibration import noise_multiplier_for, rounds_within
from ..privacy.events import Sampling
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import Ledger
from ..privacy.relations import Relation
from ..streams import NoiseSource, Streams
from .evaluation import Evaluate, Evaluation
from .interrupt import CtrlC
from .reports import ReportQueue, RoundReport

Stopped = Literal["finished", "budget", "interrupted"]


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model and the guarantee that covers everything seen on the way."""

    model: nn.Module = field(repr=False)
    state: TrainState = field(repr=False)
    guarantee: Guarantee
    metrics: Mapping[str, float]  # of the final model
    reports: tuple[RoundReport, ...] = field(repr=False)
    stopped: Stopped

    def __str__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"{metrics + '; ' if metrics else ''}{self.guarantee}"


class Training:
    """Algorithm 1 on `model` and the users of `population`: checked when it is made, trained by `run()`.

    Give either `epsilon` (the noise is then chosen so that `rounds` rounds spend at most that much) or
    `noise_multiplier` (0: no noise, not private). The rest has the paper's defaults: the median as clip, momentum 0.9
    at the server, cohort_size / 20 as noise on the count, delta = population_size^-1.1. `max_epsilon` stops before the
    round that would pass it.

    `population_size` declares how many users there are, a public constant that is not read from the data. Poisson
    sampling is then at the rate cohort_size / population_size whatever the number of users at hand, and the relation is
    add-or-remove. Left out, the number of users at hand takes its place and is public: the relation is zero-out, with
    the same epsilon. A fixed-size cohort ("fixed") makes that number public too, and the relation is replace-one.

    `loss(model, batch)` returns one number, or one for each example, which trains faster; `batch` maps the population's
    field names to tensors. `engine`, `precision` and `workers` are for speed: see docs/engine.md. `evaluate(model)`
    returns named metrics; it must look at data of users outside the population. `model` itself is never changed.

    A user whose training fails, by a label out of range say, adds nothing and is not within the clip. For study
    `on_error="raise"` shows the error instead, which the guarantee does not cover. What would fail for every user is
    found here, on made-up examples; a loss that cannot take any numbers needs a `trial_batch` (field name -> a few
    examples of your own making).

    `workers` processes share each cohort's users among them; "torchrun": those that torchrun started, of which rank 0
    calls `run()` and the others `serve()`. Their number changes the result by rounding alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        population: Population,
        *,
        rounds: int,
        cohort_size: int,
        local: LocalSGD,
        seed: int,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        population_size: int | None = None,
        sampling: str = "poisson",
        relation: Relation | None = None,
        clip: ClipController | None = None,
        server: ServerOptimiser | None = None,
        count_stddev: float | None = None,
        max_epsilon: float | None = None,
        noise_source: NoiseSource = "seed",
        evaluate: Evaluate | None = None,
        evaluate_every: int = 10,
        device: torch.device | str = "cpu",
        engine: Engine = "auto",
        precision: Precision = "float32",
        row_fields: RowFields | None = None,
        workers: Workers = 1,
        on_error: OnError = "zero",
        trial_batch: Mapping[str, Any] | None = None,
    ) -> None:
        self.population = population
        check_choice("engine", engine, ENGINES)
        check_choice("precision", precision, PRECISIONS)
        self.rounds = check_whole("rounds", rounds, at_least=1, at_most=10**9, way_out="train for at least one round")
        self.evaluate = evaluate
        self.evaluate_every = check_whole(
            "evaluate_every", evaluate_every, at_least=1, way_out="1 is after every round"
        )
        for name, value in (("epsilon", epsilon), ("max_epsilon", max_epsilon)):
            if value is not None:
                check_number(name, value, above=0, way_out="give 4.0, say, or leave it out")
        for name, part, kind, example in (
            ("population", population, Population, "Population.from_arrays(user_ids, x=x, y=y)"),
            ("local", local, LocalSGD, "LocalSGD(lr=0.1)"),
        ):
            if not isinstance(part, kind):
                raise refuse(name, part, f"a {kind.__name__}", f"give {example}")
        if clip is not None and not hasattr(clip, "init"):
            raise refuse("clip", clip, "a clip object", "give FixedClip(1.0)")
        if server is not None and not hasattr(server, "init"):
            raise refuse("server", server, "a server object", "give ServerSGD(1.0)")
        sampler = sampler_named(sampling, len(population), cohort_size, population_size)
        self.declared = population_size is not None
        if self.declared and population.user_ids is None:
            raise refuse(
                "population_size", population_size, "left out where users have no ids",
                "give user_ids: the place in the population would change for others when one user goes",
            )  # fmt: skip
        self.relation = relation_for(sampler.sampling, relation, declared=self.declared)
        self.delta = check_number(
            "delta",
            sampler.population_size**-1.1 if delta is None else delta,
            above=0,
            below=1,
            way_out="population_size^-1.1 is the usual choice",
        )
        self.noise_multiplier = self._resolve_noise(sampler.sampling, epsilon, noise_multiplier)
        self.max_epsilon = epsilon if max_epsilon is None else max_epsilon
        controller = QuantileClip() if clip is None else clip
        if count_stddev is None:
            count_stddev = cohort_size / 20 if self.noise_multiplier > 0 else 0.0  # section 2.1 of the paper
        mechanism = GaussianMechanism(
            cohort_size, self.noise_multiplier, count_stddev if controller.needs_fraction else None
        )
        mechanism.delta_stddev(controller.init().clip)  # refuses a clip that no noise can be made for
        streams = Streams(seed, noise_source)
        self.plain = OneByOne(
            model, loss, population, local, streams, device, precision, row_fields, on_error, trial_batch
        )
        clients = choose_trainer(engine, self.plain, cohort_size, varying=sampling != "fixed")
        workforce = choose_backend(workers, clients, self.plain, sampler.sampling)
        self.algorithm = Algorithm(sampler, clients, workforce, mechanism, server or ServerSGD(), controller, streams)
        self.planned = self.guarantee_of(Ledger().add(self.algorithm.event, self.rounds))

    def run(
        self,
        *,
        observe: Callable[[RoundReport, TrainState], None] | None = None,
        state: TrainState | None = None,
        ctrl_c: CtrlC | None = None,
    ) -> TrainResult:
        """Train, from `state` on if given. Ctrl-C and the budget stop it between two rounds, and the result stands.

        `observe(report, state)` is called for every round, in order; while a round is measured, the next may train.
        """
        state = self.algorithm.init() if state is None else state
        last = state.round_index + self._affordable(state.ledger, self.rounds - state.round_index)
        desk = ReportQueue(observe, limit=2 * self.evaluate_every)
        stopped: Stopped = "finished"
        with (
            Evaluation(self.algorithm.clients.flat, self.evaluate) as evaluation,
            CtrlC() if ctrl_c is None else nullcontext(ctrl_c) as stop,
            self.algorithm.workforce.at_work(),
            ExitStack() as end,
        ):
            end.callback(self.algorithm.ahead.forget)
            while state.round_index < self.rounds:
                if state.round_index >= last:
                    stopped = "budget"
                    break
                if stop.pressed:
                    stopped = "interrupted"
                    break
                begun = time.perf_counter()
                clip = state.clip.clip
                state, release = self.algorithm.round(state, last=state.round_index + 1 >= last)
                fraction_within = release.fraction_within  # once it can be read, the device has done the round
                seconds = time.perf_counter() - begun
                due = state.round_index % self.evaluate_every == 0 or state.round_index == self.rounds
                metrics = evaluation.begin(state.params) if due else None
                if metrics is not None and self.plain.draws_globally:  # both would draw from torch's global generator
                    wait([metrics])
                account_now: Callable[[], Guarantee] = partial(self.guarantee_of, state.ledger)
                if observe is not None:  # who looks on will ask for it: begin at once, beside the next round
                    account_now = evaluation.submit(account_now).result
                report = RoundReport(state.round_index - 1, clip, fraction_within, {}, seconds, account_now)
                desk.hand_in(report, state, metrics)
            desk.finish()
            measured = desk.reports[-1].metrics if desk.reports else {}
            measured = measured or evaluation.begin(state.params).result()
        model = self.algorithm.clients.flat.export(state.params)
        return TrainResult(model, state, self.guarantee_of(state.ledger), measured, tuple(desk.reports), stopped)

    def with_workforce(self, workforce: Backend) -> Training:
        """The same training by another workforce."""
        other = copy.copy(self)
        other.algorithm = replace(self.algorithm, workforce=workforce)
        return other

    @property
    def leads(self) -> bool:
        """Whether this process is to `run()`: all are, but for torchrun's ranks above 0, which `serve()`."""
        workforce = self.algorithm.workforce
        return not isinstance(workforce, TorchrunBackend) or workforce.place.leads

    def serve(self) -> None:
        """On torchrun's ranks above 0: train what rank 0 asks for, until its `run()` ends."""
        workforce = self.algorithm.workforce
        if not isinstance(workforce, TorchrunBackend) or workforce.place.leads:
            raise refuse("workers", workforce.size, "'torchrun' and the rank above 0 to serve", "call run()")
        workforce.serve()

    def guarantee_of(self, ledger: Ledger) -> Guarantee:
        """What these rounds promise, at this training's delta and relation."""
        return account(ledger, delta=self.delta, relation=self.relation)

    def _resolve_noise(self, sampling: Sampling, epsilon: float | None, noise_multiplier: float | None) -> float:
        if epsilon is None and noise_multiplier is None:
            raise SettingError(
                "epsilon=None and noise_multiplier=None, but one of them must be set: give epsilon=4.0, say, or "
                "noise_multiplier=0 to train without privacy"
            )
        if noise_multiplier is None:
            assert epsilon is not None
            return noise_multiplier_for(
                sampling=sampling, rounds=self.rounds, epsilon=epsilon, delta=self.delta, relation=self.relation
            )
        if epsilon is not None:
            raise SettingError(
                f"{epsilon=} and {noise_multiplier=} are both set but one follows from the other: drop one of them, or "
                "give the limit as max_epsilon"
            )
        return check_number("noise_multiplier", noise_multiplier, at_least=0, way_out="0 is no noise and no privacy")

    def _affordable(self, ledger: Ledger, remaining: int) -> int:
        """How many of the remaining rounds the budget allows: every round is the same event, so this is known at once.

        Asked of the same accountant that chose the noise, for the whole plan first: a plan that was calibrated to the
        budget is not cut short.
        """
        if self.max_epsilon is None:
            return remaining
        return rounds_within(
            self.algorithm.event,
            epsilon=self.max_epsilon,
            delta=self.delta,
            relation=self.relation,
            after=ledger,
            at_most=remaining,
        )

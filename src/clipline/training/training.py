"""The public class: a model, a loss and users become a private training, checked when it is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.population import Population
from ..engine.choose import choose_backend, choose_trainer, make_problem
from ..engine.core.one_by_one import OneByOne
from ..engine.core.personal import PersonalStore
from ..engine.core.working_model import check_module, uncompiled
from ..engine.gpu.programs.program_cache import ProgramCounts
from ..engine.stacked.trainer import Stacked
from ..engine.trial_warnings import warn_of_ranges, warn_of_rate
from ..engine.workers.torchrun import TorchrunBackend
from ..errors import HopelessNoiseWarning, RunError, SettingError, refuse, shown
from ..federated.clip_controllers import ClipController, QuantileClip, checked_clip
from ..federated.local_sgd import LocalSGD, LocalTraining, Loss, OnError
from ..federated.mechanism import BandedMechanism, BandedNoise, GaussianMechanism, IndependentNoise
from ..federated.round import Algorithm, TrainState
from ..federated.sampling import (
    GroupedPoissonSampler,
    KnownSampler,
    relation_for,
    sampler_named,
    warn_of_declared_users,
)
from ..federated.server_optimisers import (
    AveragedServer,
    ServerNormalised,
    ServerOptimiser,
    ServerSGD,
    for_rounds,
    largest_fan_in,
    scheduled,
)
from ..lr_schedules import tabulated
from ..privacy.accountant import account
from ..privacy.banded_noise import choose_bands
from ..privacy.calibration import noise_multiplier_for, rounds_within
from ..privacy.feasibility import Verdict, noise_norm, verdict
from ..privacy.guarantee import Guarantee, default_delta, warn_of_delta
from ..privacy.ledger import Ledger
from ..privacy.noise_split import default_count_stddev
from ..privacy.relations import Relation
from ..random.streams import Streams
from ..settings import check
from ..synonyms import SYNONYMS, meant, refuses_unknown_keywords
from .callbacks import Callback
from .diagnosis import hopeless_text
from .loop import Run, drive
from .options import Compute, Privacy, Upload
from .result import TrainResult
from .run_directory import checked_path, directory_first

_PARTS = {
    "privacy": Privacy,
    "local": LocalSGD,
    "clip": QuantileClip,
    "server": ServerSGD,
    "compute": Compute,
    "noise": BandedNoise,
}


def _misplaced(name: str, value: object, known: Iterable[str]) -> SettingError:
    """The error for a keyword that `Training` has not.

    Of the settings' names those of the command line count too, and those that other libraries have for them.
    """
    if SYNONYMS.get(name) == "clip":  # `LocalSGD` has a clip_norm too, which has nothing to do with privacy
        return SettingError(
            f"{name}={shown(value)} is no argument of Training: give clip=FixedClip({shown(value)}), or leave it out, "
            "and the clip follows the median of the users' norms"
        )
    for word in (name, SYNONYMS.get(name, name)):
        for keyword, part in _PARTS.items():
            for taken in fields(part):
                if word in (taken.name, taken.metadata.get("setting")):
                    place = f"{keyword}={part.__name__}({taken.name}={shown(value)})"
                    return SettingError(
                        f"{name}={shown(value)} is no argument of Training but of {part.__name__}: give {place}"
                    )
    return SettingError(
        f"{name}={shown(value)} is no argument of Training, nor of its parts: {meant(name, [*known][1:])}"
    )


class Training:
    """Algorithm 1 on a model and the users of a population: checked when it is made, trained by `run()`.

    `privacy` decides the promise, `compute` only the time. The rest decides the result.

    If training fails for a user, by a label out of range for instance, that user contributes a zero update and is not
    within the clip. A `ValueRangeWarning` says which values the loss cannot take. What would fail for every user is
    found here, on made-up examples.

    Args:
      model: Any module. It is never changed. Only parameters that require a gradient are trained. Its frozen parameters
        are read where they are: leave them alone until the training has ended.
      loss: `loss(model, batch)` returns one number, or one for each example, which trains faster. `batch` maps field
        names to tensors. `loss(model, batch, reference)` is given the round's parameters too, by name.
      population: The users.
      rounds: Number of rounds.
      cohort_size: Users of a round: expected under Poisson sampling, exact under fixed-size sampling.
      local: How a user trains, `LocalSGD` or `LocalAdam`.
      privacy: The promise.
      clip: How the clip is chosen. Left out, it tracks the median.
      server: What the server does with the mean update. Left out, `ServerNormalised()`, which needs no rate; the
        paper has `ServerSGD()`.
      compute: Device, precision and workers.
      seed: Repeats a run: cohorts and noise come from it, and whoever knows it can subtract the noise. Left out, every
        run has a secret key from the operating system, whose file is deleted when the run has finished.
      on_error: "zero" as above. "raise" shows a user's error, for study; the guarantee does not cover that, and says
        so.
      trial_batch: Field name to a few examples of your own making, for a loss that cannot take any numbers.
      preprocessing: Private statistics that were used, as a `PrivateStatistics` or a list of what it released. Noise,
        budget and guarantee count them, once each. Those by which `population` was made need not be named.
      personal: Parameters (or patterns, "user_vector.*") that stay with their user from round to round. They are
        neither clipped, summed nor released: private data outside the guarantee. Poisson sampling only.
      noise: `IndependentNoise()` or `BandedNoise()`.
      upload: Encodes what users send as a federation would: `SecureSum`, `Quantised` or `RandomMask`. One process only.
      average: Give, measure and save the exponential average of the released models, which costs no privacy. Left out,
        this is done if the server is `ServerNormalised`.

    Raises:
      SettingError: If a setting is outside its limits or contradicts another one.
      ModuleError: If the model cannot be trained privately as it is.

    Example:
      >>> training = cl.Training(
      ...     model, loss, people, rounds=200, cohort_size=100,
      ...     local=cl.LocalSGD(lr=0.1), privacy=cl.Privacy(epsilon=4.0),
      ... )
      >>> result = training.run([cl.Progress()])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        population: Population,
        *,
        rounds: int,
        cohort_size: int,
        local: LocalTraining,
        privacy: Privacy,
        clip: ClipController | None = None,
        server: ServerOptimiser | None = None,
        compute: Compute | None = None,
        seed: int | None = None,
        on_error: OnError = "zero",
        trial_batch: Mapping[str, Any] | None = None,
        preprocessing: Iterable[Any] = (),
        personal: Sequence[str] = (),
        noise: IndependentNoise | BandedNoise | None = None,
        upload: Upload | None = None,
        average: bool | None = None,
    ) -> None:
        clip = QuantileClip() if clip is None else clip
        noise = IndependentNoise() if noise is None else noise
        server = ServerNormalised() if server is None else server
        compute = Compute() if compute is None else compute
        parts = {"clip": clip, "server": server, "compute": compute, "noise": noise}
        _check_parts({"population": population, "local": local, "privacy": privacy, **parts})
        check_module(uncompiled(model))
        compute = compute.resolved(sum(p.numel() for p in model.parameters() if p.requires_grad), cohort_size)
        check("rounds", rounds)
        self.rounds = rounds
        local = replace(local, lr_schedule=tabulated(local.lr_schedule, rounds))  # a function is asked here only
        server = for_rounds(server, rounds, largest_fan_in(model))
        if upload is not None and (not hasattr(upload, "simulated") or isinstance(upload, type)):
            raise refuse("upload", upload, "SecureSum, Quantised or RandomMask", "give SecureSum(bits=18), say")
        if not isinstance(average, bool | None):
            raise refuse("average", average, "True, False or left out", "True gives the average of released models")
        self.average = isinstance(server, ServerNormalised) if average is None else average
        noise_source = privacy.noise_source or ("system" if seed is None else "seed")
        privacy = replace(privacy, noise_source=noise_source)
        if seed is None and noise_source == "seed":
            raise refuse("seed", None, "given where noise_source='seed'", "give seed=7, or leave noise_source out")
        streams = Streams(0 if seed is None else seed, noise_source)
        self.population, self.cohort_size, self.local, self.seed = population, cohort_size, local, seed
        self.privacy, self.compute, self.clip, self.server = privacy, compute, clip, server
        sampler: KnownSampler = sampler_named(privacy.sampling, len(population), cohort_size, privacy.population_size)
        self.declared = privacy.population_size is not None
        if self.declared and population.user_ids is None:
            raise refuse(
                "population_size", privacy.population_size, "left out where users have no ids",
                "give user_ids: the place in the population would change for others when one user goes",
            )  # fmt: skip
        warn_of_declared_users(sampler.population_size, len(population), cohort_size)
        self.relation = relation_for(sampler.sampling, privacy.relation, declared=self.declared)
        self.delta = default_delta(sampler.population_size) if privacy.delta is None else privacy.delta
        single = hasattr(preprocessing, "event") or not isinstance(preprocessing, Iterable)  # the latter is refused
        named: list[Any] = [getattr(one, "event", one) for one in ([preprocessing] if single else preprocessing)]
        self.preprocessing = Ledger().with_statistics([*population.charges, *named])  # before the first round
        _check_units(self.preprocessing, population)
        bands = self._bands_of(noise, sampler.population_size)
        self.noise = BandedNoise(bands) if bands > 1 else IndependentNoise()
        if bands > 1:
            identities = population.identities(np.arange(len(population)))
            sampler = GroupedPoissonSampler.of(identities, sampler.population_size, cohort_size, bands)
        if privacy.noise_multiplier is not None:
            self.noise_multiplier = privacy.noise_multiplier
        else:
            assert privacy.epsilon is not None
            self.noise_multiplier = noise_multiplier_for(
                sampling=sampler.sampling,
                rounds=self.rounds,
                epsilon=privacy.epsilon,
                delta=self.delta,
                relation=self.relation,
                after=self.preprocessing,
            )
        self.max_epsilon = privacy.epsilon if privacy.max_epsilon is None else privacy.max_epsilon
        if self.noise_multiplier > 0:
            warn_of_delta(self.delta, sampler.population_size)
        count_stddev = privacy.count_stddev
        if count_stddev is None:
            count_stddev = default_count_stddev(cohort_size, self.noise_multiplier)
        mechanism = GaussianMechanism(cohort_size, self.noise_multiplier, count_stddev if clip.needs_fraction else None)
        if bands > 1:
            mechanism = BandedMechanism(cohort_size, self.noise_multiplier, mechanism.count_stddev, bands, rounds)
        mechanism.delta_stddev(checked_clip(clip.init(), "init()").clip)  # refuses a clip that no noise can be made for
        self.sgd_lr = server.lr if isinstance(server, ServerSGD) else None  # a rate to be warned of
        stepping = scheduled(server, rounds)
        stepping = AveragedServer(stepping) if self.average else stepping
        self.algorithm = Algorithm(sampler, mechanism, stepping, clip)
        self.problem = make_problem(
            model,
            loss,
            population,
            local,
            streams,
            compute.device,
            precision=compute.precision,
            row_fields=compute.row_fields,
            on_error=on_error,
            trial_batch=trial_batch,
            fast=compute.fast,
            rounds=rounds,
            personal=personal,
        )
        self.key = streams.key
        self.at_work = False  # in a run, which has a key of its own
        # Whether a round that is run again releases the same numbers. On a GPU its sum may round otherwise, and the
        # same noise twice would then show the difference: from the system such a round is another one, and charged.
        self.replays = noise_source == "seed" or self.problem.device.type == "cpu"
        if personal and privacy.sampling == "fixed":
            # Others' rows depend on whether they were drawn, and in a cohort of fixed size that depends on one user.
            raise refuse("personal", list(personal), "left out where sampling='fixed'", "take sampling='poisson'")
        self.personal_names = list(personal)
        self.personal = PersonalStore(self.problem.model.initial_personal) if personal else None
        self.one_by_one = OneByOne(self.problem)
        varying = privacy.sampling != "fixed"
        self.trainer = choose_trainer(compute.engine, self.one_by_one, cohort_size, varying=varying)
        warn_of_ranges(self.problem)
        warn_of_rate(self.problem, self.one_by_one.made_up)
        assert compute.workers is not None, "resolved above"
        self.upload = upload
        self.federation: Mapping[str, Any] | None = None  # what the card of a federation's model tells of it
        if upload is None:
            self.backend = choose_backend(compute.workers, self.trainer, self.problem, sampler.sampling)
        else:
            self.algorithm, self.backend = upload.simulated(self)
        self.planned = self.guarantee_of(self.preprocessing.add(self.algorithm.event, self.rounds))

    def __repr__(self) -> str:
        """What is planned, without a number of the data."""
        return f"<Training of {self.dim:,} parameters, {self.cohort_size:,} users a round: {self.planned}>"

    def _bands_of(self, noise: IndependentNoise | BandedNoise, population_size: int) -> int:
        """How many bands the noise has; refused where it cannot be accounted."""
        if isinstance(noise, IndependentNoise) or noise.bands == 1:
            return 1
        if self.privacy.sampling == "fixed":
            raise refuse("noise", "BandedNoise", "IndependentNoise where sampling='fixed'", "take sampling='poisson'")
        if self.declared and self.population.example_level:  # who is removed changes the places, and so the groups
            raise refuse("noise", "BandedNoise", "IndependentNoise where population_size is declared for one_each",
                         "leave population_size out")  # fmt: skip
        if isinstance(noise.bands, int):
            return noise.bands
        if self.privacy.epsilon is None:
            raise refuse("bands", noise.bands, "a number where noise_multiplier is given", "give bands=8, or epsilon")
        return choose_bands(
            cohort_size=self.cohort_size, population_size=population_size, rounds=self.rounds,
            epsilon=self.privacy.epsilon, delta=self.delta, relation=self.relation,
        )  # fmt: skip

    @property
    def dim(self) -> int:
        """Number of trained parameters."""
        return self.problem.model.dim

    @property
    def noise_norm(self) -> float:
        """How long the noise on the mean update is, in clips: up to 1 a model can train, from 2 on hardly any can.

        Of banded noise the part that stays in the models.
        """
        mechanism = self.algorithm.mechanism
        lasting = float(mechanism.delta_noise_multiplier) * mechanism.lasting_share
        return noise_norm(lasting, self.cohort_size, self.dim)

    @property
    def device(self) -> torch.device:
        """The device on which users train."""
        return self.problem.device

    @property
    def engine(self) -> str:
        """How users train, in words: stacked or one by one, and why. On a GPU it may change while users train."""
        return self.trainer.in_words

    @property
    def programs(self) -> ProgramCounts:
        """How many programs and recordings a GPU's steps have taken so far: compiled, recorded. Else zeros.

        They depend on how many users were drawn together: the guarantee does not cover them.
        """
        return self.trainer.programs if isinstance(self.trainer, Stacked) else ProgramCounts()

    @property
    def workers(self) -> int:
        """Number of processes that train."""
        return self.backend.size

    def init(self) -> TrainState:
        """The state before round 0."""
        return replace(self.algorithm.init(self.problem.model.initial.clone()), ledger=self.preprocessing)

    def run(self, callbacks: Sequence[Callback] = (), *, state: TrainState | None = None) -> TrainResult:
        """Train. The budget may stop the run between two rounds, and the result stands.

        It prints nothing and takes over no signal: give `Progress()` and `StopOnInterrupt()` for that.

        Args:
          callbacks: Called as rounds end, in order.
          state: Where to begin, if not at the start.

        Returns:
          The model, its guarantee, metrics, and `findings` that say whether the training failed.

        Raises:
          CliplineError: If a callback or a worker failed. A `HopelessNoiseWarning` comes before the first round if the
            noise on the mean update is longer than 2 clips.

        Example:
          >>> result = training.run([cl.Progress(), cl.RunDirectory("runs/rides")])
        """
        return self._run(callbacks, state)

    def check_idle(self) -> None:
        """Refuse a second run beside one that is at work: it would take the key away from it."""
        if self.at_work:
            raise RunError(
                "this Training is at work in a run, which a second one would take the key from",
                "make another Training for it, or wait until the run has ended",
            )

    def _run(self, callbacks: Sequence[Callback], state: TrainState | None, *, again: bool = False) -> TrainResult:
        if verdict(self.noise_norm) is Verdict.HOPELESS:
            warnings.warn(hopeless_text(self.noise_norm), HopelessNoiseWarning, stacklevel=3)
        (result,) = drive([Run(self, callbacks, state, again=again)], self.backend)
        return result

    def resume(self, path: Path | str, callbacks: Sequence[Callback] = ()) -> TrainResult:
        """Go on with an interrupted run from its last checkpoint.

        This training must be made as that one was: model, data, settings and versions are compared first.

        Args:
          path: The run directory.
          callbacks: May have a `RunDirectory` of that path; without one it is added.

        Returns:
          The result, as of `run`.

        Raises:
          RunError: If there is no checkpoint, or something differs.

        Example:
          >>> result = training.resume("runs/rides", [cl.Progress()])
        """
        self.check_idle()
        directory, callbacks = directory_first(checked_path(path), callbacks)
        with closing(directory):
            return self._run(callbacks, directory.reopen(self), again=True)

    def model_at(self, state: TrainState) -> nn.Module:
        """The model that a run would give if it ended in this state.

        Args:
          state: As a callback is given it.

        Returns:
          A new module like the one given, on the CPU.
        """
        return self.problem.model.export(state.returned)

    def unprivate_personal(self) -> dict[Any, dict[str, Tensor]]:
        """Personal parameters of each user who took part, after the last round: private data, without noise.

        Returns:
          User (by id, or by place in a population without ids) to parameters by name.
        """
        if self.personal is None:
            return {}
        ids, shapes = self.population.user_ids, self.problem.model.personal_pieces
        named = {user: shapes(row.unsqueeze(0)) for user, row in self.personal.latest.items()}
        return {
            user if ids is None else ids[user].item(): {name: piece[0] for name, piece in own.items()}
            for user, own in named.items()
        }

    @property
    def leads(self) -> bool:
        """Whether this process is to `run()`: all are, but for torchrun's ranks above 0, which `serve()`."""
        return not isinstance(self.backend, TorchrunBackend) or self.backend.rank.leads

    def serve(self) -> None:
        """On torchrun's ranks above 0: train what rank 0 asks for, until its `run()` ends."""
        if not isinstance(self.backend, TorchrunBackend) or self.backend.rank.leads:
            raise refuse("workers", self.backend.size, "'torchrun' and the rank above 0 to serve", "call run()")
        self.backend.serve()

    def guarantee_of(self, ledger: Ledger) -> Guarantee:
        """What these rounds promise, at this training's delta and relation.

        Args:
          ledger: Their events.

        Returns:
          The guarantee.
        """
        return self.accounting(ledger)()

    def accounting(self, ledger: Ledger) -> Callable[[], Guarantee]:
        """What computes `guarantee_of(ledger)`; holds neither data nor loss, and can be pickled."""
        return partial(
            _guarantee,
            ledger,
            self.delta,
            self.relation,
            from_seed=self.privacy.noise_source == "seed",
            example_level=self.population.example_level,
            shows_errors=self.problem.on_error == "raise",
        )

    def affordable(self, state: TrainState) -> int:
        """How many of the rounds that remain the budget allows after what is spent.

        A plan that was calibrated to the budget is not cut short.

        Args:
          state: What was done so far.

        Returns:
          Number of rounds.
        """
        remaining = self.rounds - state.round_index
        if self.max_epsilon is None:
            return remaining
        return rounds_within(
            self.algorithm.next_event(state),
            epsilon=self.max_epsilon,
            delta=self.delta,
            relation=self.relation,
            after=state.ledger,
            at_most=remaining,
        )


refuses_unknown_keywords(Training, _misplaced)


def _guarantee(
    ledger: Ledger, delta: float, relation: Relation, *, from_seed: bool, example_level: bool, shows_errors: bool
) -> Guarantee:
    found = account(ledger, delta=delta, relation=relation)
    seeded = from_seed or found.from_seed
    return replace(found, from_seed=seeded, example_level=example_level, shows_errors=shows_errors)


def _check_units(statistics: Ledger, population: Population) -> None:
    """Refuse a statistic of another unit of privacy: one example counts for 1 in it, where a user may have many.

    The other way round is no better: one example changes its user's vector, by up to 2.
    """
    for event in statistics.events:
        assert event.statistic is not None, "no rounds yet"
        if event.statistic.example_level != population.example_level:
            made, here = ("example", "user") if event.statistic.example_level else ("user", "example")
            raise refuse(
                "preprocessing", event.statistic.name, f"{here}-level, as this training is, and it is {made}-level",
                "release it again from the population that is trained on (a vocabulary of one_each: user_ids=None)",
            )  # fmt: skip


def _users_of(data: object) -> str:
    """How to make a population of what was given, as an example."""
    frame = hasattr(data, "columns") or hasattr(data, "column_names")
    if isinstance(data, torch.utils.data.DataLoader | torch.utils.data.Dataset):
        whole = "loader.dataset" if isinstance(data, torch.utils.data.DataLoader) else "dataset"
        return f"Population.from_dataset({whole}, user_ids)"
    return 'Population.from_dataframe(frame, user="...")' if frame else "Population.from_arrays(user_ids, x=x, y=y)"


def _check_parts(given: Mapping[str, object]) -> None:
    """Refuse objects of another kind: an old keyword's value, say."""
    kinds: dict[str, tuple[Any, str, str]] = {
        "population": (Population, "a Population", _users_of(given["population"])),
        "local": (LocalTraining, "a LocalSGD or LocalAdam", "LocalSGD(lr=0.1)"),
        "privacy": (Privacy, "a Privacy", "Privacy(epsilon=4.0)"),
        "compute": (Compute, "a Compute", 'Compute(device="cuda")'),
        "noise": (
            IndependentNoise | BandedNoise, "a BandedNoise or an IndependentNoise",
            "BandedNoise(), or privacy=Privacy(noise_multiplier=1.0) for how much noise there is",
        ),
    }  # fmt: skip
    for name, (kind, named, example) in kinds.items():
        if not isinstance(given[name], kind):
            raise refuse(name, given[name], named, f"give {example}")
    for name, example in (("clip", "FixedClip(1.0)"), ("server", "ServerSGD(1.0)")):
        if not hasattr(given[name], "init") or isinstance(given[name], type):
            raise refuse(name, given[name], f"a {name} object", f"give {example}")

"""Trainings with banded noise: what they cost, how they go on, and what is refused."""

import json
import math
import os
import re
import shutil
from contextlib import closing

import numpy as np
import pytest
import scipy
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from samples import Gone, StopAfter, linear_float32, small_population, small_training

import clipline as cl
from clipline.cli.study import check as check_command
from clipline.data.population import Population
from clipline.errors import SettingError
from clipline.federated import mechanism
from clipline.privacy.events import GaussianEvent, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.study.report.reading import read_run_directory
from clipline.training.callbacks import Callback
from clipline.training.durable import save_tensors
from clipline.training.side_by_side import run_together
from clipline.trust.verify import verify

BANDS, ROUNDS, M, USERS = 4, 14, 10, 200
PEOPLE = small_population(USERS)


def plain(**options):
    """The same training with independent noise."""
    privacy = cl.Privacy(noise_multiplier=0.8)
    return small_training(ROUNDS, cohort_size=M, population=PEOPLE, privacy=privacy, server=None, **options)


def made(source="seed", bands=BANDS, rounds=ROUNDS, privacy=None, workers=1, **options):
    privacy = cl.Privacy(**{"noise_multiplier": 0.8, "noise_source": source, **(privacy or {})})
    options = {"seed": 3 if source == "seed" else None, "cohort_size": M, "population": PEOPLE, **options}
    compute, noise = cl.Compute(workers=workers), cl.BandedNoise(bands)
    return small_training(rounds, privacy=privacy, compute=compute, noise=noise, server=None, **options)


def blocks(count, training):
    """The ledger that so many blocks cost."""
    return Ledger().add(GaussianEvent(PoissonSampling(BANDS * M / USERS), training.noise_multiplier), count)


def killed(folder, rounds, training, forget=(), **given):
    """A run that is killed once so many rounds are released leaves this folder, less what is forgotten."""
    left = folder.with_name("left")

    class Killed(Callback):
        def on_release(self, state):
            if state.round_index >= rounds:
                shutil.copytree(folder, left)
                raise Gone

    with pytest.raises(Gone):
        training.run([cl.RunDirectory(folder, **given), Killed()])
    shutil.rmtree(folder)
    left.rename(folder)
    for name in forget:
        (folder / name).unlink()


def same(one, other):
    return torch.equal(one.state.params, other.state.params) and one.state.clip == other.state.clip


def test_one_band_trains_as_independent_noise_does():
    one, other = made(bands=1).run(), plain().run()
    assert same(one, other)
    assert one.state.ledger == other.state.ledger
    assert not same(one, made().run())


def test_epsilon_buys_the_noise_that_the_rounds_in_groups_need():
    training = made(privacy={"epsilon": 3.0, "noise_multiplier": None})
    result = training.run()
    assert 2.999 < result.guarantee.epsilon <= 3.0
    assert result.guarantee == training.planned
    assert training.guarantee_of(blocks(4, training)).epsilon == result.guarantee.epsilon  # ceil(14 / 4)
    assert "from groups in turn, banded noise, 14 rounds" in str(result.guarantee)
    chosen = made(bands="auto", privacy={"epsilon": 3.0, "noise_multiplier": None})
    lasting = [one.algorithm.mechanism.lasting_share * one.noise_multiplier for one in (chosen, training)]
    assert chosen.noise.bands in (2, 4, 6)
    assert lasting[0] <= lasting[1] * 1.005


@pytest.mark.parametrize("rounds", [1, 4, 5, 13])
def test_a_run_that_is_stopped_costs_the_blocks_that_it_began(rounds):
    training = made()
    result = training.run([StopAfter(rounds)])
    assert result.guarantee.rounds == rounds
    assert result.guarantee.epsilon == training.guarantee_of(blocks(math.ceil(rounds / BANDS), training)).epsilon


def test_a_budget_ends_between_blocks_and_early_stopping_charges_all_rounds():
    limit = made().guarantee_of(blocks(3, made())).epsilon
    result = made(privacy={"max_epsilon": limit * 1.0001}).run()
    assert (result.stopped, result.state.round_index) == ("budget", 3 * BANDS)

    same_again = cl.Evaluate(lambda model: {"accuracy": 0.5}, every=1)
    early = made().run([same_again, cl.EarlyStopping("accuracy", patience=2)])
    assert early.stopped == "early"
    assert early.state.round_index < ROUNDS
    assert early.guarantee == made().planned


@pytest.mark.parametrize("source", ["seed", "system"])
def test_a_run_that_was_interrupted_goes_on_with_the_same_noise(tmp_path, source):
    made(source).run([cl.RunDirectory(tmp_path / "r"), StopAfter(6)])
    training = made(source)
    result = training.resume(tmp_path / "r")
    ledger = Ledger.read(tmp_path / "r" / "ledger.jsonl")
    assert ledger.entries == ((training.algorithm.event, ROUNDS),)  # one noise, in which blocks count once
    assert result.guarantee.epsilon == training.guarantee_of(blocks(4, training)).epsilon
    assert source == "system" or same(result, made().run())
    assert not (tmp_path / "r" / "checkpoint.safetensors").exists()


def test_a_checkpoint_keeps_earlier_noise_to_the_last_bit(tmp_path):
    interrupted = made("system").run([cl.RunDirectory(tmp_path / "r"), StopAfter(6)])
    if os.name == "posix":  # whoever has earlier noise can subtract it
        assert (tmp_path / "r" / "checkpoint.safetensors").stat().st_mode & 0o077 == 0
    again = made("system")
    with closing(cl.RunDirectory(tmp_path / "r")) as directory:
        noise = directory.reopen(again).noise
    kept = interrupted.state.noise.unprivate_earlier
    assert len(kept) == BANDS - 1
    assert all(one.any() for one in kept)
    assert all(map(torch.equal, noise.unprivate_earlier, kept))
    assert (noise.index, noise.next_round, noise.made_by) == (6, 6, again.algorithm.mechanism)


def test_rounds_that_are_run_again_with_the_same_noise_are_charged_once(tmp_path):
    folder = tmp_path / "r"
    killed(folder, 11, made(), checkpoint_every=3)
    result = made().resume(folder)
    assert same(result, made().run())
    assert result.guarantee == made().planned
    assert Ledger.read(folder / "ledger.jsonl").entries == ((made().algorithm.event, ROUNDS),)


def test_rounds_that_are_run_again_with_other_noise_share_none_with_the_lost_ones(tmp_path):
    """Otherwise a user of the round before would be seen twice through one draw, which no number of rounds covers."""
    folder = tmp_path / "r"
    killed(folder, 6, made("system"), ["resume.key"])
    result = (again := made("system")).resume(folder)
    lost, rest = Ledger.read(folder / "ledger.jsonl").entries
    assert lost == (again.algorithm.event, 6)
    assert rest[0] == again.algorithm.event  # a noise of its own, from its round 0
    begun = ROUNDS - rest[1]  # the round from which on they were run again
    assert begun < 6
    charged = math.ceil(6 / BANDS) + math.ceil((ROUNDS - begun) / BANDS)
    assert result.guarantee.epsilon == again.guarantee_of(blocks(charged, again)).epsilon
    assert result.guarantee.epsilon > again.planned.epsilon
    run = read_run_directory(folder)
    assert (run.problems, run.promise.epsilon) == ([], result.guarantee.epsilon)


class Kept(Callback):
    """Keeps the state after six rounds, and may end the run there."""

    def __init__(self, fails=False):
        self.fails = fails

    def on_round(self, report, state):
        if state.round_index == 6:
            self.state = state
            if self.fails:
                raise Gone


def test_a_state_gives_its_noise_to_one_run_only_unless_that_is_the_same_again():
    for source in ("seed", "system"):
        kept, training = Kept(), made(source)
        whole = training.run([kept])
        again = training.run(state=kept.state)
        entries = again.state.ledger.entries
        assert [count for _, count in entries] == ([6, 8] if source == "system" else [14])
        assert same(again, whole) == (source == "seed")
    # A user's group, and so the rounds between two in which the user comes, may be another in another training.
    for other in (made("system", 2), made("system"), made("system", population=small_population(USERS + 1))):
        entries = other.run(state=kept.state).state.ledger.entries
        assert [(event.index, count) for event, count in entries] == [(0, 6), (0, 8)]
    assert plain().run(state=kept.state).state.noise is None


def test_noise_from_a_seed_does_not_begin_anew_between_rounds():
    """A seed draws the same numbers for these rounds again: the difference of two noises made of them has no noise."""
    made().run([kept := Kept()])
    plain().run([of_plain := Kept()])
    for other, state in ((made(), kept.state), (made(seed=4), kept.state), (made(bands=2), kept.state),
                         (made(), of_plain.state)):  # fmt: skip
        with pytest.raises(SettingError, match=r"state='of round 6 of another training' must be .* resume its run dir"):
            other.run(state=state)
    assert same(made().run(state=made().init()), made().run())  # before its first round nothing was drawn


def test_a_checkpoint_whose_noise_is_lost_is_not_resumed_with_the_same_seed(tmp_path):
    folder = tmp_path / "r"
    made().run([cl.RunDirectory(folder), StopAfter(6)])
    file = folder / "checkpoint.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = {**opened.metadata(), "noise": "null"}
    save_tensors({name: value for name, value in load_file(file).items() if "noise" not in name}, file, metadata)
    with pytest.raises(SettingError, match="take noise_source='system'"):
        made().resume(folder)


def test_a_run_goes_on_with_the_same_coefficients_to_the_last_bit_or_not_at_all(tmp_path, monkeypatch):
    made().run([cl.RunDirectory(tmp_path / "r"), StopAfter(6)])
    with pytest.raises(cl.CliplineError, match=r"noise\.bands = 4' then, 'noise\.bands = 2' now"):
        made(bands=2).resume(tmp_path / "r")
    with monkeypatch.context() as other:
        other.setattr(scipy, "__version__", "0.0.1")
        with pytest.raises(cl.CliplineError, match=r"'scipy version: 0\.0\.1' now"):
            made().resume(tmp_path / "r")
        made(bands=1).run([cl.RunDirectory(tmp_path / "one"), StopAfter(6)])
        other.setattr(scipy, "__version__", "0.0.2")  # by which independent noise is not decided
        assert same(made(bands=1).resume(tmp_path / "one"), made(bands=1).run())

    def off(rounds, bands, computed=mechanism.band_coefficients):
        first, second, *rest = computed(rounds, bands)
        return first, math.nextafter(second, 1.0), *rest

    with monkeypatch.context() as other:
        other.setattr(mechanism, "band_coefficients", off)
        with pytest.raises(cl.CliplineError, match=r"'coefficients of the noise: \w{16}' then, 'coefficients of"):
            made().resume(tmp_path / "r")
    assert same(made().resume(tmp_path / "r"), made().run())


def test_noise_that_a_run_directory_holds_goes_on_from_there_alone(tmp_path):
    """Two runs that go on with the same earlier noise, one from the file and one from the state, share it."""
    training = made("system")
    interrupted = training.run([cl.RunDirectory(tmp_path / "r"), StopAfter(6)])
    here = training.run(state=interrupted.state)
    assert [count for _, count in here.state.ledger.entries] == [6, 8]
    there = made("system").resume(tmp_path / "r")
    assert [count for _, count in there.state.ledger.entries] == [14]
    alone = (one := made("system")).run([StopAfter(6)])
    assert [count for _, count in one.run(state=alone.state).state.ledger.entries] == [14]


def test_a_state_of_a_run_that_failed_does_not_share_its_noise_with_the_folder(tmp_path):
    training, failing = made("system"), Kept(fails=True)
    with pytest.raises(Gone):
        training.run([cl.RunDirectory(tmp_path / "r"), failing])
    here = training.run(state=failing.state)
    there = made("system").resume(tmp_path / "r")
    counts = [[count for _, count in one.state.ledger.entries] for one in (here, there)]
    assert sorted(counts) == [[6, 8], [14]]


def test_a_noise_is_stored_in_one_folder_only(tmp_path):
    two = [cl.RunDirectory(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(SettingError, match="two run directories"):
        made("system").run(two)
    made("seed", bands=1).run(two)  # from a key that both would have it is refused too: test_resume_attacks.py


def renamed(*, users=USERS, name=str):
    names = np.repeat([name(user) for user in range(users)], 3)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((len(names), 6)), rng.integers(0, 3, len(names))
    return Population.from_arrays(names, x=x.astype(np.float32), y=y)


@pytest.mark.parametrize("source", ["seed", "system"])
def test_a_run_does_not_go_on_with_a_user_who_is_renamed_or_added(tmp_path, source):
    """Under another name a user may be in another group, and so come twice within the rounds that share noise."""
    privacy, people = {"population_size": USERS}, renamed()
    made(source, privacy=privacy, population=people).run([cl.RunDirectory(tmp_path / "r"), StopAfter(6)])
    others = [renamed(name=lambda user: "x" if user == 7 else str(user)), renamed(users=USERS + 1)]
    for other in others:
        with pytest.raises(cl.CliplineError, match="the data have changed: restore them"):
            made(source, privacy=privacy, population=other).resume(tmp_path / "r")
    assert made(source, privacy=privacy, population=people).resume(tmp_path / "r").guarantee.rounds == ROUNDS


def test_noise_that_begins_anew_is_charged_before_the_budget_is(tmp_path):
    """Blocks that are not full are paid for twice, by a run that was killed and goes on with other noise."""
    privacy = {"epsilon": 3.0, "noise_multiplier": None}
    killed(tmp_path / "r", 6, made("system", privacy=privacy), ["resume.key"])
    result = (training := made("system", privacy=privacy)).resume(tmp_path / "r")
    assert result.stopped == "budget"
    assert result.guarantee.epsilon <= 3.0
    first, second = (count for _, count in result.state.ledger.entries)
    assert (first, second) == (6, 2 * BANDS)  # 4 blocks were planned, and 2 were begun
    assert result.guarantee.epsilon == training.guarantee_of(blocks(4, training)).epsilon


def test_workers_runs_side_by_side_and_draws_ahead_release_what_one_process_does():
    alone = made().run()
    assert same(made(workers=2).run(), alone)
    first, second = run_together([made(), made(seed=4, bands=2)])
    for together, training in ((first, made()), (second, made(seed=4, bands=2))):
        result = training.run()
        torch.testing.assert_close(together.state.params, result.state.params)
        assert together.guarantee == result.guarantee
    for prefetch in (True, False):
        training = made()
        training.problem.fast = cl.FastParts(prefetch=prefetch)
        assert same(training.run(), alone)


def test_files_of_a_run_agree_with_its_guarantee(tmp_path):
    training = made("system", privacy={"epsilon": 3.0, "noise_multiplier": None})
    result = training.run([cl.RunDirectory(tmp_path / "r"), StopAfter(9)])
    run = read_run_directory(tmp_path / "r")
    assert run.problems == []
    assert run.promise.epsilon == result.guarantee.epsilon
    assert check_command(tmp_path / "r") == 0
    assert run.promise.sampling == "Poisson sampling at rate 0.2 from one of 4 groups in turn"
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["round"], line["index"], line["bands"]) for line in lines] == [(t, t, BANDS) for t in range(9)]
    assert "bands = 4" in (tmp_path / "r" / "settings.toml").read_text(encoding="utf-8")
    assert cl.load(tmp_path / "r", model=linear_float32()).guarantee == result.guarantee


def test_a_report_finds_noise_hopeless_only_by_what_stays_of_it(tmp_path):
    """21 parameters and 10 users: 2 clips of noise is z = 4.4; bands leave less than half of 5 in the models."""
    training = made("system", privacy={"noise_multiplier": 5.0, "count_stddev": 20.0}, bands=10)
    assert training.noise_norm < 2 < float(training.algorithm.mechanism.delta_noise_multiplier) * 21**0.5 / M
    result = training.run([cl.RunDirectory(tmp_path / "r")])
    assert "hopeless_noise" not in {finding.kind for finding in result.findings}
    assert read_run_directory(tmp_path / "r").findings == [str(finding) for finding in result.findings]


@pytest.mark.parametrize(
    ("file", "edits", "words"),
    [
        ("ledger.jsonl", {'"bands": 4': '"bands": 8', '"rate": 0.2': '"rate": 0.4'}, "has 4 bands"),
        ("ledger.jsonl", {'"grouped-poisson"': '"poisson"', r', "bands": 4, "index": \d+': "",
                          '"rate": 0.2': '"rate": 0.05'}, "has 4 bands"),
        ("settings.toml", {"^bands = 4": "bands = 8"}, "has 8 bands"),
        ("settings.toml", {"^# bands = 4": "# bands = 8"}, "has 8 bands"),
    ],
)  # fmt: skip
def test_bands_of_ledger_and_settings_are_compared(tmp_path, file, edits, words):
    """More bands, or none, at the rate that belongs to them: nothing else in the files contradicts that."""
    folder = tmp_path / "r"
    made(seed=1 << 60).run([cl.RunDirectory(folder)])  # one that nobody guesses, of which verify would tell
    assert verify(folder).problems == ()
    text = (folder / file).read_text(encoding="utf-8")
    for pattern, other in edits.items():
        text, changed = re.subn(pattern, other, text, flags=re.MULTILINE)
        assert changed
    (folder / file).write_text(text, encoding="utf-8")
    assert words in " ".join(verify(folder).problems)
    assert words in " ".join(read_run_directory(folder).problems)
    assert check_command(folder) == 1


def test_personal_parameters_are_kept_by_users_who_come_in_rounds_that_are_apart():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.own = linear_float32(), torch.nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return self.shared(x) + self.own

    training = made(rounds=9, model=Model(), personal=["own"])
    result = training.run()
    assert result.guarantee.rounds == 9
    assert training.unprivate_personal()


ONE_EACH = Population.one_each(x=np.zeros((USERS, 6)), y=np.zeros(USERS, np.int64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privacy": {"sampling": "fixed"}}, "IndependentNoise where sampling='fixed'"),
        ({"privacy": {"relation": "replace-one"}}, "whoever replaces a user may be in another group"),
        ({"population": ONE_EACH, "privacy": {"population_size": USERS}}, "where population_size is declared for one_"),
        ({"bands": "auto"}, "bands='auto' must be a number where noise_multiplier is given"),
        ({"bands": 21}, "bands=21 must be at most"),
        ({"bands": 9, "rounds": 8}, "bands=9 must be"),
        ({"bands": 0}, "bands=0"),
        ({"bands": "many"}, "bands='many'"),
    ],
)
def test_what_cannot_be_accounted_is_refused(options, message):
    with pytest.raises(SettingError, match=message):
        made(**options)


def test_noise_that_is_none_and_bands_in_the_wrong_place_are_refused():
    with pytest.raises(SettingError, match=r"noise=1\.0 must be a BandedNoise or an IndependentNoise"):
        plain(noise=1.0)
    with pytest.raises(SettingError, match=r"give noise=BandedNoise\(bands=8\)"):
        plain(bands=8)


def test_examples_that_are_silent_keep_their_group():
    result = made(population=ONE_EACH).run()
    assert "zero-out one example" in str(result.guarantee)


def test_settings_and_flags_name_the_noise():
    task = cl.task_named("handwriting")
    settings = task.settings.overridden(
        {"noise": "banded", "bands": 2, "population_size": 300, "cohort_size": 20, "rounds": 4}, "flags"
    )
    assert task.training(settings).noise == cl.BandedNoise(2)
    with pytest.raises(SettingError, match="bands=2 must be left out where noise='independent'"):
        settings.overridden({"noise": "independent"}, "flags")

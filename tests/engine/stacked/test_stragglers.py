"""Users with many steps beside the others, widths that are recorded, and what is prepared ahead of its round."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import Mixed, cross_entropies, linear_model, population_of, rows_of

from clipline import FixedClip, LocalSGD, QuantileClip, Training
from clipline.engine.one_by_one import OneByOne
from clipline.engine.parallel.group import SingleProcess
from clipline.engine.stacked import step as program
from clipline.engine.stacked import stragglers as lanes
from clipline.engine.stacked.block import Begun, Visit
from clipline.engine.stacked.step import Program, SlowEngineWarning, rounded_up
from clipline.engine.stacked.trainer import Stacked
from clipline.federated.sampling import Cohort
from clipline.streams import Streams

SIZES = [3, 60, 5, 4, 0, 6, 33, 2, 5, 12, 1, 4, 3, 13, 5, 2]
USERS = np.arange(len(SIZES))


@pytest.fixture
def uncompiled(monkeypatch):
    """Programs are traced but neither compiled nor recorded: that takes minutes, or a GPU."""
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)


def engine(sizes=SIZES, model=None):
    torch.manual_seed(0)
    model = Mixed().double() if model is None else model
    return one_by_one(model, cross_entropies, population_of(sizes, features=16), LocalSGD(0.3, 4), Streams(0))


@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_users_with_many_steps_go_beside_the_others_and_train_the_same(uncompiled):
    plain = engine()
    stack = Stacked(plain, len(SIZES), block_size=len(SIZES), compiled=True)
    expected = rows_of(plain, USERS, 2)
    for _ in range(2):
        torch.testing.assert_close(rows_of(stack, USERS, 2), expected, rtol=1e-11, atol=1e-12)
    lanes_used = {lane for lane, _ in stack._lanes._recordings}
    assert lanes_used == {0, 1}
    assert len(stack._lanes._programs) == 1


@pytest.mark.filterwarnings("ignore")
def test_in_bfloat16_dense_weights_keep_a_copy_and_train_the_same(uncompiled):
    torch.manual_seed(0)
    population = population_of([max(4, size) for size in SIZES], features=16)  # whole batches: equally wide both ways
    plain = one_by_one(Mixed(), cross_entropies, population, LocalSGD(0.3, 4), Streams(0), precision="bf16")
    stack = Stacked(plain, len(SIZES), block_size=len(SIZES), compiled=True)
    as_written = Stacked(plain, len(SIZES), block_size=len(SIZES), compiled=False)
    for round_index in range(2):
        assert torch.equal(rows_of(stack, USERS, round_index), rows_of(as_written, USERS, round_index))
    names = list(plain.problem.model.named_shapes)
    dense = {name for name, layer in plain.problem.model.module.named_modules() if isinstance(layer, torch.nn.Linear)}
    for recording in stack._lanes._recordings.values():
        kept = {names[piece].rpartition(".")[0] for piece in recording.copies}
        assert kept
        assert kept <= dense


def steps_of(lengths):
    counts = np.zeros((len(lengths), max(lengths)), np.int64)
    for user, length in enumerate(lengths):
        counts[user, :length] = 1
    return lanes.Steps(np.zeros((*counts.shape, 1), np.int64), counts, np.ones(len(lengths), np.int64))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([9] * 24, {0: (0, 24)}),  # nobody waits for anybody
        ([50, 40] + [9] * 22, {1: (0, 2), 0: (2, 24)}),
        ([50, 40] + [30] * 6 + [9] * 16, {1: (0, 2), 0: (2, 24)}),
        ([50] * 8 + [9] * 16, {0: (0, 24)}),  # more than have room apart
        ([50, 9], {0: (0, 2)}),  # no more than have room apart
        ([0, 0, 0], {0: (0, 3)}),
    ],
)
def test_who_goes_apart(lengths, expected):
    made = lanes.StragglerStreams(None, users=24, steps=50, width=1)  # room for 2 apart
    parts = made._parted(steps_of(lengths))
    assert {lane: (users.start, users.stop) for lane, users in parts.items()} == expected


def test_numbers_of_users_that_are_recorded():
    assert [rounded_up(users) for users in (1, 2, 3, 31, 32, 33, 64, 65, 128, 129)] == [
        2, 2, 4, 32, 32, 36, 64, 72, 128, 144,
    ]  # fmt: skip
    for users in range(1, 2000):
        assert users <= rounded_up(users) <= 1.125 * users + 1
    assert len({rounded_up(users) for users in range(1, 1025)}) <= 60


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_the_compiler_ties_to_one_number_of_users_is_kept_to_one(monkeypatch):
    """As library convolutions do: the users are their groups."""
    widths = []

    def compiles_anew(traced, backend):
        def run(stack, *rest):
            if len(rest[0]) not in widths:
                backend.__self__._versions += 1
            widths.append(len(rest[0]))
            return traced(stack, *rest)

        return run

    monkeypatch.setattr(torch, "compile", compiles_anew)
    plain = engine([9, 7, 3, 1, 1, 1], linear_model(16))
    stack = Stacked(plain, 6, block_size=6, compiled=True)
    monkeypatch.setattr(lanes, "_UNEVEN", 0)
    expected = rows_of(plain, np.arange(6))
    torch.testing.assert_close(rows_of(stack, np.arange(6)), expected, rtol=1e-11, atol=1e-12)
    assert widths == [6, 2, 2]
    widths.clear()
    monkeypatch.setattr(program, "_VERSIONS", 1)
    torch.testing.assert_close(rows_of(stack, np.arange(6), 0), expected, rtol=1e-11, atol=1e-12)
    assert widths == [6, 6, 6]
    assert not next(iter(stack._lanes._programs.values())).any_width
    assert Program(stack._step).any_width


@pytest.mark.filterwarnings("ignore")
def test_what_was_begun_is_used_for_that_cohort_that_round_and_those_parameters_alone(uncompiled, monkeypatch):
    plain = engine()
    stack, trained_blocks = Stacked(plain, 16, block_size=5, compiled=True), []
    train = stack._lanes.train
    monkeypatch.setattr(stack._lanes, "train", lambda *given: trained_blocks.append(1) or train(*given))
    params = plain.problem.model.initial.clone()

    def begin(users, round_index):
        stack.begin(params, Cohort(users, None), round_index)
        trained_blocks.clear()

    def trained(users, round_index, params=params):
        blocks = [updates.dense(len(params)) for updates in stack.train(params, Cohort(users, None), round_index)]
        sizes = plain.local.examples_of(plain.examples.population, users)
        order = np.lexsort((np.zeros(len(users)), -sizes))
        expected = torch.cat([plain.block(params, users[[i]], round_index).dense(len(params)) for i in order])
        torch.testing.assert_close(torch.cat(blocks), expected, rtol=1e-11, atol=1e-12)
        count = len(trained_blocks)
        trained_blocks.clear()
        return count

    few, more = np.array([1, 2, 6, 8, 9, 13]), np.array([0, 1, 2, 6, 8, 9, 13])
    assert trained(few, 3) == 2  # two blocks
    begin(few, 4)
    assert trained(few, 4) == 1
    assert trained(few, 4) == 2  # it is used once
    begin(few, 4)
    assert trained(few, 5) == 2
    begin(few, 6)
    assert trained(more, 6) == 1  # the five with most are the same
    begin(few, 7)
    assert trained(few[:3], 7) == 1
    begin(few[:0], 8)
    assert trained(few, 8) == 2
    begin(few, 9)
    assert trained(few, 9, params.clone()) == 2
    begin(few, 10)
    params.mul_(0.5)
    assert trained(few, 10) == 2


@pytest.mark.filterwarnings("ignore")
def test_what_was_begun_is_not_used_at_another_rate_or_from_other_streams(uncompiled):
    plain = engine()
    stack = Stacked(plain, 16, block_size=16, compiled=True)
    params = plain.problem.model.initial
    for streams, lr in ((plain.streams, 0.1), (Streams(7), plain.local.lr)):
        stack.begin(params, Cohort(USERS, None), 3)
        visit = Visit(params, USERS, 3, streams, lr)
        ours = torch.cat([updates.dense(len(params)) for updates, _ in stack.train_together([visit])])
        other = one_by_one(plain.problem.model.module, cross_entropies, plain.examples.population, LocalSGD(lr, 4), streams)
        expected = rows_of(Stacked(other, 16, block_size=16, compiled=False), USERS, 3, params)
        order = np.argsort(-plain.local.examples_of(plain.examples.population, USERS), kind="stable")
        torch.testing.assert_close(ours, expected[order], rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.*")
def test_a_round_that_breaks_off_in_its_beginning_leaves_nothing_behind(uncompiled, monkeypatch):
    plain = engine()
    stack = Stacked(plain, 16, block_size=16, compiled=True)
    params, replay, left = plain.problem.model.initial, program.GraphedStep.replay, [0]

    def breaks_off(recording, active):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("no more memory")
        replay(recording, active)

    expected = {t: rows_of(plain, USERS, t) for t in (2, 3)}
    stack.begin(params, Cohort(USERS, None), 2)
    monkeypatch.setattr(program.GraphedStep, "replay", breaks_off)
    left[0] = 5
    with pytest.warns(SlowEngineWarning, match="RuntimeError"):
        stack.begin(params, Cohort(USERS, None), 3)
    for t in (2, 3):  # neither what was begun before nor what was half done
        torch.testing.assert_close(rows_of(stack, USERS, t), expected[t], rtol=1e-11, atol=1e-12)
    left[0] = 5
    with pytest.raises(RuntimeError, match="no more memory"):
        rows_of(stack, USERS, 3)
    stack.begin(params, Cohort(USERS, None), 3)
    assert rows_of(stack, USERS[:0], 2).shape == (0, len(params))
    torch.testing.assert_close(rows_of(stack, USERS, 3), expected[3], rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_a_block_of_users_without_examples_may_be_the_first(uncompiled):
    plain = engine([0, 0, 5, 3])
    stack = Stacked(plain, 4, block_size=2, compiled=True)
    nobody = np.array([0, 1])
    assert not rows_of(stack, nobody).any()
    everybody = np.arange(4)
    torch.testing.assert_close(rows_of(stack, everybody), rows_of(plain, everybody), rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clip", [QuantileClip(), FixedClip(0.5)])
def test_what_a_round_begins_is_what_the_next_one_trains(uncompiled, monkeypatch, clip):
    """From the parameters that the server has just made; and a run leaves nothing begun behind."""

    def made(begins):
        torch.manual_seed(0)
        model, population = linear_model(16), population_of(SIZES * 3, features=16)
        settings = {"rounds": 6, "cohort_size": 9, "seed": 5, "local": LocalSGD(0.3, 4), "noise_multiplier": 0.3}
        training = Training(model, cross_entropies, population, clip=clip, **settings)
        stack = Stacked(training.plain, 9, block_size=48, compiled=True)
        if not begins:
            monkeypatch.setattr(stack, "begin", lambda *given: None)
        training.algorithm = replace(training.algorithm, clients=stack, workforce=SingleProcess(stack))
        return training, stack

    used, is_for = [], Begun.is_for
    monkeypatch.setattr(Begun, "is_for", lambda *given: used.append(is_for(*given)) or used[-1])
    training, stack = made(True)
    result = training.run()
    assert used == [True] * 5
    assert stack._begun is None
    expected = made(False)[0].run()
    assert torch.equal(result.state.params, expected.state.params)
    assert result.state.clip == expected.state.clip


@pytest.mark.parametrize("source", ["seed", "system"])
def test_every_round_trains_the_cohort_that_was_drawn_for_it_and_begun(source):
    class Watching:
        """A workforce that notes who comes."""

        def __init__(self, inner):
            self.inner, self.size, self.came, self.begun = inner, 1, [], []

        def at_work(self):
            return self.inner.at_work()

        def clipped_sum(self, params, cohort, round_index, clip):
            self.came.append((round_index, cohort.users.tolist()))
            return self.inner.clipped_sum(params, cohort, round_index, clip)

        def begin(self, params, cohort, round_index):
            self.begun.append((round_index, cohort.users.tolist()))

    training = Training(
        linear_model(16), cross_entropies, population_of([3] * 40, features=16), rounds=6, cohort_size=9, seed=5,
        local=LocalSGD(0.3, 4), noise_multiplier=0.5, noise_source=source,
    )  # fmt: skip
    watching = Watching(training.algorithm.workforce)
    training = training.with_workforce(watching)
    training.run()
    assert [t for t, _ in watching.came] == [0, 1, 2, 3, 4, 5]
    assert watching.begun == [*watching.came[1:], (6, [])]  # nobody for a round that does not come
    assert len({tuple(users) for _, users in watching.came}) == 6
    sampler, streams = training.algorithm.sampler, training.algorithm.streams
    anew = [(t, sampler.draw(streams.sampling(t)).users.tolist()) for t in range(6)]
    assert (watching.came == anew) == (source == "seed")


def test_a_round_begun_from_another_state_draws_the_cohort_of_that_round():
    training = Training(
        linear_model(16), cross_entropies, population_of([3] * 40, features=16), rounds=6, cohort_size=9, seed=5,
        local=LocalSGD(0.3, 4), noise_multiplier=0.5,
    )  # fmt: skip
    algorithm = training.algorithm
    states = [algorithm.init()]
    for _ in range(3):
        states.append(algorithm.round(states[-1])[0])
    again = replace(algorithm).round(states[1])[0]
    assert torch.equal(again.params, states[2].params)
    assert torch.equal(algorithm.round(states[0])[0].params, states[1].params)

"""Users with many steps beside the others, widths that are recorded, and what is prepared ahead of its round."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import Mixed, cross_entropies, linear_model, population_of, rows_of

from clipline import LocalSGD, Training
from clipline.federated import lanes, program
from clipline.federated.one_by_one import OneByOne
from clipline.federated.program import Program, rounded_up
from clipline.federated.sampling import Cohort
from clipline.federated.stacked import Stacked
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
    return OneByOne(model, cross_entropies, population_of(sizes, features=16), LocalSGD(0.3, 4), Streams(0))


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
    population = population_of(SIZES, features=16)
    plain = OneByOne(Mixed(), cross_entropies, population, LocalSGD(0.3, 4), Streams(0), precision="bf16")
    stack = Stacked(plain, len(SIZES), block_size=len(SIZES), compiled=True)
    as_written = Stacked(plain, len(SIZES), block_size=len(SIZES), compiled=False)
    for round_index in range(2):
        assert torch.equal(rows_of(stack, USERS, round_index), rows_of(as_written, USERS, round_index))
    names = list(plain.flat.named_shapes)
    dense = {name for name, layer in plain.flat.module.named_modules() if isinstance(layer, torch.nn.Linear)}
    for recording in stack._lanes._recordings.values():
        kept = {names[piece].rpartition(".")[0] for piece in recording.copies}
        assert kept
        assert kept <= dense


def steps_of(lengths):
    counts = np.zeros((len(lengths), max(lengths)), np.int64)
    for user, length in enumerate(lengths):
        counts[user, :length] = 1
    return lanes.Steps(np.zeros((*counts.shape, 1), np.int64), counts)


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
    made = lanes.Lanes(None, users=24, steps=50, width=1)  # room for 2 apart
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
    params = plain.flat.initial.clone()

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
def test_what_cannot_be_begun_fails_only_when_it_is_asked_for(uncompiled, monkeypatch):
    stack = Stacked(engine(), 16, block_size=5, compiled=True)
    params, cohort = stack.flat.initial, Cohort(np.array([1, 2]), None)

    def fails(*given):
        raise RuntimeError("no more memory")

    monkeypatch.setattr(stack._lanes, "train", fails)
    stack.begin(params, cohort, 0)
    with pytest.raises(RuntimeError, match="no more memory"):
        list(stack.train(params, cohort, 0))


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
    assert watching.came[1:] == watching.begun  # and nothing for a round that does not come
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
    states = [algorithm.first()]
    for _ in range(3):
        states.append(algorithm.round(states[-1])[0])
    again = replace(algorithm).round(states[1])[0]
    assert torch.equal(again.params, states[2].params)
    assert torch.equal(algorithm.round(states[0])[0].params, states[1].params)

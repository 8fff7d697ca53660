"""Secure sums: exact with dropouts, refused where they would show somebody, and nothing in clear at the server."""

import secrets
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from samples import everything_in
from scipy import stats

pytest.importorskip("cryptography", reason="the extra federation is not installed")

from clipline import SettingError
from clipline.errors import RunError
from clipline.federated.clipping import centred
from clipline.federated.discrete_mechanism import DiscreteMechanism
from clipline.federation.encoders import secure_integers, word_type
from clipline.federation.secure_sum import (
    PRIME,
    ClosedBoxes,
    RoundAbandoned,
    SumClient,
    SumPlan,
    SumServer,
    combined,
    lagrange,
    split,
)
from clipline.privacy.events import PoissonSampling

PLAN = SumPlan(dim=50, bits=16, threshold=4, least_survivors=4, round_id=b"test, round 1")


def opened(total):
    """What is in a modular sum, by a mechanism without noise whose code leaves the numbers as they are."""
    found = []

    class Look:
        dim, bound, stddev, unit = PLAN.dim, 1.0, 100.0, 1.0

        def decode_sum(self, numbers, clip, round_index):
            found.append(numbers)
            return torch.zeros(3, dtype=torch.float64)

    code = Look()
    private = total.finished(1.0, PoissonSampling(0.5))
    code.dim = len(total._ModularSum__total)  # a test may look
    DiscreteMechanism(1, 1.0, None, code=code, shares=2).step(private, None, None, 0)
    return found[0]


class Round:
    """Clients and a server in one process. `after` names the clients who stop after a stage, from 1 on."""

    def __init__(self, clients=7, plan=PLAN, after=None, seed=0, vectors=None):
        self.plan, self.after = plan, after or {}
        rng = np.random.default_rng(seed)
        word = word_type(plan.bits)
        self.vectors = vectors or {
            number: rng.integers(0, 1 << plan.bits, plan.dim, dtype=np.uint64).astype(word)
            for number in range(1, clients + 1)
        }
        self.clients = {number: SumClient(number, plan) for number in self.vectors}
        self.server, self.messages = SumServer(plan), []

    def there(self, stage):
        return [number for number in self.clients if self.after.get(number, 9) >= stage]

    def sent(self, message):
        self.messages.append(message)
        return message

    def keys(self):
        for number in self.there(1):
            assert self.server.add_keys(number, self.sent(self.clients[number].keys()))
        return self.server.roster()

    def boxes(self):
        roster = self.keys()
        for number in self.there(2):
            assert self.server.add_boxes(number, self.sent(self.clients[number].boxes(roster)))
        return self.server.boxes_for()

    def masked(self):
        boxes = self.boxes()
        for number in self.there(3):
            masked = self.clients[number].masked(boxes[number], self.vectors[number])
            assert self.server.add_masked(number, self.sent(masked))
        return self.server.survivors()

    def total(self):
        alive, dead = self.masked()
        for number in self.there(4):
            assert self.server.add_answer(number, self.sent(self.clients[number].answer(alive, dead)))
        return self.server.total()

    def exact(self, numbers):
        whole = sum(self.vectors[number].astype(np.int64) for number in numbers)
        return centred(np.asarray(whole), self.plan.bits)


@pytest.mark.parametrize("bits", [14, 16, 18, 32])
@pytest.mark.parametrize(
    ("after", "alive"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({2: 0}, [1, 3, 4, 5, 6, 7]),  # sent nothing
        ({2: 1}, [1, 3, 4, 5, 6, 7]),  # sent keys
        ({2: 2}, [1, 3, 4, 5, 6, 7]),  # sent boxes, then no vector: others have masks in common with it
        ({2: 3}, [1, 2, 3, 4, 5, 6, 7]),  # sent its vector and then no answer
        ({1: 1, 3: 2, 7: 2}, [2, 4, 5, 6]),
    ],
)
def test_the_sum_of_those_who_are_alive_comes_out_exactly(bits, after, alive):
    going = Round(plan=replace(PLAN, bits=bits), after=after)
    np.testing.assert_array_equal(opened(going.total()), going.exact(alive))


@pytest.mark.parametrize("bits", [14, 18, 24])
@pytest.mark.parametrize("after", [{}, {2: 2}])
def test_nothing_above_the_modulus_leaves_a_client_or_is_in_the_sum(bits, after):
    """Carries above the modulus would count the clients whose number is negative, coordinate by coordinate."""
    minus_one = np.full(50, (1 << bits) - 1, word_type(bits))
    vectors = {number: minus_one if number < 5 else np.zeros_like(minus_one) for number in range(1, 8)}
    going = Round(plan=replace(PLAN, bits=bits), vectors=vectors, after=after)
    total = going.total()
    sent = [message for message in going.messages if isinstance(message, np.ndarray)]
    assert len(sent) == 7 - len(after)
    assert all(int(vector.max()) >> bits == 0 for vector in sent)
    negative = 4 - len(after)
    assert set(total._ModularSum__total.tolist()) == {(1 << bits) - negative}  # a test may look


def test_without_enough_answers_nothing_is_opened():
    with pytest.raises(RoundAbandoned, match="3 clients answered, 4 are needed"):
        Round(after={1: 1, 3: 2, 6: 3, 7: 2}).total()


def test_numbers_as_large_as_those_of_flowers_nodes_will_do():
    rng = np.random.default_rng(1)
    vectors = {2**64 - 1 - 7 * i: rng.integers(0, 2**16, 50).astype(np.uint16) for i in range(6)}
    dropped = list(vectors)[2]
    going = Round(vectors=vectors, after={dropped: 2})
    np.testing.assert_array_equal(opened(going.total()), going.exact(set(vectors) - {dropped}))


def test_with_too_few_clients_left_no_stage_goes_on():
    for stage, step in ((0, Round.keys), (1, Round.boxes), (2, Round.masked)):
        going = Round(after=dict.fromkeys(range(4, 8), stage))  # three are left
        with pytest.raises(RoundAbandoned, match="3 clients are left, 4 are needed"):
            step(going)


# What clients refuse


def lists(going):
    alive, dead = going.masked()
    return going.clients[1], alive, dead


def test_a_client_answers_once():
    client, alive, dead = lists(Round(after={5: 2}))
    client.answer(alive, dead)
    with pytest.raises(RunError, match="asked for twice"):
        client.answer(alive, dead)
    with pytest.raises(RunError, match="asked for twice"):
        client.answer(dead | {1, 2, 3, 4}, alive - {1, 2, 3, 4})


@pytest.mark.parametrize(
    "changed",
    [
        lambda alive, dead: (alive, dead | {2}),  # 2 in both: its vector would be open
        lambda alive, dead: (alive - {2}, dead),  # in none
        lambda alive, dead: (alive | {99}, dead),
        lambda alive, dead: (alive - {1}, dead | {1}),  # the client itself
        lambda alive, dead: ({1, 2, 3}, dead | {4, 6, 7}),  # too few alive
    ],
)
def test_a_client_refuses_lists_that_would_show_somebody(changed):
    client, alive, dead = lists(Round(after={5: 2}))
    with pytest.raises(RunError, match="this round's sum is refused"):
        client.answer(*changed(alive, dead))
    with pytest.raises(RunError, match="asked for twice"):  # nor does it answer another try
        client.answer(alive, dead)


def test_a_client_refuses_keys_that_are_not_its_own_or_doubled_or_too_few():
    def changed(change):
        going = Round()
        roster = going.keys()
        change(roster)
        return going.clients[1], roster

    def swapped(roster):
        roster[1] = roster[2]

    def doubled(roster):
        roster[2] = roster[3]

    def without_me(roster):
        del roster[1]

    def few(roster):
        for number in (4, 5, 6, 7):
            del roster[number]

    def many(roster):
        roster[8] = b"a" * 32 + b"b" * 32

    def numbered_zero(roster):
        roster[0] = roster.pop(2)

    for change in (swapped, doubled, without_me, few, many, numbered_zero):
        client, roster = changed(change)
        with pytest.raises(RunError, match="this round's sum is refused"):
            client.boxes(roster)


def test_a_client_refuses_boxes_that_were_changed_or_of_strangers_or_too_few():
    def swapped(boxes):
        boxes[2], boxes[3] = boxes[3], boxes[2]

    def flipped(boxes):
        boxes[2] = boxes[2][:-1] + bytes([boxes[2][-1] ^ 1])

    def cut(boxes):
        boxes[2] = boxes[2][:5]

    def strange(boxes):
        boxes[99] = boxes[2]

    def few(boxes):
        for number in (4, 5, 6, 7):
            del boxes[number]

    for change in (swapped, flipped, cut, strange, few):
        going = Round()
        boxes = going.boxes()[1]
        change(boxes)
        with pytest.raises(RunError, match="this round's sum is refused"):
            going.clients[1].masked(boxes, going.vectors[1])


def test_a_box_of_another_round_cannot_be_opened():
    first, second = Round(), Round(plan=replace(PLAN, round_id=b"test, round 2"))
    first.clients[2]._box_key = second.clients[2]._box_key
    first.clients[1]._box_key = second.clients[1]._box_key
    boxes, replayed = first.boxes()[1], second.boxes()[1]
    boxes[2] = replayed[2]
    with pytest.raises(RunError, match="a box cannot be opened"):
        first.clients[1].masked(boxes, first.vectors[1])


@pytest.mark.parametrize("vector", [np.zeros(49, np.uint16), np.zeros(50, np.uint32), np.zeros(50), np.zeros((1, 50))])
def test_a_client_refuses_a_vector_of_another_kind(vector):
    going = Round()
    with pytest.raises(RunError, match="not one of 50 numbers of type uint16"):
        going.clients[1].masked(going.boxes()[1], vector)


def test_stages_come_once_and_in_turn():
    client = SumClient(1, PLAN)
    with pytest.raises(RunError, match="out of turn"):
        client.boxes({})
    client = SumClient(1, PLAN)
    client.keys()
    with pytest.raises(RunError, match="asked for twice"):
        client.keys()
    server = SumServer(PLAN)
    with pytest.raises(RunError, match="out of turn"):
        server.boxes_for()


# What the server refuses


def test_the_server_takes_no_doubled_late_or_foreign_messages():
    going = Round(after={7: 2})
    server = going.server
    assert not server.add_keys(0, b"a" * 32 + b"b" * 32)
    assert not server.add_keys(8, b"a" * 31 + b"b" * 32)
    assert not server.add_keys(8, b"a" * 64)
    roster = going.keys()
    assert not server.add_keys(9, b"a" * 32 + b"b" * 32)  # late
    boxes = going.clients[1].boxes(roster)
    assert not server.add_boxes(8, boxes)
    assert not server.add_boxes(1, {2: b""})
    assert server.add_boxes(1, boxes)
    assert not server.add_boxes(1, boxes)  # again
    for number in range(2, 8):
        assert server.add_boxes(number, going.clients[number].boxes(roster))
    to_open = server.boxes_for()
    late = None
    for number in range(1, 8):
        masked = going.clients[number].masked(to_open[number], going.vectors[number])
        if number == 7:
            late = masked
            continue
        assert not server.add_masked(number, masked[:-1])
        assert not server.add_masked(number, masked.astype(np.uint32))
        assert not server.add_masked(99, masked)
        assert server.add_masked(number, masked)
        assert not server.add_masked(number, masked)
    alive, dead = server.survivors()
    assert not server.add_masked(7, late)  # whoever is called dead stays dead
    for number in alive:
        answer = going.clients[number].answer(alive, dead)
        assert not server.add_answer(7, answer)
        assert not server.add_answer(number, {**answer, 99: answer[1]})
        assert server.add_answer(number, answer)
        assert not server.add_answer(number, answer)
    np.testing.assert_array_equal(opened(server.total()), going.exact(range(1, 7)))
    with pytest.raises(RunError, match="closed twice"):
        server.total()


@pytest.mark.parametrize("wrong_of", [[5], [1, 2, 3, 4, 5, 6, 7]])
def test_wrong_shares_of_few_clients_do_no_harm(wrong_of):
    going = Round(after={5: 2})
    alive, dead = going.masked()
    for number in alive:
        answer = going.clients[number].answer(alive, dead)
        if number in (1, 6):  # four of six are right, and as many are needed
            answer |= dict.fromkeys(wrong_of, bytes(65) + bytes([number]))
        assert going.server.add_answer(number, answer)
    np.testing.assert_array_equal(opened(going.server.total()), going.exact(alive))
    assert going.server.suspects == set()


@pytest.mark.parametrize("whose", [5, 6])  # dead, and alive
def test_where_no_shares_of_a_secret_fit_the_round_is_abandoned_and_its_owner_suspected(whose):
    going = Round(after={5: 2})
    alive, dead = going.masked()
    for number in alive:
        answer = going.clients[number].answer(alive, dead)
        going.server.add_answer(number, {**answer, whose: secrets.token_bytes(66)})
    with pytest.raises(RoundAbandoned, match="fit"):
        going.server.total()
    assert going.server.suspects == {whose}


def test_a_key_with_which_nobody_can_agree_on_a_secret_is_not_taken():
    """Points of small order (RFC 7748, 6.1): the others could not make a box for this client, nor a mask."""
    going = Round()
    for point in (bytes(32), bytes([1]) + bytes(31), bytes([0xEC]) + b"\xff" * 30 + bytes([0x7F])):
        for keys in (point + b"b" * 32, b"b" * 32 + point):
            assert not going.server.add_keys(8, keys)
    np.testing.assert_array_equal(opened(going.total()), going.exact(range(1, 8)))


def test_a_client_whose_boxes_nobody_can_open_is_suspected_and_one_that_accuses_is_not():
    going = Round()
    roster = going.keys()
    for number, client in going.clients.items():
        boxes = client.boxes(roster)
        going.server.add_boxes(number, dict.fromkeys(boxes, bytes(160)) if number == 3 else boxes)
    boxes = going.server.boxes_for()
    for number in (1, 2, 4, 5):
        with pytest.raises(ClosedBoxes, match="cannot be opened") as found:
            going.clients[number].masked(boxes[number], going.vectors[number])
        assert found.value.senders == {3}
        assert going.server.add_complaint(number, found.value.senders)
        assert not going.server.add_complaint(number, found.value.senders)
    assert going.server.add_complaint(3, {1, 2, 4, 5, 6, 7})  # one voice
    for number, odd in ((6, {99}), (6, {6}), (6, set()), (99, {1})):
        assert not going.server.add_complaint(number, odd)
    assert going.server.suspects == {3}


ODD = [None, 7, b"x", "text", [], {}, {1: None}, {1: 3}, ("a", "b"), np.zeros(50), np.zeros(50, object), np.array(3)]


def test_messages_of_any_other_kind_are_not_taken_and_change_nothing():
    going = Round(after={5: 2})
    server = going.server
    for odd in ODD:
        assert not server.add_keys(8, odd)
    roster = going.keys()
    for number in going.there(2):
        sent = going.clients[number].boxes(roster)
        for odd in [*ODD, dict.fromkeys(sent, 3)]:
            assert not server.add_boxes(number, odd)
        assert server.add_boxes(number, sent)
    boxes = server.boxes_for()
    for number in going.there(3):
        if number == 5:
            continue
        for odd in ODD:
            assert not server.add_masked(number, odd)
        assert server.add_masked(number, going.clients[number].masked(boxes[number], going.vectors[number]))
    alive, dead = server.survivors()
    for number in alive:
        sent = going.clients[number].answer(alive, dead)
        for odd in [*ODD, dict.fromkeys(sent, 3), dict.fromkeys(sent, "s" * 66)]:
            assert not server.add_answer(number, odd)
        assert server.add_answer(number, sent)
    np.testing.assert_array_equal(opened(server.total()), going.exact(alive))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"threshold": 1}, "threshold"), ({"least_survivors": 3}, "least_survivors"), ({"round_id": b""}, "round_id"),
        ({"dim": 0}, "dim"), ({"bits": 33}, "bits"), ({"round_id": "1"}, "round_id"),
    ],
)  # fmt: skip
def test_plans_that_protect_nobody_are_refused(changed, name):
    with pytest.raises(SettingError, match=name):
        replace(PLAN, **changed)


def test_a_threshold_of_half_of_the_clients_is_refused_by_both_sides():
    with pytest.raises(SettingError, match="more than half of the 8 clients"):
        Round(clients=8).keys()


# What the server can see


def test_the_server_never_holds_an_update_a_bit_or_a_secret_in_clear():
    """Every message and all that the server object holds, after each stage, with real encoded updates."""
    code = secure_integers(40, 16, cohort_size=7, noise_multiplier=0.3, count_stddev=1.0)
    rng = np.random.default_rng(0)
    joints = {
        number: torch.cat([torch.full((40,), 0.01 * number, dtype=torch.float64), torch.tensor([0.5])])
        for number in range(1, 8)
    }
    vectors = {number: code.encode(joint, 1.0, 0, rng) for number, joint in joints.items()}
    plan = replace(PLAN, dim=code.dim)
    going = Round(plan=plan, vectors=vectors, after={5: 2})
    secret = {}
    for number, client in going.clients.items():
        secret[number] = (client._own, client._mask_key.private_bytes_raw(), client._box_key.private_bytes_raw())
    alive, dead = going.masked()
    held = [*everything_in(going.messages), *everything_in(going.server)]
    assert sum(map(len, held)) > 10_000  # it looked at something
    joined = b"|".join(held)
    for number, vector in vectors.items():
        words = vector.tobytes()
        for start in range(0, len(words) - 8, 2):  # no four numbers in a row of anybody's vector
            assert words[start : start + 8] not in joined
        for one in secret[number]:
            assert one not in joined
    # Not in the differences of two masked vectors either, which have one common mask less.
    masked = [message for message in going.messages if isinstance(message, np.ndarray)]
    for one, other in combinations(masked, 2):
        for first, second in combinations(list(vectors.values()), 2):
            assert np.count_nonzero(one - other == first - second) < 6  # of 41 numbers, 1 in 65536 agrees by chance
    for number in going.there(4):
        going.server.add_answer(number, going.clients[number].answer(alive, dead))
    np.testing.assert_array_equal(opened(going.server.total()), going.exact(alive))
    for one in everything_in(going.server):
        for number in alive:  # own keys are never opened, and no vector is left
            assert secret[number][1] not in one
            assert vectors[number].tobytes() not in one


def test_masked_vectors_are_uniform_whatever_is_in_them():
    plan = replace(PLAN, dim=20_000)
    vectors = {number: np.full(20_000, 7, np.uint16) for number in range(1, 8)}
    going = Round(plan=plan, vectors=vectors)
    going.masked()
    for message in going.messages:
        if isinstance(message, np.ndarray):
            counts = np.bincount(message >> 8, minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-6  # once in a million by chance


# Shamir's shares


def test_any_threshold_of_shares_gives_the_secret_and_one_less_fits_every_secret():
    secret = bytes(range(32))
    shares = split(secret, 3, [1, 2, 5, 2**63])
    for chosen in combinations(shares, 3):
        assert combined({number: shares[number] for number in chosen}, lagrange(chosen)) == secret
    # Two shares: for every secret there is a third share that fits, so that they tell nothing.
    for other in (0, 1, int.from_bytes(secret, "big") + 1):
        weights = lagrange([1, 2, 5])
        known = sum(int.from_bytes(shares[number], "big") * weights[number] for number in (1, 2))
        third = (other - known) * pow(weights[5], -1, PRIME) % PRIME
        made = {1: shares[1], 2: shares[2], 5: third.to_bytes(66, "big")}
        assert combined(made, weights) == other.to_bytes(32, "big")


def test_shares_by_hand():
    # a line through (1, 5) and (2, 7) meets 0 at 3
    shares = {1: (5).to_bytes(66, "big"), 2: (7).to_bytes(66, "big")}
    assert combined(shares, lagrange([1, 2])) == (3).to_bytes(32, "big")

"""Every encoder keeps what it states, for the vectors that are worst for it."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import opened
from scipy import stats

from clipline import SettingError
from clipline.federated.clipping import ModularSum, PartialSums, centred, clip_rows
from clipline.federation.encoders import (
    KeptShare,
    RotatedLevels,
    packed,
    secure_integers,
    unpacked,
    word_type,
)
from clipline.federation.rotation import Rotation
from clipline.privacy.events import PoissonSampling
from clipline.random.discrete_gaussian import words_of

SAMPLING = PoissonSampling(0.5)
DIM = 300


def rng_of(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


def unit(dim, place):
    """One coordinate is 1."""
    vector = torch.zeros(dim, dtype=torch.float64)
    vector[place] = 1.0
    return vector


def spike(dim, clip):
    """A vector that the rotation of round 0 turns into one large number."""
    rotation = Rotation(dim)
    return rotation.backward(unit(rotation.dim, rotation.dim // 2) * clip, 0)


def updates(dim, clip):
    """Updates (dim,) float64 within the clip or far beyond, that are bad for some encoder."""
    ones = torch.ones(dim, dtype=torch.float64)
    one = unit(dim, dim // 2)
    return {
        "zero": 0 * ones,
        "one coordinate at the clip": one * clip,
        "last coordinate": unit(dim, -1) * -clip,
        "all equal at the clip": ones * (clip / math.sqrt(dim)),
        "rotated into one number": spike(dim, clip),
        "denormal": ones * 5e-324,
        "one denormal": one * 5e-324,
        "tiny": ones * (clip * 1e-12),
        "huge": ones * 1e300,
        "one huge": one * -1e300,
    }


NAMES = list(updates(2, 1.0))


def joint_of(update, clip, bit=0.5):
    (clipped,), _ = clip_rows(update[None], clip)
    return torch.cat([clipped, torch.tensor([bit], dtype=torch.float64)])


ENCODERS = [KeptShare(DIM), KeptShare(DIM, 0.1), *(RotatedLevels(DIM, bits) for bits in (1, 2, 4, 8, 16))]


ODD = {"name": st.sampled_from(NAMES), "clip": st.floats(-30, 30).map(lambda power: 10.0**power)}


def squared(numbers):
    """Squared norm without rounding."""
    return sum(Fraction(number) ** 2 for number in numbers.tolist())


def assert_bounded(vector, clip):
    """What the server adds of a decoded vector is within the clip, in exact arithmetic, and the bit within a half."""
    sums = PartialSums(torch.empty(1, DIM + 1, dtype=torch.float64))
    if vector is not None:
        assert sums.add_clipped(vector, clip)
    moved = opened(*sums.finished([clip], [SAMPLING]))
    assert squared(moved[:-1]) <= Fraction(clip) ** 2
    assert abs(float(moved[-1])) <= 0.5


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
@given(**ODD, bit=st.sampled_from([-0.5, 0.5]), round_index=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_a_decoded_vector_is_no_longer_than_stated_and_moves_the_sum_by_a_clip(encoder, name, clip, bit, round_index):
    message = encoder.encode(joint_of(updates(DIM, clip)[name], clip, bit), clip, round_index, rng_of())
    decoded = encoder.decode(message, clip, round_index)
    assert decoded.shape == (DIM + 1,)
    assert float((decoded[:-1] / clip).norm()) <= encoder.enlarges * (1 + 1e-5)
    assert float(decoded[-1]) == bit
    assert_bounded(decoded, clip)
    assert_bounded(encoder.decode(message, clip, round_index + 1), clip)  # a message of another round


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
@pytest.mark.parametrize("name", ["one coordinate at the clip", "all equal at the clip", "rotated into one number"])
def test_decoded_vectors_are_the_clipped_one_on_average(encoder, name):
    joint, total, rounds, rng = joint_of(updates(DIM, 0.7)[name], 0.7), torch.zeros(DIM + 1), 800, rng_of(1)
    squares = torch.zeros(DIM + 1, dtype=torch.float64)
    for t in range(rounds):  # masks and signs differ by round
        decoded = encoder.decode(encoder.encode(joint, 0.7, t, rng), 0.7, t)
        total = total + decoded
        squares += (decoded - joint) ** 2
    error = (total / rounds - joint) / (squares / rounds / rounds).sqrt().clamp(min=1e-7)
    # 301 numbers: one of them is beyond 5.5 deviations by chance once in 10^5
    assert encoder.unbiased
    assert float(error.abs().max()) < 5.5


@pytest.mark.parametrize("bits", range(1, 17))
def test_levels_are_packed_as_tightly_as_stated(bits):
    encoder = RotatedLevels(1000, bits)
    message = encoder.encode(joint_of(torch.randn(1000).double(), 1.0), 1.0, 0, rng_of())
    assert message.nbytes == 5 + math.ceil(Rotation(1000).dim * bits / 8)


def broken_messages(encoder):
    good = encoder.encode(joint_of(torch.ones(DIM).double(), 1.0), 1.0, 0, rng_of())
    yield from (good[:-1], np.concatenate([good, good[:1]]), good[None], good[:0], good.astype(np.int64))
    if isinstance(encoder, RotatedLevels):
        for reach in (math.nan, math.inf, -1.0, 1e30):
            bad = good.copy()
            bad[:4] = np.array([reach], "<f4").view(np.uint8)
            yield bad
        bad = good.copy()
        bad[4] = 7
        yield bad


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_what_is_no_message_is_not_decoded(encoder):
    for message in broken_messages(encoder):
        assert encoder.decode(message, 1.0, 0) is None


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
@given(st.binary(min_size=4 * DIM + 4, max_size=4 * DIM + 4), st.integers(0, 1))
@settings(max_examples=50, deadline=None)
def test_no_message_at_all_moves_the_sum_by_more_than_a_users_bound(encoder, words, bit):
    right = encoder.encode(joint_of(torch.ones(DIM).double(), 0.5), 0.5, 0, rng_of())
    message = np.frombuffer((words * 2)[: right.nbytes], right.dtype).copy()
    if isinstance(encoder, RotatedLevels):
        message[4] = bit
    assert_bounded(encoder.decode(message, 0.5, 0), 0.5)


# Secure sums


def code_of(dim=DIM, bits=18, **options):
    given = {"cohort_size": 20, "noise_multiplier": 0.7, "count_stddev": 2.0, **options}
    return secure_integers(dim, bits, **given)


@cache
def code_with(bits):
    return code_of(bits=bits)


@given(**ODD, bits=st.sampled_from([16, 20, 21, 26, 32]), bit=st.sampled_from([0.5, -0.5, 1e30, math.nan]))
@settings(max_examples=300, deadline=None)
def test_an_encoded_vector_is_no_longer_than_its_bound(name, clip, bits, bit):
    joint = torch.cat([updates(DIM, clip)[name], torch.tensor([bit], dtype=torch.float64)])  # not clipped before
    code = code_with(bits)
    numbers = centred(code.encode(joint, clip, 0, rng_of()), bits)
    assert squared(numbers) <= code.bound_squared <= Fraction(code.bound) ** 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_sent_as_nothing(bad):
    code = code_of()
    for place in (5, DIM):
        joint = torch.zeros(DIM + 1, dtype=torch.float64)
        joint[place] = bad
        numbers = centred(code.encode(joint, 1.0, 0, rng_of()), code.bits)
        assert squared(numbers) <= code.bound_squared


def test_rounding_that_is_unlucky_is_done_anew_and_at_last_towards_zero():
    class Unlucky:
        """Rounds every number away from zero, or as far up as it can."""

        def __init__(self):
            self.calls = 0

        def random(self, count, dtype):
            self.calls += 1
            return np.full(count, 1 - 2**-20, dtype)

    code, rng = code_of(bits=14, noise_multiplier=0.5, cohort_size=1), Unlucky()
    joint = joint_of(updates(DIM, 1.0)["all equal at the clip"], 1.0)
    exact = code.rotation.forward(torch.cat([joint[:-1] * code.scale, joint[-1:] * 2 * code.bit_weight]).float(), 0)
    tight = replace(code, length=code.length * 0.92)  # the bound of a shorter vector
    numbers = tight._rounded(exact, rng)
    assert rng.calls == 8
    assert squared(numbers) <= tight.bound_squared
    assert np.array_equal(numbers, np.trunc(exact.numpy())) or not numbers.any()


def test_silent_users_send_zeros():
    code = code_of()
    assert not code.encode(torch.zeros(DIM + 1), 1.0, 0, rng_of()).any()


@pytest.mark.parametrize("bits", [14, 16, 18, 24, 32])
@pytest.mark.parametrize("dim", [1, 50, 3000])
def test_a_sum_of_encoded_vectors_decodes_to_the_sum_of_the_vectors(bits, dim):
    code = code_of(dim, bits, noise_multiplier=0.3, cohort_size=10, count_stddev=1.0)
    total, exact, generator = ModularSum(code.dim, bits), torch.zeros(dim + 1, dtype=torch.float64), rng_of(2)
    words = np.zeros(code.dim, np.uint32)
    for user in range(10):
        update = torch.randn(dim, generator=torch.Generator().manual_seed(user)).double()
        joint = joint_of(update, 0.2, bit=0.5 if user % 3 else -0.5)
        message = code.encode(joint, 0.2, 4, generator)
        assert message.dtype == word_type(bits)
        assert total.add(message)
        words += message
        exact += joint
    decoded = code.decode_sum(words.astype(np.int64), 0.2, 4)
    off = (decoded - exact) / torch.tensor([0.2 / code.scale] * dim + [0.5 / code.bit_weight])
    # Rounding ten vectors: a deviation of at most sqrt(10) / 2 numbers; 5.5 of them once in 10^4
    assert float(off.abs().max()) < 5.5 * math.sqrt(10) / 2


def test_rounding_is_right_on_average():
    code, rng = code_of(bits=14, noise_multiplier=0.3, cohort_size=10, count_stddev=0.5), rng_of(3)
    joint, total = joint_of(torch.ones(DIM).double(), 1.0), np.zeros(code.dim)
    for _ in range(3000):
        total += centred(code.encode(joint, 1.0, 0, rng), code.bits)
    exact = code.rotation.forward(torch.cat([joint[:-1] * code.scale, joint[-1:] * 2 * code.bit_weight]), 0).numpy()
    error = (total / 3000 - exact) / (0.5 / math.sqrt(3000))
    assert np.abs(error).max() < 5.5
    assert np.abs(error).std() > 0.1  # there was something to round


def test_the_noise_a_code_asks_for_is_that_of_the_round():
    for bits, multiplier in ((16, 0.7), (18, 0.7), (24, 1.9)):
        code = code_of(bits=bits, noise_multiplier=multiplier)
        # by hand: sqrt(sigma^2 - 4) / B, and the deviation of the count in users
        assert math.sqrt(code.stddev**2 - 4) / code.bound == pytest.approx(multiplier, rel=1e-6)
        assert math.sqrt(code.stddev**2 - 4) / code.bound >= multiplier
        assert code.stddev / (2 * code.bit_weight) == pytest.approx(2.0, rel=1e-12)
        assert math.hypot(code.scale, code.bit_weight) == pytest.approx(code.length, rel=1e-12)


def test_more_bits_cost_less_noise():
    def extra(bits):
        code = code_of(5995, bits, cohort_size=300, noise_multiplier=0.58, count_stddev=15.0)
        exact = (0.58**-2 - 30.0**-2) ** -0.5  # Theorem 1
        return code.stddev / code.scale / exact - 1

    found = [extra(bits) for bits in (14, 16, 18, 20, 24)]
    assert found == sorted(found, reverse=True)
    assert 0.03 < found[0] < 0.1
    assert found[2] < 0.002
    assert 0 < found[4] < 1e-4


def test_the_modulus_holds_the_worst_sum_with_noise_by_the_stated_margin():
    dim, users = 1000, 30
    code = code_of(dim, 16, cohort_size=users, fixed_size=True)
    assert code.most_users == users
    worst, joint = 0.0, joint_of(torch.ones(dim).double(), 1.0)  # all users the same, all bits set
    for t in range(40):
        noise = words_of(rng_of(t))
        total = sum(centred(code.encode(joint, 1.0, t, rng_of(100 + t)), 16) for _ in range(users))
        total = total + centred(code.encode(0 * joint, 1.0, t, rng_of(), noise, 1), 16)
        worst = max(worst, float(np.abs(total).max()))
    # 4 10^4 numbers in all come near 4.3 deviations, where the modulus has room for 8.3 of them
    assert 0.3 < worst / 2**15 < 0.75


def test_a_modulus_that_is_too_small_breaks_the_sum():
    """Wrap-around on purpose: with 10 times the users that the code is made for, the decoded sum is wrong."""
    code = code_of(200, 14, cohort_size=5, noise_multiplier=0.5, count_stddev=1.0)
    joint = joint_of(torch.ones(200).double(), 1.0)

    def error(users):
        words = np.zeros(code.dim, np.uint32)
        for user in range(users):
            words += code.encode(joint, 1.0, 0, rng_of(user))
        return float((code.decode_sum(words.astype(np.int64), 1.0, 0) / users - joint)[:-1].norm())

    assert error(5) < 0.01
    assert error(code.most_users * 10) > 0.3


def test_too_few_bits_are_refused_with_the_least_that_fit():
    with pytest.raises(SettingError, match=r"bits=14 must be at least (\d+) here: .* drown") as found:
        secure_integers(1_206_590, 14, cohort_size=10_000, noise_multiplier=1.0, count_stddev=500.0)
    least = int(str(found.value).split("at least ")[1].split()[0])
    secure_integers(1_206_590, least, cohort_size=10_000, noise_multiplier=1.0, count_stddev=500.0)
    with pytest.raises(SettingError, match="at least"):
        secure_integers(1_206_590, least - 1, cohort_size=10_000, noise_multiplier=1.0, count_stddev=500.0)


def test_a_count_that_would_drown_is_refused():
    with pytest.raises(SettingError, match="the count drowns in rounding"):
        secure_integers(5000, 14, cohort_size=1000, noise_multiplier=1.0, count_stddev=400.0)


@pytest.mark.parametrize("dim", [1000, 1_206_590])
def test_the_norm_test_in_whole_numbers_never_overflows(dim):
    """Little noise on 32 bits: without a limit the squared norm of a vector would pass 2^63."""
    code = secure_integers(dim, 32, cohort_size=1, noise_multiplier=0.001, count_stddev=0.5, fixed_size=True)
    longest = math.isqrt(code.bound_squared) + 2 * math.isqrt(code.dim) + 2  # each number rounded up, not yet tested
    assert longest**2 < 2**63
    if dim < 10_000:
        update = updates(dim, 1.0)["rotated into one number"]
        numbers = centred(code.encode(joint_of(update, 1.0), 1.0, 0, rng_of()), 32)
        assert 0.9 * code.length**2 < squared(numbers) <= code.bound_squared


@pytest.mark.parametrize(
    "odd", [{"length": 2.0**32}, {"length": math.inf}, {"stddev": 2.0}, {"stddev": math.nan}, {"bit_weight": -1.0}]
)
def test_numbers_of_a_code_that_a_server_makes_up_are_refused(odd):
    with pytest.raises(SettingError, match=next(iter(odd))):
        replace(code_of(), **odd)


@pytest.mark.parametrize("name", ["noise_multiplier", "survivors"])
@pytest.mark.parametrize("odd", [0, -1, math.nan, math.inf, "3", [], 10**30])
def test_numbers_that_no_round_has_are_refused(name, odd):
    with pytest.raises(SettingError, match=name):
        code_of(**{name: odd})


def test_shares_that_are_too_small_are_refused():
    with pytest.raises(SettingError, match="at least"):
        code_of(bits=14, survivors=100_000)


def test_shares_add_up_to_the_noise_of_the_code():
    code, joint = code_of(400, 18, survivors=16), torch.zeros(401)
    sums = [
        sum(centred(code.encode(joint, 1.0, 0, rng_of(), words_of(rng_of(100 * t + i)), 16), 18) for i in range(16))
        for t in range(20)
    ]
    drawn = np.concatenate(sums)
    assert drawn.std() == pytest.approx(code.stddev, rel=5 / math.sqrt(2 * len(drawn)))  # once in a million by chance
    assert stats.kstest(drawn / code.stddev, "norm").pvalue > 1e-6


@pytest.mark.parametrize("bits", range(1, 33))
@pytest.mark.parametrize("count", [1, 8, 13])
def test_packed_numbers_are_their_bits_one_after_the_other(bits, count):
    """Lowest bits first, as one whole number of Python's would have them."""
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, count, dtype=np.uint64).astype(word_type(bits))
    whole = sum(int(number) << (bits * place) for place, number in enumerate(numbers))
    data = packed(numbers, bits)
    assert data.tobytes() == whole.to_bytes(-(-bits * count // 8), "little")
    back = unpacked(data, bits, count)
    assert back.dtype == numbers.dtype
    assert back.tolist() == numbers.tolist()

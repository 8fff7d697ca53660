import numpy as np
import pytest

from clipline import SettingError
from clipline.errors import RunError
from clipline.random.normal_numbers import KeyedNormal
from clipline.random.streams import Streams, counter_bits, keys_of, user_bits, user_order


def test_the_counter_stream_is_splitmix64():
    # The first outputs of splitmix64 from seed 1234567, as published with the generator.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert user_bits(1234567, 5).tolist() == expected == user_bits(1234567, 1000)[:5].tolist()


def test_orders_are_permutations_and_every_place_is_equally_likely():
    streams = Streams(0)
    orders = np.array([user_order(streams.user_key("order/0", 0, user), 6) for user in range(6000)])
    assert (np.sort(orders, axis=1) == np.arange(6)).all()
    counts = np.array([[(orders[:, place] == item).sum() for item in range(6)] for place in range(6)])
    # Pearson's statistic with 25 degrees of freedom exceeds 70 once in 300,000 runs
    assert ((counts - 1000) ** 2 / 1000).sum() < 70


def test_keys_differ_by_seed_purpose_round_and_user():
    keys = {
        Streams(seed).user_key(purpose, round_index, user)
        for seed in range(5)
        for purpose in ("order/0", "order/1", "dropout")
        for round_index in range(20)
        for user in range(200)
    }
    assert len(keys) == 5 * 3 * 20 * 200


def test_streams_are_replayable_by_seed_purpose_and_round():
    for purpose in ("noise", "sampling"):
        first, again = (getattr(Streams(4), purpose)(7).random(3).tolist() for _ in range(2))
        assert first == again
        assert first != getattr(Streams(4), purpose)(8).random(3).tolist()
        assert first != getattr(Streams(5), purpose)(7).random(3).tolist()
    assert Streams(4).initial() == Streams(4).initial() != Streams(5).initial()


def drawn(streams, round_index):
    """Of noise, cohort, rounding, shares of noise and users' randomness some numbers each."""
    normal = [getattr(streams, name)(round_index).standard_normal(5) for name in ("noise", "shares")]
    normal.append(streams.sampling(round_index).standard_normal(5))
    keys = streams.user_keys("order", round_index, np.arange(5)).astype(float)
    return np.concatenate([*normal, streams.rounding(round_index).random(5), keys])


def test_from_the_system_everything_follows_from_a_key_that_no_seed_tells():
    streams = Streams(4, noise_source="system")
    first, next_round = drawn(streams, 0), drawn(streams, 1)
    streams.key.restore(key := streams.key.unprivate_bytes)  # as a resume does
    again = drawn(streams, 0)
    np.testing.assert_array_equal(first, again)
    streams.key.renew()
    assert len(key) == len(streams.key.unprivate_bytes) == 32
    for other in (next_round, drawn(streams, 0), drawn(Streams(4), 0), drawn(Streams(4, "system"), 0)):
        assert not np.isin(first, other).any()
    assert len(np.unique(first)) == len(first)  # nor do the purposes share anything
    assert key.hex() not in repr(streams)


def test_noise_of_the_system_is_drawn_once_for_each_round_under_a_key():
    streams = Streams(4, noise_source="system")
    streams.noise(3)
    with pytest.raises(RunError, match="the noise of round 3 was drawn before but hides one release only: run the"):
        streams.noise(3)
    streams.noise(4)
    streams.key.renew()
    streams.noise(3)


def test_a_seed_of_more_than_63_bits_is_a_key():
    for seed, kind in ((2**63 - 1, np.random.Generator), (2**63, KeyedNormal), (2**256 - 1, KeyedNormal)):
        streams = Streams(seed)
        for name in ("noise", "sampling", "shares"):
            first, again = (getattr(streams, name)(3) for _ in range(2))
            assert isinstance(first, kind)
            assert first.standard_normal(3).tolist() == again.standard_normal(3).tolist()
            assert first.standard_normal(3).tolist() != getattr(streams, name)(4).standard_normal(3).tolist()


def test_with_system_entropy_users_draw_what_nobody_can_work_out_from_the_seed():
    streams = Streams(4, noise_source="system")
    key = streams.user_key("order/0", 0, 1)
    assert key == streams.user_key("order/0", 0, 1)
    assert key not in (Streams(4).user_key("order/0", 0, 1), Streams(4, "system").user_key("order/0", 0, 1))
    assert streams.initial() == Streams(4).initial()  # initial parameters are public
    shared = Streams(4, "system", streams.key)  # as torchrun's ranks have it
    assert shared.user_key("order/0", 0, 1) == key


@pytest.mark.parametrize("seed", [-1, 1.5, "7", None, True, 2**256])
def test_a_seed_is_a_whole_number_that_fits(seed):
    with pytest.raises(SettingError, match="seed="):
        Streams(seed)


def test_keys_of_many_users_at_once_are_those_of_each():
    users = np.array([0, 1, 7, 2**31, 2**36 + 5, 2**62])
    for seed, purpose, round_index in ((0, "order/0", 0), (9, "dropout", 41)):
        streams = Streams(seed)
        keys = streams.user_keys(purpose, round_index, users)
        assert keys.dtype == np.uint64
        assert keys.tolist() == [streams.user_key(purpose, round_index, user) for user in users.tolist()]
    assert Streams(0).user_keys("order/0", 0, users[:0]).shape == (0,)


def test_keys_of_users_of_several_runs_are_those_of_each_in_his_own_run():
    first, second = Streams(4), Streams(5)
    keys = keys_of([(first, 7), (second, 2)], "dropout", np.array([9, 9, 3]), np.array([1, 0, 1]))
    assert keys.tolist() == [second.user_key("dropout", 2, 9), first.user_key("dropout", 7, 9),
                             second.user_key("dropout", 2, 3)]  # fmt: skip


def test_words_of_many_keys_at_once_are_those_of_each():
    keys = np.array([0, 1234567, 2**64 - 1], np.uint64)
    words = counter_bits(keys[:, None], np.arange(5))
    assert words.dtype == np.uint64
    assert words.tolist() == [user_bits(key, 5).tolist() for key in keys.tolist()]
    assert words.tolist() == [[splitmix64(key, i) for i in range(5)] for key in keys.tolist()]
    assert counter_bits(keys, 3).tolist() == words[:, 3].tolist()


def splitmix64(seed, index):
    """Output `index` of the generator from this seed, as its authors write it, in whole numbers."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)

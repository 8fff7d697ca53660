"""Counter-based numbers: uniform, independent, and the same for a user alone and in a stack."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from clipline.engine.core.user_random import UserRandom, random_layer_keys
from clipline.engine.stacked.vmap_layers import Dropout, replace_layers
from clipline.random.streams import counter_bits

KEYS = torch.from_numpy(random_layer_keys(counter_bits(np.array([2026], np.uint64), np.arange(64)), 1, 1)[:, 0, 0])


def drawn(key, *shape):
    chance = UserRandom()
    chance.key.copy_(key)
    return chance.bits(*shape)


def drawn_words(key, count):
    """The same numbers by whole-number arithmetic modulo 2^32."""

    def mixed(word):
        word = ((word ^ (word >> 16)) * 0x7FEB352D) % 2**32
        word = ((word ^ (word >> 15)) * 0x846CA68B) % 2**32
        return word ^ (word >> 16)

    first, second = (int(part) % 2**32 for part in key)
    return [mixed(mixed((index + first) % 2**32) ^ second) % 2**31 for index in range(count)]


def test_the_numbers_are_those_of_the_published_hash():
    for key in (torch.tensor([0, 0]), torch.tensor([-5, 2**31 - 1]), KEYS[0]):
        assert drawn(key, 50).tolist() == drawn_words(key, 50)
    assert drawn(KEYS[0], 2, 3, 5).flatten().tolist() == drawn(KEYS[0], 30).tolist()


def test_bytes_are_equally_likely():
    words = torch.cat([drawn(key, 20_000) for key in KEYS[:16]]).numpy()
    for shift in (0, 8, 16, 23):  # 31 bits
        counts = np.bincount((words >> shift) & 255, minlength=256)
        expected = len(words) / 256
        # Pearson's statistic: 255 degrees of freedom, deviation sqrt(510); 6 of them fail once in 10^7 runs
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * math.sqrt(510)


def test_numbers_of_different_keys_and_of_neighbouring_places_are_unrelated():
    count = 4096
    table = np.stack([drawn(key, count).numpy() for key in KEYS]) / 2**31 - 0.5
    between_keys = np.corrcoef(table) - np.eye(len(KEYS))
    # 2016 correlations of deviation 1/64: the greatest passes 6 deviations once in 250,000 runs
    assert np.abs(between_keys).max() < 6 / math.sqrt(count)
    for lag in (1, 2, 3, 4, 8, 16, 64, 256, 1024):
        product = table[:, lag:] * table[:, :-lag] * 12
        assert abs(product.mean()) < 6 / math.sqrt(product.size)


def test_each_bit_of_a_key_changes_half_of_the_bits():
    base = drawn(KEYS[0], 512).numpy()
    for part in (0, 1):
        for bit in range(32):
            key = KEYS[0].clone()
            key[part] ^= torch.tensor(-(2**31) if bit == 31 else 1 << bit, dtype=torch.int32)
            changed = np.unpackbits((base ^ drawn(key, 512).numpy()).view(np.uint8)).sum() / (512 * 31)
            assert abs(changed - 0.5) < 6 * 0.5 / math.sqrt(512 * 31)


def test_every_user_step_and_layer_has_a_key_that_does_not_depend_on_the_others():
    users = np.array([3, 2**63 + 1], np.uint64)
    keys = random_layer_keys(users, 4, 3)
    assert (keys.shape, keys.dtype) == ((2, 4, 3, 2), np.int32)
    assert len({tuple(key) for key in keys.reshape(-1, 2).tolist()}) == 24
    np.testing.assert_array_equal(random_layer_keys(users[1:], 2, 3)[0], keys[1, :2])  # fewer users, fewer steps
    assert random_layer_keys(users, 3, 0).shape == (2, 3, 0, 2)
    assert random_layer_keys(users, 0, 2).shape == (2, 0, 2, 2)


def test_dropout_does_nothing_in_evaluation_or_at_0_and_drops_all_at_1():
    values = torch.randn(5, 6)
    for p in (0.0, 0.5, 1.0):
        layer = replace_layers(nn.Dropout(p))
        assert isinstance(layer, Dropout)
        assert torch.equal(layer.eval()(values), values)
    assert torch.equal(replace_layers(nn.Dropout(0.0))(values), values)
    assert replace_layers(nn.Dropout(1.0))(values).abs().max() == 0


def test_dropout_passes_gradients_only_where_it_let_values_pass():
    layer = replace_layers(nn.Dropout(0.5))
    values = torch.ones(50, requires_grad=True)
    out = layer(values)
    (gradient,) = torch.autograd.grad(out.sum(), values)
    assert torch.equal(gradient, out.detach())


def test_dropout_keeps_the_type_of_its_values_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert replace_layers(nn.Dropout(0.3))(torch.ones(4, dtype=dtype)).dtype == dtype
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.25, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_kept_follows_from_the_bits_in_every_type_alone_and_in_a_stack(p, dtype):
    values = torch.ones(3, 700, dtype=dtype)
    layer = replace_layers(nn.Dropout(p))
    stack = vmap(lambda key: functional_call(layer, {"key": key}, (values,)))(KEYS[:4])  # its first draw
    for key, row in zip(KEYS[:4], stack, strict=True):
        layer.key.copy_(key)
        layer.draws = 0
        expected = (drawn(key, 3, 700) >= round(p * 2**31)).to(dtype) * (1 / (1 - p))
        assert torch.equal(layer(values), expected)
        assert torch.equal(row, expected)


def test_a_second_draw_differs_and_is_the_same_alone_and_in_a_stack():
    chance = UserRandom()

    def twice():
        chance.draws = 0
        return chance.bits(40), chance.bits(40)

    chance.forward = twice
    stack = vmap(lambda key: functional_call(chance, {"key": key}, ()))(KEYS[:3])
    for number, key in enumerate(KEYS[:3]):
        chance.key.copy_(key)
        alone = twice()
        assert not torch.equal(*alone)
        assert [part[number].tolist() for part in stack] == [part.tolist() for part in alone]
        again = torch.tensor([int(key[0]), (int(key[1]) + 0x9E3779B9 + 2**31) % 2**32 - 2**31], dtype=torch.int32)
        assert alone[1].tolist() == drawn_words(again, 40)

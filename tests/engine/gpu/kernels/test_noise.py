"""Noise drawn on a GPU is that of processor cores. Its kernels need a GPU, or Triton's interpreter on a core."""

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from samples import LOCAL, cross_entropies, flat_training, linear_model, population_of

from clipline import SettingError
from clipline.engine.core.fast_parts import FastParts
from clipline.engine.gpu.kernels import noise
from clipline.engine.gpu.kernels.noise import (
    ChaCha20,
    DeviceNoise,
    DeviceNoiseWarning,
    Philox,
    agree,
    chacha20_blocks,
    device_numbers,
    plain_numbers,
    word_generator,
)
from clipline.engine.prefetch import Prefetch, draws_on_device
from clipline.errors import RunError
from clipline.federated.draws import PART, NoiseNow, PlainDraws
from clipline.federated.sampling import PoissonSampler
from clipline.random.normal_numbers import SystemNormal, from_words, numpy_layers
from clipline.random.streams import Streams
from clipline.training.loop import draws_of

CPU = torch.device("cpu")
GENERATORS = [Philox((0x0123456789ABCDEF, 0xFEDCBA9876543210)), ChaCha20(bytes(range(100, 132)))]
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or noise.noise_triton is None, reason="needs a GPU and Triton"
)

# The generators -------------------------------------------------------------------------------------------------------


def joined(words):
    return sum(word << 64 * place for place, word in enumerate(words))


def test_philox_is_that_of_its_authors():
    """Random123 1.09, tests/kat_vectors, the last line of "philox4x64 10"."""
    counter = joined([0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89])
    made = np.random.Philox(counter=counter - 1, key=joined([0x452821E638D01377, 0xBE5466CF34E90C6C]))
    expected = [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6]
    assert made.random_raw(4).tolist() == expected  # NumPy counts before it draws


def test_words_of_philox_have_the_part_in_the_third_word_of_the_counter():
    key = GENERATORS[0].key
    for part in (0, 1, 7, 2**40):
        ahead = np.random.Philox(key=joined(key)).jumped(part) if part else np.random.Philox(key=joined(key))
        assert GENERATORS[0].words(part, 9).tolist() == ahead.random_raw(9).tolist()
        block = np.random.Philox(counter=joined([2, 0, part, 0]) - 1, key=joined(key)).random_raw(4)
        assert GENERATORS[0].words(part, 8)[4:].tolist() == block.tolist()


CHACHA = [  # RFC 8439, section 2.3.2, then appendix A.1, vectors 2, 4 and 5: key, counter, nonce, key stream
    (
        bytes(range(32)), 1, (0x09000000, 0x4A000000, 0),
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes(32), 1, (0, 0, 0),
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        b"\x00\xff" + bytes(30), 2, (0, 0, 0),
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        bytes(32), 0, (0, 0, 0x02000000),
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "counter", "nonce", "stream"), CHACHA)
def test_chacha20_is_that_of_the_standard(key, counter, nonce, stream):
    counters = np.array([counter + 5, counter], np.uint32)
    assert chacha20_blocks(key, counters, nonce)[1].astype("<u4").tobytes().hex() == stream
    if nonce == (0, 0, 0):
        words = ChaCha20(key).words(0, 8 * counter + 8)[-8:]
        assert words.astype("<u8").tobytes().hex() == stream


@pytest.mark.parametrize("generator", GENERATORS, ids=["philox", "chacha20"])
def test_neighbouring_keys_parts_and_counters_have_nothing_in_common(generator):
    """Of 2^20 bits half differ, up to 6 deviations of 512: once in 5e8 each."""
    if isinstance(generator, Philox):
        near = Philox((generator.key[0] ^ 1, generator.key[1]))
    else:
        near = ChaCha20(bytes([generator.key[0] ^ 1]) + generator.key[1:])
    count = 1 << 14
    words = generator.words(0, count + 8)
    shifted = [words[by : count + by] for by in (1, 4, 8)]
    for other in (near.words(0, count), generator.words(1, count), *shifted):
        differ = np.unpackbits((words[:count] ^ other).view(np.uint8)).sum()
        assert abs(int(differ) - 64 * count // 2) < 6 * np.sqrt(64 * count) / 2
        together = np.corrcoef(from_words(words[:count], 12_000), from_words(other, 12_000))[0, 1]
        assert abs(together) < 6 / np.sqrt(12_000)


def test_no_key_is_shown():
    for generator in GENERATORS:
        assert str(generator.key[0]) not in repr(generator)
        assert repr(generator) in ("Philox()", "ChaCha20()")


# Which generator ------------------------------------------------------------------------------------------------------


def test_a_seeds_noise_has_the_key_of_its_round_and_its_generator_does_not_draw_it_again():
    rng = Streams(4).noise(2)
    generator = word_generator(rng)
    expected = NoiseNow(Streams(4).noise(2), PART + 1000).numbers().numpy()  # over several parts
    np.testing.assert_array_equal(plain_numbers(generator, PART + 1000), expected)
    assert not np.isin(rng.standard_normal(3000), expected).any()
    assert word_generator(rng) is None
    with pytest.raises(RunError, match="noise on a GPU needs a fresh generator"):
        DeviceNoise(rng, 5, CPU)


def test_every_noise_of_the_system_has_a_new_key_of_256_bits():
    keys = {word_generator(Streams(4, "system").noise(0)).key for _ in range(50)}
    assert len(keys) == 50
    assert {len(key) for key in keys} == {32}
    assert all(isinstance(word_generator(SystemNormal()), ChaCha20) for _ in range(2))


def test_generators_that_no_kernel_knows_stay_on_the_core():
    assert word_generator(np.random.default_rng(0)) is None
    half_used = Streams(0).noise(0)
    half_used.random()
    assert word_generator(half_used) is None


@pytest.mark.parametrize("generator", GENERATORS, ids=["philox", "chacha20"])
def test_the_plain_twin_is_one_part_after_the_other(generator):
    drawn = plain_numbers(generator, 2500, part_size=1000)
    assert len(drawn) == 2500
    for part, size in enumerate((1000, 1000, 500)):
        assert drawn[1000 * part :][:size].tolist() == from_words(generator.words(part, 2000), size).tolist()
    assert len(plain_numbers(generator, 0)) == 0


# Around the kernels, with stand-ins of NumPy in their place -----------------------------------------------------------


def stand_in(spoilt=None):
    """What noise_triton does, on a core; `spoilt` changes the numbers of a part."""

    def fill(make):
        def filled(words, key, first_part):
            for part, row in enumerate(words):
                row.copy_(torch.from_numpy(make(key).words(first_part + part, len(row)).view(np.int64)))

        return filled

    def numbers_from(words, units, limits, heights, numbers, part_size):
        assert words.shape[1] % 128 == 0
        for row, part in zip(words, numbers.split(part_size), strict=True):
            part.copy_(torch.from_numpy(from_words(row.numpy().view(np.uint64), len(part))))
        if spoilt is not None:
            spoilt(numbers)

    philox, chacha20 = fill(Philox), fill(lambda key: ChaCha20(np.array(key, "<u4").tobytes()))
    return SimpleNamespace(philox_words=philox, chacha20_words=chacha20, numbers_from=numbers_from, SEGMENT=128)


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(noise, "noise_triton", stand_in())


@pytest.mark.parametrize("generator", GENERATORS, ids=["philox", "chacha20"])
@pytest.mark.parametrize("count", [0, 1, 999, 1000, 3001])
def test_parts_are_put_together_also_where_not_all_are_in_memory(monkeypatch, kernels, generator, count):
    monkeypatch.setattr(noise, "_PARTS_AT_ONCE", 2)
    drawn = device_numbers(generator, count, CPU, part_size=1000)
    assert drawn.dtype == torch.float64
    np.testing.assert_array_equal(drawn.numpy(), plain_numbers(generator, count, part_size=1000))


def test_a_number_that_is_not_drawn_spoils_the_release_instead_of_leaving_it_bare(monkeypatch):
    idle = SimpleNamespace(**vars(stand_in()) | {"numbers_from": lambda *given: None})
    monkeypatch.setattr(noise, "noise_triton", idle)
    assert device_numbers(GENERATORS[0], 100, CPU).isnan().all()


def test_device_noise_is_given_out_once_and_is_that_of_the_round(kernels):
    made = DeviceNoise(Streams(4).noise(0), 3000, "cpu")
    assert torch.equal(made.numbers(), NoiseNow(Streams(4).noise(0), 3000).numbers())
    with pytest.raises(RunError, match="noise was asked for twice but hides one release only"):
        made.numbers()


@pytest.mark.parametrize("kind", ["plain", "prefetch"])
def test_draws_with_noise_of_the_device_are_those_of_plain_draws(kernels, kind):
    given = PoissonSampler(1000, 50), Streams(4), 3000
    plain, ahead = PlainDraws(*given, "cpu", DeviceNoise), Prefetch(*given, "cpu", until=10, on_device=True)
    ours = plain if kind == "plain" else ahead
    for t in (3, 4, 3):
        ours.prefetch(t)
        (cohort, drawn), (expected, numbers) = ours.take(t), PlainDraws(*given).take(t)
        np.testing.assert_array_equal(cohort.users, expected.users)
        assert torch.equal(drawn.numbers(), numbers.numbers())
    ours.close()


def test_noise_of_the_system_on_a_device_is_never_drawn_again(kernels):
    draws = Prefetch(PoissonSampler(1000, 50), Streams(4, "system"), 3000, "cpu", until=10, on_device=True)
    first, other = (draws.take(t)[1].numbers() for t in range(2))
    assert not np.isin(first.numpy(), other.numpy()).any()
    with pytest.raises(RunError, match="the noise of round 0 was drawn before"):
        draws.take(0)


@pytest.fixture
def fresh_trial():
    noise._agrees.cache_clear()
    yield
    noise._agrees.cache_clear()


def test_kernels_that_draw_right_are_used_after_one_trial(kernels, fresh_trial):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert noise._agrees(CPU)


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (lambda numbers: numbers[7:8].mul_(1 + 2**-50), "draws other numbers than NumPy"),
        (lambda numbers: numbers[-1:].fill_(torch.nan), "draws other numbers than NumPy"),
        (lambda numbers: 1 / 0, "cpu cannot .division by zero"),
    ],
)
def test_kernels_that_draw_wrong_or_fail_are_not_used_and_that_is_said(monkeypatch, fresh_trial, spoilt, words):
    monkeypatch.setattr(noise, "noise_triton", stand_in(spoilt))
    with pytest.warns(DeviceNoiseWarning, match=f"noise is drawn by processor cores, as .*{words}"):
        assert not noise._agrees(CPU)


def test_only_numbers_of_the_tail_may_differ_and_only_in_their_last_bits():
    tail = numpy_layers().tail
    expected = np.array([0.5, -1.0, tail + 0.1, -tail - 0.2])
    assert agree(expected, expected)
    assert agree(expected + np.array([0, 0, 2**-51, -(2**-50)]), expected)
    for change in ([2**-53, 0, 0, 0], [0, 2**-52, 0, 0], [0, 0, 2**-49, 0], [0, 0, 0, np.nan]):
        assert not agree(expected + change, expected)


# When ---------------------------------------------------------------------------------------------------------------


def training(**changes):
    settings = {"rounds": 3, "cohort_size": 9, "seed": 5, "local": LOCAL, "noise_multiplier": 0.5, **changes}
    return flat_training(linear_model(16), cross_entropies, population_of([3] * 40, features=16), **settings)


def test_a_core_draws_its_own_noise(kernels):
    assert not noise.usable(CPU, 1 << 20)
    assert not draws_on_device(training().problem)


def test_the_switch_decides_whether_the_device_draws_whatever_is_prefetched(kernels, monkeypatch):
    monkeypatch.setattr(noise, "usable", lambda device, count: (device, count) == (CPU, training().dim + 1))
    runs = {}
    for on in (True, False):
        for ahead in (True, False):
            run = training(fast=FastParts(device_noise=on, prefetch=ahead))
            _, drawn = draws_of(run, 3).take(0)
            assert isinstance(drawn, DeviceNoise) == on
            runs[on, ahead] = run.run().state.params
    assert all(torch.equal(params, runs[False, False]) for params in runs.values())
    with pytest.raises(SettingError, match="device_noise"):
        FastParts(device_noise="yes")


# The kernels ----------------------------------------------------------------------------------------------------------


def check_kernels(device, counts, part_size):
    for generator in GENERATORS:
        for count in counts:
            drawn = device_numbers(generator, count, device, part_size).cpu().numpy()
            assert agree(drawn, plain_numbers(generator, count, part_size)), (generator, count)


def check_the_end_of_the_words(device):
    """An attempt in the tail that begins with the last word reads nothing behind it, where no memory need be."""
    layers = numpy_layers()
    tables = [torch.from_numpy(one).to(device) for one in (layers.units, layers.limits, layers.heights)]
    drawn = []
    for behind in (1 << 61, 1 << 62):
        words = torch.full((256,), (1 << 30) << 9 | 5)  # numbers of layer 5
        words[127], words[128:] = -512, behind  # -512: the largest whole number, of layer 0
        numbers = torch.full((128,), torch.nan, dtype=torch.float64, device=device)
        noise.noise_triton.numbers_from(words[:128].view(1, 128).to(device), *tables, numbers, PART)
        drawn.append(numbers.tolist())
    assert drawn[0] == drawn[1]


@needs_gpu
@pytest.mark.parametrize("part_size", [1000, PART])
def test_kernels_draw_what_a_core_draws(part_size):
    check_kernels(torch.device("cuda"), [1, 1000, 5_000_001 if part_size == PART else 99_999], part_size)


@needs_gpu
def test_noise_on_a_gpu_is_that_of_the_seed_and_drawn_beside_other_work():
    expected = NoiseNow(Streams(4).noise(0), 3 * PART + 5).numbers()
    busy = torch.zeros(1 << 24, device="cuda")
    made = [DeviceNoise(Streams(4).noise(0), len(expected), "cuda") for _ in range(3)]
    for _ in range(20):
        busy = busy * 0.5 + 1  # on the current stream, while the noise is drawn on another
    for one in made:
        assert agree(one.numbers().cpu().numpy(), expected.numpy())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_draw_what_a_core_draws_in_tritons_interpreter():
    code = """if True:
        import torch, test_noise
        test_noise.check_kernels(torch.device('cpu'), [2001], 1500)
        test_noise.check_the_end_of_the_words(torch.device('cpu'))
    """
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)

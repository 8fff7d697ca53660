import copy
import importlib.util
import json
import math
import os
import pickle
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from samples import ROOT, aggregate, opened

from clipline.engine.core.updates import Dense, Updates
from clipline.errors import PrivateError
from clipline.federated.clipping import ClippedSum, ModularSum, PartialSums, clip_factors, clip_rows, join_bit
from clipline.federated.mechanism import GaussianMechanism, Release
from clipline.privacy.events import PoissonSampling


def test_a_row_within_is_unchanged_and_a_longer_one_is_scaled_to_the_clip():
    deltas = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])  # norms 5, 0.5, 0
    clipped, within = clip_rows(deltas, 1.0)
    assert within.tolist() == [False, True, True]
    assert clipped[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert torch.equal(clipped[1:], deltas[1:].double())


def test_a_norm_equal_to_the_clip_is_within():
    _, within = clip_rows(torch.tensor([[3.0, 4.0]]), 5.0)
    assert within.tolist() == [True]


@pytest.mark.parametrize(
    ("dtype", "clip", "size", "entry"),
    [
        (torch.float16, 0.01, 100, 3e4),
        (torch.float32, 0.01, 100_000, 3e38),
        (torch.float32, 0.01, 4096, 2.7e38),
        (torch.float32, 1e-30, 10, 1e12),
        (torch.float64, 1.0, 1000, 1e306),
        (torch.float64, 1e-30, 1000, 1e-25),
    ],
)
def test_huge_rows_and_tiny_clips_of_any_type_end_within_the_clip(dtype, clip, size, entry):
    rows = torch.full((1, size), entry, dtype=dtype)
    clipped, within = clip_rows(rows, clip)
    assert within.tolist() == [False]
    length = math.sqrt(math.fsum((float(value) / clip) ** 2 for value in clipped[0]))
    assert 1 - 1e-9 < length <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_clipped_row_is_longer_than_the_clip_even_by_a_rounding(dtype):
    rows = torch.randn(500, 333, generator=torch.Generator().manual_seed(0)).to(dtype)
    for clip in (1e-20, 0.0123, 1.0, 7.7):
        clipped, _ = clip_rows(rows * 1e3, clip)
        for row in clipped:
            exact = math.fsum(float(value) ** 2 for value in row.double())
            assert exact <= clip**2
        assert float(clipped.double().norm(dim=1).min()) >= clip * (1 - 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_zero_and_is_not_within(bad):
    deltas = torch.tensor([[1.0, bad], [0.1, 0.0]])
    for clip in (0.5, math.inf):
        clipped, within = clip_rows(deltas, clip)
        assert within.tolist() == [False, True]
        assert clipped[0].tolist() == [0.0, 0.0]
        assert clipped[1].tolist() == pytest.approx([0.1, 0.0])


def test_update_and_centred_bit_are_one_vector():
    joint = join_bit(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([True, False]))
    assert joint.tolist() == [[1.0, 2.0, 0.5], [3.0, 4.0, -0.5]]


@pytest.mark.parametrize("block", [1, 2, 7, 40])
def test_the_sum_does_not_depend_on_the_blocks(block):
    deltas = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    total = aggregate([Updates([Dense(0, rows)]) for rows in deltas.split(block)], 1.5, dim=5)
    norms = deltas.double().norm(dim=1)
    expected = (deltas.double() * (1.5 / norms).clamp(max=1).unsqueeze(1)).sum(0)
    inside = opened(total)
    assert inside[:-1].tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
    assert float(inside[-1]) == float((norms <= 1.5).sum()) - 20
    assert total.bound == 1.5


def test_a_private_sum_shows_nothing_of_itself_and_updates_neither():
    updates = Updates([Dense(0, torch.tensor([[123.456, 0.0]]))])
    total = aggregate([updates], 1e9, dim=2)
    for private in (total, updates, *updates.pieces):
        assert "123" not in repr(private)
        assert "tensor" not in str(private)


@pytest.mark.parametrize("clips", ["one", "each its own"])
def test_factors_at_the_ends_of_what_a_norm_can_be(clips):
    tiny, huge = 5e-324, 1.7e308
    norms = torch.tensor([0.0, tiny, 1e-309, 1.0, 2.0, huge, torch.inf, torch.nan], dtype=torch.float64)

    def factors(clip):
        scale, within = clip_factors(norms, clip if clips == "one" else torch.full_like(norms, clip))
        return scale.tolist(), within.tolist()

    assert factors(1.0)[0][:4] == [1.0] * 4
    assert factors(1.0)[0][4] == pytest.approx(0.5, rel=1e-11)
    assert factors(1.0)[0][5:] == [pytest.approx(1 / huge), 0.0, 0.0]
    assert factors(1.0)[1] == [True] * 4 + [False] * 4
    assert factors(math.inf) == ([1.0] * 6 + [0.0] * 2, [True] * 6 + [False] * 2)
    scale, within = factors(1e-320)
    assert within == [True, True] + [False] * 6
    for norm, factor in zip(norms[2:6].tolist(), scale[2:6], strict=True):
        assert norm * factor <= 1e-320


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_the_sums_of_several_runs_are_those_of_each_alone(runs):
    rng = torch.Generator().manual_seed(2)
    deltas, clips = torch.randn(40, 5, generator=rng), [0.5 + 0.4 * run for run in range(runs)]
    owners = torch.randint(0, runs, (40,), generator=rng).numpy()
    together = PartialSums(torch.full((runs, 6), torch.nan, dtype=torch.float64))  # it begins with zeros
    for block in range(0, 40, 7):
        rows = Updates([Dense(0, deltas[block : block + 7])])
        together.add(rows, clips, owners[block : block + 7])
    samplings = [PoissonSampling(0.1 * (1 + run)) for run in range(runs)]
    for run, total in enumerate(together.finished(clips, samplings)):
        alone = aggregate([Updates([Dense(0, deltas[owners == run])])], clips[run], dim=5)
        torch.testing.assert_close(opened(total), opened(alone), rtol=1e-14, atol=1e-14)
        joined = join_bit(*clip_rows(deltas[owners == run], clips[run]))  # the plain version
        torch.testing.assert_close(opened(total), joined.sum(0), rtol=1e-12, atol=1e-12)
        assert (total.bound, total.sampling) == (clips[run], samplings[run])


# Nobody but the mechanism reads a private sum -------------------------------------------------------------------------

SECRET = 123.456


def clipped_sum():
    return ClippedSum(torch.tensor([SECRET, 0.5], dtype=torch.float64), 2.0, PoissonSampling(0.5))


def partial_sums():
    sums = PartialSums(torch.empty(1, 2, dtype=torch.float64))
    sums.add(Updates([Dense(0, torch.tensor([[SECRET]]))]), [1e9], np.zeros(1, np.int64))
    return sums


def modular_sum():
    sums = ModularSum(2, 16)
    sums.add(np.array([123, 4], np.uint16))
    return sums


PRIVATE = [clipped_sum, partial_sums, modular_sum]


def test_a_private_sum_has_no_public_numbers_but_its_bound():
    assert {name for name in dir(clipped_sum()) if not name.startswith("_")} == {
        *("bound", "read_late", "sampling", "take_key")
    }
    assert {name for name in dir(partial_sums()) if not name.startswith("_")} == {*("add", "add_clipped", "finished")}
    assert {name for name in dir(modular_sum()) if not name.startswith("_")} == {"add", "bits", "finished"}
    (total,) = partial_sums().finished([1e9], [PoissonSampling(0.5)])
    assert isinstance(total, ClippedSum)
    assert partial_sums().add(Updates([Dense(0, torch.ones(1, 1))]), [1.0], np.zeros(1, np.int64)) is None


@pytest.mark.parametrize("make", PRIVATE)
def test_a_private_sum_shows_no_numbers_in_text(make):
    private = make()
    for text in (repr(private), str(private), f"{private}", format(private), repr([private])):
        assert "123" not in text
        assert "private" in text


@pytest.mark.parametrize("make", PRIVATE)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda private: copy.deepcopy([private])])
def test_a_private_sum_is_not_copied_or_pickled(make, copied):
    with pytest.raises(PrivateError, match="is private and must not be copied or pickled: release it first"):
        copied(make())


@pytest.mark.parametrize("make", PRIVATE)
@pytest.mark.parametrize(
    "read",
    [
        lambda one: one + one, lambda one: 2 * one, lambda one: -one, lambda one: sum([one, one]), lambda one: one < 3,
        float, int, list, len, bytes, memoryview, vars, json.dumps, lambda one: one[0],
        lambda one: one.total, lambda one: one.__total, lambda one: one.__totals,
        torch.tensor, torch.as_tensor, lambda one: torch.add(torch.zeros(2), one), lambda one: torch.stack([one, one]),
        lambda one: np.asarray(one, np.float64), lambda one: np.add(one, 1.0), lambda one: np.zeros(2) + one,
    ],
)  # fmt: skip
def test_a_private_sum_is_no_number_and_no_array(make, read):
    with pytest.raises((TypeError, AttributeError, ValueError, RuntimeError)) as error:
        read(make())
    assert "123" not in str(error.value)


def test_the_key_is_given_out_once_and_the_mechanism_has_it():
    with pytest.raises(PrivateError, match="the key to private sums is given out once, to the mechanism"):
        ClippedSum.take_key()
    with pytest.raises(PrivateError, match="ask that for a Release"):
        clipped_sum().take_key()
    release = GaussianMechanism(1, 0.0).release(clipped_sum(), np.random.default_rng(0))
    assert isinstance(release, Release)
    assert release.mean.tolist() == [SECRET]


def with_source():
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MYPYPATH": str(ROOT / "src")}


TYPED = """
import numpy as np
from torch import Tensor

from clipline.federated.clip_controllers import ClipController, ClipState
from clipline.federated.clipping import ClippedSum, PartialSums
from clipline.federated.mechanism import GaussianMechanism, Release
from clipline.federated.server_optimisers import ServerOptimiser, ServerState


def steps(
    total: ClippedSum, part: PartialSums, bare: Tensor, release: Release, mechanism: GaussianMechanism,
    server: ServerOptimiser, state: ServerState, controller: ClipController, clip: ClipState, rng: np.random.Generator,
) -> None:
    mechanism.release(total, rng)
    server.update(bare, state, release)
    controller.update(clip, release)
    server.update(bare, state, total)  # refused
    server.update(bare, state, part)  # refused
    server.update(bare, state, bare)  # refused
    controller.update(clip, total)  # refused
    controller.update(clip, part)  # refused
    controller.update(clip, bare)  # refused
    mechanism.release(part, rng)  # refused
    mechanism.release(bare, rng)  # refused
    mechanism.release(release, rng)  # refused
    total.total  # refused
    total._ClippedSum__total  # refused
    part._PartialSums__totals  # refused
    total + total  # refused
    total[0]  # refused
    float(total)  # refused
    np.add(total, 1.0)  # refused
"""


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_types_let_nothing_earlier_than_a_release_pass(tmp_path):
    """A server step and a clip step take a `Release`, and only the mechanism makes one, of a `ClippedSum` alone."""
    snippet = tmp_path / "snippet.py"
    snippet.write_text(TYPED)
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options, "--no-error-summary", str(snippet)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=with_source(), check=False)
    # Whatever the folder: of a file that it has seen mypy repeats what it said, with the path of then.
    found = {int(line) for line in re.findall(r"snippet\.py:(\d+): error: ", done.stdout)}
    wanted = {number for number, line in enumerate(TYPED.splitlines(), start=1) if line.endswith("# refused")}
    assert found == wanted, done.stdout + done.stderr


@pytest.mark.parametrize("clip", [1e-30, 1e-20, 1e-10])
def test_a_huge_update_never_ends_above_a_tiny_clip(clip):
    """The factor of such an update is a denormal number, of few bits: rounded up it would leave twice the clip."""
    for norm in (3.4e293, 3.4e303, 3.4e307, 1.7e308):
        (factor,), (within,) = clip_factors(torch.tensor([norm], dtype=torch.float64), clip)
        assert Fraction(float(factor)) * Fraction(norm) <= Fraction(clip)
        assert not within

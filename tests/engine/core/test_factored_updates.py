"""Factors are measured and summed as the matrices that they stand for."""

import pytest
import torch

from clipline.engine.core.updates import FactoredUpdates, Updates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_and_sums_are_those_of_the_formed_updates(dtype):
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(6, width, generator=generator).to(dtype) for width in (4, 3))
    factored = FactoredUpdates(2, inputs, outputs)
    formed = torch.einsum("uo,ui->uoi", outputs.double(), inputs.double()).flatten(1)
    updates = Updates([factored])
    torch.testing.assert_close(updates.norms(), formed.norm(dim=1), rtol=1e-12, atol=0)
    scale = torch.tensor([1.0, 0.5, 0.0, 1.0, 0.25, 1.0], dtype=torch.float64)
    total = torch.zeros(1, 16, dtype=torch.float64)
    updates.add_to(total, scale)
    torch.testing.assert_close(total[0, 2:14], scale @ formed, rtol=1e-12, atol=1e-14)
    assert not total[0, :2].any()
    assert not total[0, 14:].any()
    torch.testing.assert_close(updates.dense(16)[:, 2:14], formed.to(dtype))
    torch.testing.assert_close(updates.of_users(scale == 1).norms(), formed[scale == 1].norm(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_who_has_no_finite_update_has_no_finite_norm_and_adds_nothing(bad):
    inputs, outputs = torch.ones(2, 3), torch.ones(2, 2)
    outputs[0, 1] = bad
    updates, total = Updates([FactoredUpdates(0, inputs, outputs)]), torch.zeros(1, 6, dtype=torch.float64)
    assert not updates.norms()[0].isfinite()
    updates.add_to(total, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert torch.equal(total[0], torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(45, 53), (71, 83), (33, 97)], ids=str)
def test_a_norm_is_the_same_to_the_last_bit_whoever_else_is_in_the_block(shape, dtype, threads):
    width, height = shape
    rng, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    inputs = torch.randn(129, width, generator=rng, dtype=torch.float64).to(dtype)
    outputs = torch.randn(129, height, generator=rng, dtype=torch.float64).to(dtype)
    torch.set_num_threads(threads)
    try:
        together = Updates([FactoredUpdates(0, inputs, outputs)]).norms()
        for users in (slice(0, 1), slice(1, 2), slice(3, 5), slice(1, 20), slice(0, 128), slice(1, 129)):
            assert torch.equal(Updates([FactoredUpdates(0, inputs[users], outputs[users])]).norms(), together[users])
    finally:
        torch.set_num_threads(before)

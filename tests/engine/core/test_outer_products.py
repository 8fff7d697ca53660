"""Changes of a matrix as terms of a sum: the same as changes that are made, in C and in torch's operations."""

import pytest
import torch

from clipline.engine.core.outer_products import SparseOuterProducts, UpdatedWeight

HEIGHT = 12


@pytest.mark.parametrize("width", [1, 63, 64, 65, 127, 128, 129, 500])  # around what C adds up in registers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_any_width_are_those_of_the_rows_that_have_moved(dtype, width):
    rng = torch.Generator().manual_seed(0)
    weight, table = torch.randn(HEIGHT, width, generator=rng), torch.randn(6, width, generator=rng)
    numbers, sources = torch.randint(HEIGHT, (30,), generator=rng), torch.randint(6, (30,), generator=rng)
    change = SparseOuterProducts(numbers, sources, torch.randn(30, generator=rng).to(dtype), table.to(dtype))
    features, values = torch.randint(HEIGHT, (50, 9), generator=rng), torch.randn(50, 9, generator=rng).to(dtype)
    values[:, 7:], values[3] = 0, 0  # padding, and an example of padding alone
    by_hand = weight.double().index_add(0, numbers, change.factors.double().unsqueeze(1) * table[sources].double())
    product, terms = UpdatedWeight(weight.to(dtype), [change]).sparse_product(features, values)
    expected = torch.stack([value @ by_hand[feature] for feature, value in zip(features, values.double(), strict=True)])
    close = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(product, expected.to(dtype), rtol=close, atol=close)
    assert torch.equal(terms.numbers, features[values != 0])


def test_terms_by_hand():
    table = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    one = SparseOuterProducts(torch.tensor([4, 4]), torch.tensor([0, 1]), torch.tensor([3.0, 0.5]), table)
    two = SparseOuterProducts.of_rows(torch.tensor([1]), torch.tensor([[7.0, 8.0]]))
    joined = SparseOuterProducts.joined([one, two])
    assert joined.numbers.tolist() == [4, 4, 1]
    assert joined.rows(torch.tensor([0, 2])).tolist() == [[4.0, 40.0], [7.0, 8.0]]
    assert SparseOuterProducts.joined([one]) is one
    nothing = SparseOuterProducts.none(torch.zeros(5, 2))
    assert len(nothing.numbers) == 0
    assert nothing.rows(torch.zeros(0, dtype=torch.int64)).shape == (0, 2)

import torch
import torch.nn.functional as F

from clipline.engine.stacked.aligned import aligned_product, aligned_product_backward, outer_products


def test_products_are_those_of_torch_and_alike_at_every_place():
    generator = torch.Generator().manual_seed(0)
    for users, positions, width, height in (
        (16, 3, 9, 2),
        (40, 7, 9, 2),
        (16, 49, 257, 5),
        (40, 25, 9, 3),
        (8, 1, 16, 16),
    ):
        inputs, outputs = (torch.randn(users, positions, size, generator=generator) for size in (width, height))
        weight = torch.randn(height, width, generator=generator)
        made = (
            aligned_product(inputs, weight),
            aligned_product_backward(outputs, weight),
            outer_products(outputs, inputs),
        )
        formed = torch.einsum("upo,upi->uoi", outputs, inputs).flatten(1)
        for found, wanted in zip(made, (F.linear(inputs, weight), outputs @ weight, formed), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        inputs, outputs = inputs.roll(-5, 0), outputs.roll(-5, 0)
        moved = (
            aligned_product(inputs, weight),
            aligned_product_backward(outputs, weight),
            outer_products(outputs, inputs),
        )
        assert all(torch.equal(one.roll(-5, 0), other) for one, other in zip(made, moved, strict=True))

import numpy as np
import pytest
import torch
from torch import nn

from clipline.engine.stacked.layers import PatchConv2d
from clipline_paper.tasks.cifar100 import TASK, RandomCrops, ResNet18, central_crops, loss, standardised


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ResNet18()


def random_crops(images, key=0):
    crops = RandomCrops()
    crops.key.copy_(torch.tensor([key, 7 * key + 1], dtype=torch.int32))
    return crops(images)


def pixels(count=2, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8))


def test_parameters_layer_by_layer(model):
    # stem 7*7*3*64, norms 2 a channel, 3x3 kernels 9*in*out, projections in*out, last layer 512*100 + 100
    convs = [(3, 64, 49)] + [(64, 64, 9)] * 4 + [(64, 128, 9), (64, 128, 1)] + [(128, 128, 9)] * 3
    convs += [(128, 256, 9), (128, 256, 1)] + [(256, 256, 9)] * 3 + [(256, 512, 9), (256, 512, 1)] + [(512, 512, 9)] * 3
    assert len(convs) == len([m for m in model.modules() if isinstance(m, PatchConv2d)])
    kernels = sum(a * b * c for a, b, c in convs)
    assert kernels == sum(m.weight.numel() for m in model.modules() if isinstance(m, PatchConv2d))
    norms = sum(2 * m.num_channels for m in model.modules() if isinstance(m, nn.GroupNorm))
    assert kernels + norms + 51_300 == 11_227_812 == sum(p.numel() for p in model.parameters())


def test_maps_are_12_after_the_stem_and_6_everywhere_after_the_pool(model):
    shapes = {}
    hooks = [
        layer.register_forward_hook(lambda m, i, o, name=name: shapes.__setitem__(name, tuple(o.shape[1:])))
        for name, layer in [("stem", model.stem), *((f"block{n}", b) for n, b in enumerate(model.blocks))]
    ]
    with torch.no_grad():
        assert model(torch.zeros(1, 24, 24, 3)).shape == (1, 100)
    for hook in hooks:
        hook.remove()
    widths = [64, 64, 128, 128, 256, 256, 512, 512]
    assert shapes == {"stem": (64, 12, 12)} | {f"block{n}": (width, 6, 6) for n, width in enumerate(widths)}


def test_initial_weights_are_those_of_keras(model):
    kernel = model.blocks[-1].conv2.weight
    assert kernel.std().item() == pytest.approx((2 / 4608) ** 0.5, rel=0.01)
    assert kernel.abs().max() <= 2 * (2 / 4608) ** 0.5 / 0.8796 + 1e-6  # cut at two standard deviations
    assert model.out.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert model.out.bias.abs().max() == 0


def test_standardising_by_hand():
    crop = torch.zeros(2, 2, 2, 3, dtype=torch.uint8)
    crop[0, 0] = 10  # half of the values 10, half 0: mean 5, standard deviation 5
    out = standardised(crop, torch.float64)
    assert out[0, 0].unique().tolist() == [1.0]
    assert out[0, 1].unique().tolist() == [-1.0]
    assert out[1].abs().max() == 0  # a flat image stays finite


def test_crops_are_windows_mirrored_or_not_and_come_in_81_places():
    places = torch.arange(32 * 32).view(1, 32, 32, 1).expand(600, 32, 32, 3)
    crops = random_crops(places)
    assert crops.shape == (600, 24, 24, 3)
    seen, mirrored = set(), 0
    for crop in crops[..., 0]:
        row, left = divmod(int(crop[0].min()), 32)
        window = places[0, row : row + 24, left : left + 24, 0]
        seen.add((row, left))
        flip = not torch.equal(crop, window)
        assert torch.equal(crop, window.flip(1) if flip else window)
        mirrored += flip
    assert len(seen) > 75  # of 81; 600 draws miss 6 or more with probability below 1e-9
    assert 240 < mirrored < 360  # five standard deviations


def test_crops_come_from_the_key_and_nowhere_else():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = random_crops(pixels(8), key=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(first, random_crops(pixels(8), key=3))
    assert not torch.equal(first, random_crops(pixels(8), key=4))


def test_the_loss_is_the_mean_cross_entropy_plus_the_penalty(model):
    quiet = ResNet18()
    nn.init.zeros_(quiet.out.weight)
    quiet.out.bias.data = torch.arange(100.0)
    batch = {"pixels": pixels(2), "labels": torch.tensor([99, 98], dtype=torch.uint8)}
    squares = sum(
        float(p.detach().double().square().sum())
        for n, p in quiet.named_parameters()
        if "norm" not in n and "projection.1" not in n
    )
    entropy = np.log(np.exp(np.arange(100.0) - 99).sum()) + 0.5  # labels 0 and 1 below the top
    with torch.no_grad():
        got = loss(quiet, batch)
    assert got.shape == (2,)
    assert got.mean().item() == pytest.approx(entropy + 1e-4 * squares, rel=1e-5)
    assert squares > 328_350  # the last bias is penalised: 0^2 + ... + 99^2


def test_pitfall_defaults_that_drift_cifar_augments_by_default():
    assert TASK.settings.augment is True

    class Recorder(ResNet18):
        def forward(self, images):
            self.seen = images
            return images.new_zeros(len(images), 100)

    recorder = Recorder()
    batch = {"pixels": pixels(4), "labels": torch.zeros(4)}
    recorder.crops.key.copy_(torch.tensor([5, 36], dtype=torch.int32))
    loss(recorder, batch)
    assert torch.equal(recorder.seen, standardised(random_crops(pixels(4), key=5), torch.float32))
    assert not torch.equal(recorder.seen, standardised(central_crops(pixels(4)), torch.float32))
    loss(recorder, batch, augment=False)
    assert torch.equal(recorder.seen, standardised(central_crops(pixels(4)), torch.float32))

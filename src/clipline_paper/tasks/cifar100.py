"""CIFAR-100: classify images into 100 classes, by a residual network of 18 layers with group normalisation."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipline import Population
from clipline.layers import GroupNormReLU, PatchConv2d, UserRandom, he_normal_
from clipline.tasks import Batch, Counts, LoadedTask, TrainSettings, evaluator, initialised

from ..paper_task import Fields, paper_task
from ..stand_ins import cifar100_users

CLASSES = 100
SIDE, CROP = 32, 24  # pixels
WIDTHS = (64, 64, 64, 128, 128, 256, 256, 512, 512)  # channels before the first block and after each
PENALTY = 1e-4  # on the sum of squares of all convolutions and of the last layer
FIELDS: Fields = {"pixels": ((SIDE, SIDE, 3), "whole"), "labels": ((), "whole")}


def _conv(channels: int, filters: int, size: int, stride: int = 1) -> PatchConv2d:
    layer = PatchConv2d(channels, filters, size, stride, padding="same", bias=False)
    he_normal_(layer.weight.data)
    return layer


class Block(nn.Module):
    """Two convolutions beside a shortcut, normalised before each; the shortcut is projected where channels change."""

    def __init__(self, channels: int, filters: int, groups: int, first: bool) -> None:
        super().__init__()
        self.norm1 = None if first else GroupNormReLU(groups, channels, eps=1e-3)  # the stem has just normalised
        self.conv1 = _conv(channels, filters, 3)
        self.norm2 = GroupNormReLU(groups, filters, eps=1e-3)
        self.conv2 = _conv(filters, filters, 3)
        self.projection = None
        if channels != filters:
            self.projection = nn.Sequential(_conv(channels, filters, 1), nn.GroupNorm(groups, filters, eps=1e-3))

    def forward(self, maps: Tensor) -> Tensor:
        """(batch, channels, side, side) -> (batch, filters, side, side)."""
        hidden = maps if self.norm1 is None else self.norm1(maps)
        hidden = self.conv2(self.norm2(self.conv1(hidden)))
        shortcut = maps if self.projection is None else self.projection(maps)
        added: Tensor = shortcut + hidden
        return added


class ResNet18(nn.Module):
    """The original's network, 11,227,812 parameters. No stage strides: after the pool every map is 6 by 6.

    `groups` is 32 by default. The original left it to a library whose default was 2 until November 2020 and 32 since,
    and no record says which of the two the paper's runs had.
    """

    def __init__(self, groups: int = 32) -> None:
        super().__init__()
        self.crops = RandomCrops()
        self.stem = _conv(3, WIDTHS[0], 7, stride=2)
        self.stem_norm = nn.GroupNorm(groups, WIDTHS[0], eps=1e-3)
        self.blocks = nn.ModuleList(
            Block(channels, filters, groups, first=number == 0)
            for number, (channels, filters) in enumerate(itertools.pairwise(WIDTHS))
        )
        self.last_norm = nn.GroupNorm(groups, WIDTHS[-1], eps=1e-3)
        self.out = nn.Linear(WIDTHS[-1], CLASSES)
        nn.init.normal_(self.out.weight, std=0.01)
        nn.init.zeros_(self.out.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 24, 24, 3) standardised -> (batch, 100) logits."""
        maps = F.relu(self.stem_norm(self.stem(images.permute(0, 3, 1, 2))))
        # "same" pooling of an even side: one more row and column, at the far end; nothing is below 0 after the ReLU.
        maps = F.max_pool2d(F.pad(maps, (0, 1, 0, 1)), 3, stride=2)
        for block in self.blocks:
            maps = block(maps)
        logits: Tensor = self.out(F.relu(self.last_norm(maps)).mean(dim=(2, 3)))
        return logits

    def penalty(self) -> Tensor:
        """1e-4 times the sum of squares of every kernel and of the last bias; normalisation layers are left out."""
        kernels = [layer.weight for layer in self.modules() if isinstance(layer, PatchConv2d)]
        squares = [weight.square().sum() for weight in (*kernels, self.out.weight, self.out.bias)]
        return PENALTY * torch.stack(squares).sum()


class RandomCrops(UserRandom):
    """Cuts each image at its own place of 81, then mirrors it or not, by the user's own random numbers."""

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 32, 32, 3) -> (batch, 24, 24, 3)."""
        count = len(pixels)
        drawn, along = self.bits(count, 3).long(), torch.arange(CROP, device=pixels.device)
        places = SIDE - CROP + 1
        rows = drawn[:, 0, None] % places + along
        mirrored = drawn[:, 2, None] % 2 == 1
        columns = drawn[:, 1, None] % places + torch.where(mirrored, CROP - 1 - along, along)
        image = torch.arange(count, device=pixels.device)
        return pixels[image[:, None, None], rows[:, :, None], columns[:, None, :]]


def central_crops(pixels: Tensor) -> Tensor:
    """(batch, 32, 32, 3) -> (batch, 24, 24, 3), the middle of each."""
    edge = (SIDE - CROP) // 2
    return pixels[:, edge : edge + CROP, edge : edge + CROP]


def standardised(crops: Tensor, dtype: torch.dtype) -> Tensor:
    """Each image less its mean, over its standard deviation or 1 / sqrt(1728), whichever is larger: all 1728 values."""
    values = crops.to(dtype)
    mean = values.mean(dim=(1, 2, 3), keepdim=True)
    spread = (values - mean).square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    return (values - mean) / spread.clamp(min=values[0].numel() ** -0.5)


def loss(model: nn.Module, batch: Batch, augment: bool = True) -> Tensor:
    """(batch,): cross-entropy of images cropped, mirrored, standardised, in this order; plus the model's penalty."""
    assert isinstance(model, ResNet18)
    crops = model.crops(batch["pixels"]) if augment else central_crops(batch["pixels"])
    logits = model(standardised(crops, model.out.weight.dtype))
    return F.cross_entropy(logits, batch["labels"].long(), reduction="none") + model.penalty()


def count(model: nn.Module, batch: Batch) -> Counts:
    """Right answers and answers, on central crops."""
    images = standardised(central_crops(batch["pixels"]), next(model.parameters()).dtype)
    return {"accuracy": ((model(images).argmax(dim=1) == batch["labels"].long()).sum(), len(images))}


def build(settings: TrainSettings, population: Population, test: Population) -> LoadedTask:
    """The task on these users."""
    make = partial(initialised, partial(ResNet18, settings.group_count or 32))
    chosen = partial(loss, augment=bool(settings.augment))
    return LoadedTask(population, make, chosen, evaluator(count, test, str(settings.evaluate_on), batch_size=100))


TASK = paper_task(
    "cifar100",
    title="CIFAR-100 by Pachinko allocation: {users} users with patterns for pictures",
    stand_in=cifar100_users,
    fields=FIELDS,
    build=build,
    test_users=100,
    augment=True,
    group_count=32,
)

"""The six networks in plain PyTorch, as a user of a PyTorch simulator would write them; the loss is a method.

The parameter counts are those of the paper's networks, but for `nn.LSTM`, which has a second bias.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """A network whose outputs are the logits of classes."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(self(x), y)


class CharacterNet(Classifier):
    """emnist_cr: two convolutions, two dense layers, dropout after each pair's first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.hidden, self.out = nn.Linear(9216, 128), nn.Linear(128, 62)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, 28, 28) -> (batch, 62)."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.hidden(self.dropout1(x).flatten(1)))
        return self.out(self.dropout2(x))


class Autoencoder(nn.Module):
    """emnist_ae: eight dense layers, the fourth without a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        widths = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
        layers: list[nn.Module] = []
        for number, (width, after) in enumerate(itertools.pairwise(widths)):
            layers += [nn.Linear(width, after)] if number == 3 else [nn.Linear(width, after), nn.Sigmoid()]
        self.layers = nn.Sequential(*layers)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean over the pixels, sum over the batch."""
        return (self.layers(x) - y).square().mean(dim=1).sum()


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, normalised before each."""

    def __init__(self, channels: int, filters: int, first: bool) -> None:
        super().__init__()
        self.norm1 = nn.Identity() if first else nn.Sequential(nn.GroupNorm(32, channels, eps=1e-3), nn.ReLU())
        self.conv1 = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, filters, eps=1e-3)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if channels != filters:
            projection = nn.Conv2d(channels, filters, 1, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(32, filters, eps=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, 6, 6) -> (batch, filters, 6, 6)."""
        return self.shortcut(x) + self.conv2(F.relu(self.norm2(self.conv1(self.norm1(x)))))


class ResNet18(Classifier):
    """cifar100: no stage strides, as in the original program; crops, mirrors and standardises what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, stride=2, bias=False)
        self.stem_norm = nn.GroupNorm(32, 64, eps=1e-3)
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        pairs = enumerate(itertools.pairwise(widths))
        self.blocks = nn.Sequential(*(Block(channels, filters, number == 0) for number, (channels, filters) in pairs))
        self.last_norm = nn.GroupNorm(32, 512, eps=1e-3)
        self.out = nn.Linear(512, 100)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 24, 24) -> (batch, 100). Padded by hand, as "same" in TensorFlow is lopsided."""
        x = F.relu(self.stem_norm(self.stem(F.pad(x, (2, 3, 2, 3)))))
        x = self.blocks(F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, stride=2))
        return self.out(F.relu(self.last_norm(x)).mean(dim=(2, 3)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy and a penalty of 1e-4 on the squares of the kernels."""
        squares = [weight.square().sum() for weight in self.parameters() if weight.dim() > 1]
        return F.cross_entropy(self(augmented(x)), y) + 1e-4 * torch.stack(squares).sum()


def augmented(pixels: Tensor) -> Tensor:
    """(batch, 3, 32, 32) bytes -> (batch, 3, 24, 24): a crop of its own for each, mirrored or not, standardised."""
    count, device = len(pixels), pixels.device
    along = torch.arange(24, device=device)
    rows = torch.randint(0, 9, (count, 1), device=device) + along
    columns = torch.randint(0, 9, (count, 1), device=device) + along
    columns = torch.where(torch.rand(count, 1, device=device) < 0.5, columns, columns.flip(1))
    crops = pixels[torch.arange(count, device=device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    values = crops.permute(0, 3, 1, 2).float()
    spread, mean = torch.std_mean(values, dim=(1, 2, 3), correction=0, keepdim=True)
    return (values - mean) / spread.clamp(min=1728**-0.5)


class CharacterLSTM(nn.Module):
    """shakespeare: two layers of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.out = nn.Linear(256, 90)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean over all positions."""
        logits = self.out(self.lstm(self.embedding(x))[0])
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class WordLSTM(nn.Module):
    """so_nwp: one layer of 670, projected to 96."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_004, 96)
        self.lstm = nn.LSTM(96, 670, batch_first=True)
        self.projection, self.out = nn.Linear(670, 96), nn.Linear(96, 10_004)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean over all positions."""
        logits = self.out(self.projection(self.lstm(self.embedding(x))[0]))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class TagRegression(nn.Module):
    """so_lr: one dense layer on rows of 10,000."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = nn.Linear(10_000, 500)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean over the tags, sum over the batch."""
        return F.binary_cross_entropy_with_logits(self.tags(x), y, reduction="sum") / 500


MODELS = {
    "emnist_cr": CharacterNet,
    "emnist_ae": Autoencoder,
    "cifar100": ResNet18,
    "shakespeare": CharacterLSTM,
    "so_nwp": WordLSTM,
    "so_lr": TagRegression,
}


def tensors_of(x: object, y: object) -> tuple[Tensor, Tensor]:
    """NumPy arrays as tensors; images get their channels first."""
    left, right = torch.as_tensor(x), torch.as_tensor(y)
    return (left.permute(0, 3, 1, 2).contiguous() if left.dim() == 4 else left), right

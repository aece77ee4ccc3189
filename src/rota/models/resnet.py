"""ResNets for small images: a 3x3 stem without pooling, then blocks of more and more channels.

`norm` is "batch" (BatchNorm with running statistics, which are averaged like weights),
"batch-no-stats" (BatchNorm that uses each batch's own statistics, in testing too) or "group"
(GroupNorm with two groups, and no statistics across examples).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rota.errors import BadInput, did_you_mean
from rota.models.parts import head, image, net

Norm = Callable[[int], nn.Module]

NORMS: dict[str, Norm] = {
    "batch": nn.BatchNorm2d,
    "batch-no-stats": partial(nn.BatchNorm2d, track_running_stats=False),
    "group": partial(nn.GroupNorm, 2),
}

BLOCKS = (
    (64, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    (512, 512, 1),
)
"""(inputs, outputs, stride) of each block."""


def resnet18(
    shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, norm: str = "batch"
) -> nn.Module:
    """ResNet-18 with a 3x3 stem, for CIFAR-10 (He et al. 2016; FjORD). 11,173,962 parameters."""
    return _resnet("resnet18", BLOCKS, shape, classes, norm)


def resnet8(
    shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, norm: str = "group"
) -> nn.Module:
    """ResNet-8: three blocks of 16 to 64 channels, GroupNorm. 78,042 parameters on CIFAR-10."""
    return _resnet("resnet8", ((16, 16, 1), (16, 32, 2), (32, 64, 2)), shape, classes, norm)


def preact_resnet18(
    shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, norm: str = "batch-no-stats"
) -> nn.Module:
    """Pre-activation ResNet-18 (He et al. 2016b), MMFL's for CIFAR-10. 11,172,170 parameters."""
    colours, _, _ = image("preact_resnet18", shape)
    normed = _norm(norm)
    blocks = {f"block{i}": PreactBlock(*sizes, normed) for i, sizes in enumerate(BLOCKS, start=1)}
    last = {
        "norm": normed(512),
        "relu": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
    }
    return net(
        conv=nn.Conv2d(colours, 64, 3, padding=1, bias=False),
        **blocks,
        **last,
        fc=head(512, classes),
    )


def _resnet(
    model: str,
    sizes: Sequence[tuple[int, int, int]],
    shape: tuple[int, ...],
    classes: int,
    norm: str,
) -> nn.Module:
    colours, _, _ = image(model, shape)
    normed, first, last = _norm(norm), sizes[0][0], sizes[-1][1]
    blocks = {f"block{i}": Block(*size, normed) for i, size in enumerate(sizes, start=1)}
    stem = {
        "conv": nn.Conv2d(colours, first, 3, padding=1, bias=False),
        "norm": normed(first),
        "relu": nn.ReLU(),
    }
    return net(
        **stem, **blocks, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=head(last, classes)
    )


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + x); x is projected where the sizes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        if stride == 1 and inputs == outputs:
            self.skip: nn.Module = nn.Identity()
        else:
            narrow = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.skip = net(conv=narrow, norm=norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.skip(x))


class PreactBlock(nn.Module):
    """conv(relu(norm(conv(a)))) + x with a = relu(norm(x)).

    Where the sizes change, a projection of a replaces x.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = stride == 1 and inputs == outputs
        self.skip = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm1(x))
        out: Tensor = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return out + (x if self.skip is None else self.skip(active))


def _norm(name: str) -> Norm:
    if name not in NORMS:
        raise BadInput(f"norm '{name}' is unknown; {did_you_mean(name, NORMS)}")
    return NORMS[name]

"""A small transformer that reads a sequence of characters and predicts the next one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rota.models.parts import head, net
from rota.models.text import Last, sequence


def transformer(
    shape: tuple[int, ...] = (80,), classes: int = 80, width: int = 128, layers: int = 2
) -> nn.Module:
    """A small transformer for Shakespeare: causal attention of four heads. 427,600 parameters.

    It normalises before each part, as GPT-2 does, and has GELU and learned positions.
    """
    sequence("transformer", shape)
    blocks = {f"block{i}": Attentive(width, heads=4) for i in range(1, layers + 1)}
    return net(
        embed=Embedded(classes, shape[0], width),
        **blocks,
        norm=nn.LayerNorm(width),
        last=Last(),
        fc=head(width, classes),
    )


class Embedded(nn.Module):
    """Embedded characters plus their embedded positions."""

    def __init__(self, classes: int, length: int, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(classes, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.character(x)
        return embedded + self.position


class Attentive(nn.Module):
    """x + attention(norm(x)), and then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = net(
            fc1=nn.Linear(width, 4 * width), gelu=nn.GELU(), fc2=nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heard = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outputs(heard.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp(self.norm2(x))
        return x + added

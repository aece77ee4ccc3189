"""Networks that read a sequence of characters (numbers 0..classes-1) and predict the next one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from rota.errors import BadInput
from rota.models.parts import head, net


def lstm_shakespeare(shape: tuple[int, ...] = (80,), classes: int = 80) -> nn.Module:
    """FLuID's Shakespeare network: one-hot characters, two LSTM layers. 249,936 parameters.

    The layers have 128 units. The source's Keras network has 248,912 parameters: one bias vector
    per LSTM layer, where PyTorch has two.
    """
    sequence("lstm_shakespeare", shape)
    return net(
        one_hot=OneHot(classes),
        lstm1=LSTM(classes, 128),
        lstm2=LSTM(128, 128),
        last=Last(),
        fc=head(128, classes),
    )


def leaf_lstm(shape: tuple[int, ...] = (80,), classes: int = 80) -> nn.Module:
    """LEAF's Shakespeare network: embedded characters, two LSTM layers. 819,920 parameters.

    Characters have 8 dimensions and the layers 256 units. LEAF's TensorFlow network has 817,872
    parameters: one bias vector per LSTM layer, where PyTorch has two.
    """
    sequence("leaf_lstm", shape)
    return net(
        embed=nn.Embedding(classes, 8),
        lstm1=LSTM(8, 256),
        lstm2=LSTM(256, 256),
        last=Last(),
        fc=head(256, classes),
    )


def mmfl_lstm(shape: tuple[int, ...] = (80,), classes: int = 80) -> nn.Module:
    """MMFL's Shakespeare network: embedded characters, LSTM layers, dropout. 952,400 parameters.

    Characters have 128 dimensions and the two layers 256 units.
    """
    sequence("mmfl_lstm", shape)
    return net(
        embed=nn.Embedding(classes, 128),
        lstm1=LSTM(128, 256),
        lstm2=LSTM(256, 256),
        last=Last(),
        drop=nn.Dropout(0.5),
        fc=head(256, classes),
    )


@wrap_torch_function(lambda inputs, weight: (inputs, weight))
def recurrent(inputs: Tensor, weight: Tensor) -> Tensor:
    """The time steps of an LSTM layer.

    It maps inputs [batch, time, 4 * units] and weights W_hh to [batch, time, units]. torch's
    function modes see this function as one call, so an engine can replace it by a fused one.
    """
    hidden = cell = inputs.new_zeros(len(inputs), weight.shape[1])
    out = []
    for now in inputs.unbind(1):
        i, f, g, o = (now + F.linear(hidden, weight)).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        out.append(hidden)
    return torch.stack(out, dim=1)


class LSTM(nn.Module):
    """One LSTM layer, [batch, time, inputs] -> [batch, time, units], written out.

        i, f, g, o = W_ih x_t + b_ih + W_hh h + b_hh
        c = sig(f) c + sig(i) tanh(g)
        h = sig(o) tanh(c)

    It has nn.LSTM's parameters and gives its numbers. torch.func cannot map nn.LSTM's fused kernel
    over clients, and that kernel fixes the number of units. This layer takes its sizes from the
    weights that it is given.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * units, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * units, units))
        self.bias_ih = nn.Parameter(torch.empty(4 * units))
        self.bias_hh = nn.Parameter(torch.empty(4 * units))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(units**-0.5), units**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias_ih + self.bias_hh
        inputs = F.linear(x.to(self.weight_ih.dtype), self.weight_ih, bias)
        return recurrent(inputs, self.weight_hh)


class OneHot(nn.Module):
    """Numbers 0..classes-1 as unit vectors of bool; the next layer chooses the number type."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1) == torch.arange(self.classes, device=x.device)


class Last(nn.Module):
    """The last time step."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def sequence(model: str, shape: tuple[int, ...]) -> None:
    """Refuse examples that are not sequences of characters."""
    if len(shape) != 1 or shape[0] < 1:
        raise BadInput(
            f"{model} takes sequences of characters, of shape (length,), not examples of shape "
            f"{shape}; use a model for those"
        )

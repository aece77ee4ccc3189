"""The papers' networks, and usual ones.

Each is a function of the data's `shape` and `classes` that returns an nn.Module. Its outputs are
logits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from rota.models.cnn import (
    cnn,
    fluid_femnist,
    kvib_cnn,
    leaf_femnist,
    lenet,
    mmfl_cnn,
    mmfl_emnist,
    pfl_cnn,
    s2_classic,
    s2_wide,
    vgg9,
)
from rota.models.mlp import linear, logistic, mlp, s2_small, two_nn
from rota.models.resnet import preact_resnet18, resnet8, resnet18
from rota.models.text import leaf_lstm, lstm_shakespeare, mmfl_lstm
from rota.models.transformer import transformer

MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "linear": linear,
    "mlp": mlp,
    "two_nn": two_nn,
    "cnn": cnn,
    "s2_small": s2_small,
    "s2_classic": s2_classic,
    "s2_wide": s2_wide,
    "kvib_cnn": kvib_cnn,
    "fluid_femnist": fluid_femnist,
    "vgg9": vgg9,
    "lstm_shakespeare": lstm_shakespeare,
    "leaf_femnist": leaf_femnist,
    "leaf_lstm": leaf_lstm,
    "mmfl_cnn": mmfl_cnn,
    "mmfl_emnist": mmfl_emnist,
    "mmfl_lstm": mmfl_lstm,
    "pfl_cnn": pfl_cnn,
    "resnet18": resnet18,
    "preact_resnet18": preact_resnet18,
    "resnet8": resnet8,
    "lenet": lenet,
    "transformer": transformer,
}

__all__ = [
    "MODELS",
    "cnn",
    "fluid_femnist",
    "kvib_cnn",
    "leaf_femnist",
    "leaf_lstm",
    "lenet",
    "linear",
    "logistic",
    "lstm_shakespeare",
    "mlp",
    "mmfl_cnn",
    "mmfl_emnist",
    "mmfl_lstm",
    "pfl_cnn",
    "preact_resnet18",
    "resnet8",
    "resnet18",
    "s2_classic",
    "s2_small",
    "s2_wide",
    "transformer",
    "two_nn",
    "vgg9",
]

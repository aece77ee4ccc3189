"""Triton kernels for stacks on a GPU.

Libraries tune batched products for large matrices, and grouped convolutions for few groups. A stack
has many small problems, each with weights of its own, and memory bounds its speed. Block sizes are
a fixed function of the shapes, and sums are added in a fixed order, so a repeated run is
bit-identical.
"""

from __future__ import annotations

from rota.engine.kernels.convolutions import (
    convolution,
    convolution_backward,
    convolution_backward_,
)
from rota.engine.kernels.linears import linear, linear_backward, linear_backward_
from rota.engine.kernels.norms import BatchNorm, batch_norm, batch_norm_backward
from rota.engine.kernels.pooling import unpool, unpooled
from rota.engine.kernels.products import baddbmm, bmm, subtract_product_
from rota.engine.kernels.recurrent import Recurrent, recurrent_rows, recurrent_rows_backward
from rota.engine.kernels.rows import load, results, spread
from rota.engine.kernels.small import (
    CLASSES,
    cross_entropy,
    drop,
    indices,
    take,
    uniform,
    uniform_at,
    words,
)

__all__ = [
    "CLASSES",
    "BatchNorm",
    "Recurrent",
    "baddbmm",
    "batch_norm",
    "batch_norm_backward",
    "bmm",
    "convolution",
    "convolution_backward",
    "convolution_backward_",
    "cross_entropy",
    "drop",
    "indices",
    "linear",
    "linear_backward",
    "linear_backward_",
    "load",
    "recurrent_rows",
    "recurrent_rows_backward",
    "results",
    "spread",
    "subtract_product_",
    "take",
    "uniform",
    "uniform_at",
    "unpool",
    "unpooled",
    "words",
]

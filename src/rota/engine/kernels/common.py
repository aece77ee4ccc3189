"""What the kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

Blocks = tuple[int, int, int, int, int]
"""Rows, columns and depth of a block; warps; and stages of the pipeline."""


def precision() -> str:
    """How products of float32 are computed: in TF32 if torch is set to that.

    Otherwise as three products in TF32, which together are as exact as float32.
    """
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def rounded(n: int) -> int:
    """The smallest power of two, of at least 16, that holds n."""
    return max(16, 1 << (n - 1).bit_length())


def contiguous_last(x: Tensor, dims: int) -> Tensor:
    """x with its last dimensions contiguous in memory, whatever the stride of the first."""
    step = 1
    for at in range(1, dims + 1):
        if x.shape[-at] != 1 and x.stride(-at) != step:
            return x.contiguous()
        step *= x.shape[-at]
    return x


def laid_as(like: Tensor, x: Tensor) -> Tensor:
    """x in the memory layout of another tensor of its shape."""
    return (
        x
        if x.stride() == like.stride()
        else torch.empty_strided(like.shape, like.stride(), device=x.device, dtype=x.dtype).copy_(x)
    )

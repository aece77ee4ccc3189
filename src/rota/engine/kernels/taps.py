"""What the taps of convolutions read from images.

That is [pixels, channels], or for few channels [taps x channels, pixels].
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def image(
    x,
    base,
    top,
    left,
    real,
    i,
    j,
    c,
    x_h: tl.constexpr,
    x_w: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    EH: tl.constexpr,
    EW: tl.constexpr,
):
    """What a tap reads at some pixels: [pixels, channels].

    EH and EW say whether taps reach over the edges.
    """
    if EH:
        real = real & (top + i >= 0) & (top + i < H)
    if EW:
        real = real & (left + j >= 0) & (left + j < W)
    shift = tl.multiple_of(
        i * x_h + j * x_w, 16
    )  # the compiler does not see it, and loads would be narrow
    return tl.load(x + base[:, None] + (shift + c)[None, :], mask=real[:, None], other=0.0)


@triton.jit
def patch(
    x,
    base,
    top,
    left,
    real,
    i,
    j,
    k,
    SHIFT: tl.constexpr,
    AREA: tl.constexpr,
    depth: tl.constexpr,
    x_c: tl.constexpr,
    x_h: tl.constexpr,
    x_w: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    EH: tl.constexpr,
    EW: tl.constexpr,
):
    """What some taps and channels read at some pixels: [taps x channels, pixels].

    The pixels are neighbours in memory.
    """
    real = real[None, :] & (k < depth)[:, None]
    if EH:
        real = real & ((top[None, :] + i[:, None]).to(tl.uint32, bitcast=True) < H)
    if EW:
        real = real & ((left[None, :] + j[:, None]).to(tl.uint32, bitcast=True) < W)
    return tl.load(
        x + (base + SHIFT)[None, :] + (i * x_h + j * x_w + k // AREA * x_c)[:, None],
        mask=real,
        other=0.0,
    )


def tapwise(x: Tensor) -> bool:
    """Whether a block of the depth can belong to one tap."""
    return x.shape[2] % 16 == 0 and x.stride(2) == 1

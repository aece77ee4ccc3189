"""The gradients of convolutions' weights: sums over parts of the pixels, then over the parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rota.engine.kernels.common import precision, rounded
from rota.engine.kernels.taps import image, patch, tapwise

TAPS = 5  # a kernel's row has at most as many taps as there are accumulators


@triton.jit(do_not_specialize=["M"])
def _pixels_last_kernel(dy, out, M, pitch, O: tl.constexpr, BP: tl.constexpr, BO: tl.constexpr):
    """Write dy [pixels, O] as [O, pitch], with zeros after the pixels."""
    across: tl.constexpr = (O + BO - 1) // BO
    blocks = tl.cdiv(pitch, BP) * across
    row = (tl.program_id(0) // blocks).to(tl.int64)
    p = tl.program_id(0) % blocks // across * BP + tl.arange(0, BP)
    o = tl.program_id(0) % across * BO + tl.arange(0, BO)
    value = tl.load(
        dy + row * M * O + p[:, None] * O + o[None, :],
        mask=(p < M)[:, None] & (o < O)[None, :],
        other=0.0,
    )
    tl.store(
        out + row * O * pitch + o[:, None] * pitch + p[None, :],
        tl.trans(value),
        mask=(o < O)[:, None] & (p < pitch)[None, :],
    )


def _pixels_last(dy: Tensor) -> Tensor:
    """dy [R, B, O, ...], whose channels are last in memory, as [R, O, pixels].

    Its rows begin at places where loads can be wide.
    """
    rows, batch, outputs, *sides = dy.shape
    m = batch * sides[0] * sides[1]
    out = torch.empty(rows, outputs, triton.cdiv(m, 16) * 16, device=dy.device, dtype=dy.dtype)
    block = min(64, rounded(outputs))
    _pixels_last_kernel[(rows * triton.cdiv(out.shape[2], 64) * triton.cdiv(outputs, block),)](
        dy, out, m, out.shape[2], O=outputs, BP=64, BO=block, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["M", "length", "splits"])
def _weight_gradient_kernel(
    x,
    dy,
    pieces,
    M,
    pitch,
    length,
    splits,
    x_row,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_h: tl.constexpr,
    x_w: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """pieces[split, o, tap, c] = sum over a split's pixels of dy[pixel, o] * x[pixel + tap, c].

    A program has the KW taps of one row of the filter. `length` counts blocks of pixels. With LAST,
    dy is [o, pitch], because tensor cores take 32-bit numbers only in this order.
    """
    eh: tl.constexpr = PH > 0 or (HO - 1) * SH - PH + KH > H
    ew: tl.constexpr = PW > 0 or (WO - 1) * SW - PW + KW > W
    across: tl.constexpr = (O + BM - 1) // BM
    along: tl.constexpr = C // BN
    here = tl.program_id(0)
    i = here % KH
    n = here // KH % along * BN + tl.arange(0, BN)
    m = here // (KH * along) % across * BM + tl.arange(0, BM)
    split = here // (KH * along * across) % splits
    row = (here // (KH * along * across * splits)).to(tl.int64)
    x += row * x_row
    dy += row * O * (pitch if LAST else M)
    t0 = tl.zeros((BM, BN), tl.float32)
    t1 = tl.zeros((BM, BN), tl.float32)
    t2 = tl.zeros((BM, BN), tl.float32)
    t3 = tl.zeros((BM, BN), tl.float32)
    t4 = tl.zeros((BM, BN), tl.float32)
    for block in range(split * length, tl.minimum(split * length + length, tl.cdiv(M, BK))):
        p = block * BK + tl.arange(0, BK)
        real = p < M
        top = p // WO % HO * SH - PH
        left = p % WO * SW - PW
        base = p // (WO * HO) * x_b + top * x_h + left * x_w
        if LAST:
            grads = tl.load(
                dy + m[:, None] * pitch + p[None, :],
                mask=(m[:, None] < O) & (p[None, :] < pitch),
                other=0.0,
            )
        else:
            grads = tl.trans(
                tl.load(
                    dy + p[:, None] * O + m[None, :],
                    mask=real[:, None] & (m[None, :] < O),
                    other=0.0,
                )
            )
        t0 = tl.dot(
            grads,
            image(x, base, top, left, real, i, 0, n, x_h, x_w, H, W, eh, ew),
            t0,
            input_precision=PRECISION,
        )
        if KW > 1:
            t1 = tl.dot(
                grads,
                image(x, base, top, left, real, i, 1, n, x_h, x_w, H, W, eh, ew),
                t1,
                input_precision=PRECISION,
            )
        if KW > 2:
            t2 = tl.dot(
                grads,
                image(x, base, top, left, real, i, 2, n, x_h, x_w, H, W, eh, ew),
                t2,
                input_precision=PRECISION,
            )
        if KW > 3:
            t3 = tl.dot(
                grads,
                image(x, base, top, left, real, i, 3, n, x_h, x_w, H, W, eh, ew),
                t3,
                input_precision=PRECISION,
            )
        if KW > 4:
            t4 = tl.dot(
                grads,
                image(x, base, top, left, real, i, 4, n, x_h, x_w, H, W, eh, ew),
                t4,
                input_precision=PRECISION,
            )
    depth: tl.constexpr = KH * KW * C
    at = (
        pieces + (row * splits + split) * O * depth + m[:, None] * depth + (i * KW * C + n)[None, :]
    )
    inside = tl.broadcast_to(m[:, None] < O, (BM, BN))
    tl.store(at, t0, mask=inside)
    if KW > 1:
        tl.store(at + C, t1, mask=inside)
    if KW > 2:
        tl.store(at + 2 * C, t2, mask=inside)
    if KW > 3:
        tl.store(at + 3 * C, t3, mask=inside)
    if KW > 4:
        tl.store(at + 4 * C, t4, mask=inside)


@triton.jit(do_not_specialize=["M", "length", "splits"])
def _thin_weight_gradient_kernel(
    x,
    dy,
    which,
    pieces,
    M,
    length,
    splits,
    x_row,
    dy_row,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    x_b: tl.constexpr,
    x_c: tl.constexpr,
    x_h: tl.constexpr,
    x_w: tl.constexpr,
    y_b: tl.constexpr,
    y_c: tl.constexpr,
    y_h: tl.constexpr,
    y_w: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The same for few channels, as pieces[split, o, c x tap].

    One more column has the sums of dy, which are the bias's gradient. With POOL, dy is the gradient
    after a 2x2 pooling, and `which` says to which pixel of its window each number belongs.
    """
    by: tl.constexpr = 2 if POOL else 1
    eh: tl.constexpr = PH > 0 or (HO * by - 1) * SH - PH + KH > H
    ew: tl.constexpr = PW > 0 or (WO * by - 1) * SW - PW + KW > W
    depth: tl.constexpr = KH * KW * C
    area: tl.constexpr = KH * KW
    across: tl.constexpr = (O + BM - 1) // BM
    along: tl.constexpr = depth // BN + 1
    here = tl.program_id(0)
    k = here % along * BN + tl.arange(0, BN)
    o = here // along % across * BM + tl.arange(0, BM)
    split = here // (along * across) % splits
    row = (here // (along * across * splits)).to(tl.int64)
    i = k // KW % KH
    j = k % KW
    x += row * x_row
    dy += row * dy_row
    which += row * dy_row
    ones = (k == depth)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    for start in range(split * length, tl.minimum(split * length + length, M), BK):
        p = start + tl.arange(0, BK)
        real = p < M
        top = p // WO % HO * (SH * by) - PH
        left = p % WO * (SW * by) - PW
        base = p // (WO * HO) * x_b + top * x_h + left * x_w
        at = (p // (WO * HO) * y_b + p // WO % HO * y_h + p % WO * y_w)[:, None] + (o * y_c)[
            None, :
        ]
        inside = real[:, None] & (o[None, :] < O)
        grads = tl.load(dy + at, mask=inside, other=0.0)
        if POOL:
            corner = tl.load(which + at, mask=inside, other=0)
            for at_corner in tl.static_range(4):
                seen = patch(
                    x,
                    base,
                    top + at_corner // 2 * SH,
                    left + at_corner % 2 * SW,
                    real,
                    i,
                    j,
                    k,
                    at_corner // 2 * SH * x_h + at_corner % 2 * SW * x_w,
                    area,
                    depth,
                    x_c,
                    x_h,
                    x_w,
                    H,
                    W,
                    eh,
                    ew,
                )
                seen = tl.where(ones, 1.0, seen).to(seen.dtype)
                total = tl.dot(
                    seen,
                    tl.where(corner == at_corner, grads, 0.0).to(grads.dtype),
                    total,
                    input_precision=PRECISION,
                )
        else:
            seen = patch(
                x, base, top, left, real, i, j, k, 0, area, depth, x_c, x_h, x_w, H, W, eh, ew
            )
            seen = tl.where(ones, 1.0, seen).to(seen.dtype)
            total = tl.dot(seen, grads, total, input_precision=PRECISION)
    to = pieces + ((row * splits + split) * O + o[None, :]) * (depth + 1) + k[:, None]
    tl.store(to, total, mask=(o[None, :] < O) & (k[:, None] <= depth))


@triton.jit(do_not_specialize=["splits", "parts"])
def _add_pieces_kernel(
    pieces,
    sums,
    dw,
    db,
    splits,
    parts,
    dw_row,
    db_row,
    C: tl.constexpr,
    O: tl.constexpr,
    AREA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    SUMS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Sum the pieces to dw[o, c, tap], and `sums` to db; write them, or subtract them in place.

    `sums` [parts, O] are dy's sums over parts of the pixels. A program has one output, all taps and
    some channels. It reads by tap, as the pieces lie in memory, and writes by channel.
    """
    across: tl.constexpr = (C + BC - 1) // BC
    row = (tl.program_id(0) // (across * O)).to(tl.int64)
    o = tl.program_id(0) // across % O
    tap = tl.arange(0, BT)
    c = tl.program_id(0) % across * BC + tl.arange(0, BC)
    inside = (tap < AREA)[:, None] & (c < C)[None, :]
    at = pieces + (row * splits * O + o) * (AREA * C) + tap[:, None] * C + c[None, :]
    total = tl.zeros((BT, BC), tl.float32)
    for start in range(0, splits, TOGETHER):
        split = (start + tl.arange(0, TOGETHER))[:, None, None]
        total += tl.sum(
            tl.load(
                at[None, :, :] + split * (O * AREA * C),
                mask=(split < splits) & inside[None, :, :],
                other=0.0,
            ),
            0,
        )
    place = dw + row * dw_row + o * (C * AREA) + c[:, None] * AREA + tap[None, :]
    _put(place, tl.trans(total), (c < C)[:, None] & (tap < AREA)[None, :], SUBTRACT)
    if HAS_BIAS:
        if tl.program_id(0) % (across * O) == 0:
            channel = tl.arange(0, SUMS)
            whole = tl.zeros((SUMS,), tl.float32)
            for begin in range(0, parts, 16):
                part = begin + tl.arange(0, 16)
                inner = sums + (row * parts + part)[:, None] * O + channel[None, :]
                whole += tl.sum(
                    tl.load(
                        inner, mask=(part < parts)[:, None] & (channel < O)[None, :], other=0.0
                    ),
                    0,
                )
            _put(db + row * db_row + channel, whole, channel < O, SUBTRACT)


@triton.jit(do_not_specialize=["splits"])
def _add_thin_pieces_kernel(
    pieces,
    dw,
    db,
    splits,
    dw_row,
    db_row,
    depth: tl.constexpr,
    O: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The same for few channels: pieces have the layout of dw, and one more column for db."""
    wide: tl.constexpr = depth + 1
    blocks: tl.constexpr = (O * wide + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < O * wide
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, splits, TOGETHER):
        split = (start + tl.arange(0, TOGETHER))[:, None]
        places = pieces + (row * splits + split) * (O * wide) + at[None, :]
        total += tl.sum(tl.load(places, mask=(split < splits) & inside[None, :], other=0.0), 0)
    o = at // wide
    k = at % wide
    if HAS_BIAS:
        _put(db + row * db_row + o, total, inside & (k == depth), SUBTRACT)
    _put(dw + row * dw_row + o * depth + k, total, inside & (k < depth), SUBTRACT)


@triton.jit
def _put(place, value, inside, SUBTRACT: tl.constexpr):
    if SUBTRACT:
        value = tl.load(place, mask=inside, other=0.0) - value
    tl.store(place, value, mask=inside)


def thin(x: Tensor, size: Sequence[int]) -> bool:
    """Whether x has too few channels, or its filters too many taps, for blocks of one tap."""
    return not (tapwise(x) and size[1] <= TAPS)


def weight_gradient(
    x: Tensor,
    dy: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    which: Tensor | None = None,
    config: tuple[int, ...] | None = None,
) -> Tensor:
    """Sums over parts of the pixels, [R, parts, ...].

    With `which` (for few channels only), dy is the gradient after a 2x2 pooling.
    """
    rows, batch, channels, high, wide = x.shape
    outputs, out_high, out_wide = dy.shape[2:]
    m = batch * out_high * out_wide
    few = thin(x, size)
    bm, bn, bk, warps, stages, *given = config or _weight_blocks(channels, outputs, size, few)
    depth = size[0] * size[1] * channels
    tiles = (
        rows * triton.cdiv(outputs, bm) * (depth // bn + 1 if few else size[0] * (channels // bn))
    )
    parts = given[0] if given else _parts(m, bk, tiles, few)
    length = triton.cdiv(triton.cdiv(m, parts), bk) * bk
    parts = triton.cdiv(m, length)
    pieces = torch.empty(rows, parts, outputs, depth + few, device=x.device)
    sizes = {
        "C": channels,
        "H": high,
        "W": wide,
        "O": outputs,
        "KH": size[0],
        "KW": size[1],
        "HO": out_high,
        "WO": out_wide,
        "SH": stride[0],
        "SW": stride[1],
        "PH": padding[0],
        "PW": padding[1],
        "x_b": x.stride(1),
        "x_c": x.stride(2),
        "x_h": x.stride(3),
        "x_w": x.stride(4),
        "PRECISION": precision(),
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "num_warps": warps,
        "num_stages": stages,
    }
    if few:
        _thin_weight_gradient_kernel[(tiles * parts,)](
            x,
            dy,
            dy if which is None else which,
            pieces,
            m,
            length,
            parts,
            x.stride(0),
            dy.stride(0),
            y_b=dy.stride(1),
            y_c=dy.stride(2),
            y_h=dy.stride(3),
            y_w=dy.stride(4),
            POOL=which is not None,
            **sizes,
        )
    else:
        last = dy.dtype == torch.float32
        grads, pitch = (_pixels_last(dy), triton.cdiv(m, 16) * 16) if last else (dy, m)
        _weight_gradient_kernel[(tiles * parts,)](
            x, grads, pieces, m, pitch, length // bk, parts, x.stride(0), LAST=last, **sizes
        )
    return pieces


def _weight_blocks(channels: int, outputs: int, size: Sequence[int], few: bool) -> tuple[int, ...]:
    """Outputs, channels (or columns) and pixels of a block; warps; and stages."""
    bm, three = min(64, rounded(outputs)), precision() == "tf32x3"
    if few:
        return (
            min(32, bm),
            32 if size[0] * size[1] * channels < 32 else 64,
            32,
            4 if three else 2,
            1,
        )
    return min(32, bm) if three else bm, 32 if channels % 32 == 0 else 16, 32, 2, 3


def _parts(m: int, bk: int, tiles: int, few: bool) -> int:
    """Into how many parts the pixels are divided, so that enough programs keep a large GPU busy."""
    programs, least = (3200, 2) if few else (1600, 8)
    return max(1, min(128 if few else 64, -(-m // (least * bk)), -(-programs // tiles)))


def add_pieces(
    pieces: Tensor, sums: Tensor | None, dw: Tensor, db: Tensor | None, few: bool, subtract: bool
) -> None:
    """Sum the pieces to dw [R, O, C, kh, kw] and to db; write them, or subtract them in place.

    Unless `few`, `sums` [R, parts, O] are dy's sums.
    """
    rows, outputs, channels, *size = dw.shape
    area, parts = size[0] * size[1], pieces.shape[1]
    together = min(4, triton.next_power_of_2(parts))
    more = {
        "O": outputs,
        "HAS_BIAS": db is not None,
        "SUBTRACT": subtract,
        "TOGETHER": together,
        "num_warps": 4,
    }
    by_row = (dw.stride(0), 0 if db is None else db.stride(0))
    if few:
        _add_thin_pieces_kernel[(rows * triton.cdiv(outputs * pieces.shape[3], 512),)](
            pieces, dw, db, parts, *by_row, depth=area * channels, BLOCK=512, **more
        )
        return
    bt = triton.next_power_of_2(area)
    bc = min(max(1, 1024 // bt), rounded(channels))
    _add_pieces_kernel[(rows * outputs * triton.cdiv(channels, bc),)](
        pieces,
        sums,
        dw,
        db,
        parts,
        0 if sums is None else sums.shape[1],
        *by_row,
        C=channels,
        AREA=area,
        BT=bt,
        BC=bc,
        SUMS=rounded(outputs),
        **more,
    )

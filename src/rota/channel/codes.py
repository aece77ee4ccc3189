"""The channels' codes: whole, in half precision, sparse, quantised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rota import rng
from rota.errors import BadInput

BUCKET = 512
"""How many numbers of an update share a scale when they are quantised."""


@dataclass(frozen=True)
class Whole:
    """Updates travel as they are."""

    unbiased: ClassVar[bool] = True

    def check(self) -> None:
        """There is nothing to check."""

    def encode(self, update: Tensor, stream: int) -> dict[str, Tensor]:
        return {"update": update}

    def decode(self, sent: dict[str, Tensor], stream: int, like: Tensor) -> Tensor:
        return sent["update"].to(like)

    def nbytes(self, params: int, itemsize: int) -> int:
        return params * itemsize


@dataclass(frozen=True)
class Half:
    """Updates travel as "float16" or "bfloat16", two bytes per number.

    Numbers are rounded to the nearest, which is a small bias: at most 0.05 % of each number in
    float16 (of those above 6e-5), and 0.4 % in bfloat16. An update with a number above 65,504 is
    infinite in float16, and its row fails.
    """

    dtype: Literal["float16", "bfloat16"] = "float16"

    unbiased: ClassVar[bool] = False

    def check(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise BadInput(f"channel.dtype is '{self.dtype}': use 'float16' or 'bfloat16'")

    def encode(self, update: Tensor, stream: int) -> dict[str, Tensor]:
        return {"update": update.to(getattr(torch, self.dtype))}

    def decode(self, sent: dict[str, Tensor], stream: int, like: Tensor) -> Tensor:
        return sent["update"].to(like)

    def nbytes(self, params: int, itemsize: int) -> int:
        return 2 * params


@dataclass(frozen=True)
class TopK:
    """Only the `share` of an update's numbers with the largest magnitudes travels, with its places.

    Biased: the small numbers never arrive, and clients do not keep them for later rounds.
    """

    share: float = 0.1

    unbiased: ClassVar[bool] = False

    def check(self) -> None:
        _check_share(self.share)

    def encode(self, update: Tensor, stream: int) -> dict[str, Tensor]:
        places = update.abs().topk(_kept(self.share, len(update)), sorted=False).indices
        return {"values": update[places], "places": places.to(torch.int32)}

    def decode(self, sent: dict[str, Tensor], stream: int, like: Tensor) -> Tensor:
        return _spread(sent["values"], sent["places"].long(), like)

    def nbytes(self, params: int, itemsize: int) -> int:
        return _kept(self.share, params) * (itemsize + 4)


@dataclass(frozen=True)
class RandomK:
    """A random `share` of an update's numbers travels, divided by that share.

    Unbiased; the variance of each number is (1 / share - 1) times its square. The server makes the
    places from the row's key, so they need not travel.
    """

    share: float = 0.1

    unbiased: ClassVar[bool] = True

    def check(self) -> None:
        _check_share(self.share)

    def encode(self, update: Tensor, stream: int) -> dict[str, Tensor]:
        places = self._places(update, stream)
        return {"values": update[places] * (len(update) / max(1, len(places)))}

    def decode(self, sent: dict[str, Tensor], stream: int, like: Tensor) -> Tensor:
        return _spread(sent["values"], self._places(like, stream), like)

    def nbytes(self, params: int, itemsize: int) -> int:
        return _kept(self.share, params) * itemsize

    def _places(self, update: Tensor, stream: int) -> Tensor:
        number = _kept(self.share, len(update))
        chosen = rng.generator(stream).choice(len(update), number, replace=False, shuffle=False)
        return torch.from_numpy(chosen).to(update.device)


@dataclass(frozen=True)
class Quantised:
    """Each number travels as `bits` bits: a sign and a level, rounded up or down at random (QSGD).

    Unbiased. A bucket of 512 numbers has a scale of its own, its largest magnitude, which travels
    as a float32. The 2^(bits - 1) - 1 levels of either sign are equally far from each other.
    """

    bits: Literal[2, 4, 8] = 8

    unbiased: ClassVar[bool] = True

    def check(self) -> None:
        if self.bits not in (2, 4, 8):
            raise BadInput(f"channel.bits is {self.bits}: use 2, 4 or 8")

    @property
    def levels(self) -> int:
        """The number of levels above 0."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, update: Tensor, stream: int) -> dict[str, Tensor]:
        buckets, each = _buckets(len(update)), 8 // self.bits
        padded = update.new_zeros(buckets * BUCKET)
        padded[: len(update)] = update
        rows = padded.view(buckets, BUCKET)
        scale = rows.abs().amax(dim=1, keepdim=True).float()
        exact = rows / scale.clamp(min=torch.finfo(torch.float32).tiny).to(rows) * self.levels
        key = rng.as_tensor([stream], update.device)
        chance = rng.uniform(key, rows.numel()).view_as(rows).to(rows)
        level = (exact + chance).floor().clamp(-self.levels, self.levels)
        codes = (level + self.levels).to(torch.uint8).view(-1, each)
        shifts = torch.arange(each, device=update.device) * self.bits
        packed = (codes.int() << shifts).sum(dim=1).to(torch.uint8)
        return {"codes": packed[: math.ceil(len(update) / each)], "scale": scale[:, 0]}

    def decode(self, sent: dict[str, Tensor], stream: int, like: Tensor) -> Tensor:
        each = 8 // self.bits
        packed, scale = sent["codes"].to(like.device), sent["scale"].to(like)
        shifts = torch.arange(each, device=like.device) * self.bits
        codes = (packed.int()[:, None] >> shifts) & (2**self.bits - 1)
        level = (codes.reshape(-1)[: len(like)] - self.levels).to(like)
        return level / self.levels * scale.repeat_interleave(BUCKET)[: len(like)]

    def nbytes(self, params: int, itemsize: int) -> int:
        return math.ceil(params * self.bits / 8) + 4 * _buckets(params)


def _buckets(params: int) -> int:
    return math.ceil(params / BUCKET)


def _kept(share: float, params: int) -> int:
    """How many numbers travel: at least one."""
    return min(params, max(1, round(share * params)))


def _spread(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """The values at their places, and 0 elsewhere."""
    out = torch.zeros_like(like)
    out[places.to(like.device)] = values.to(like)
    return out


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise BadInput(f"channel.share is {share:g}: it must be above 0, and at most 1")

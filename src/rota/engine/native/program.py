"""Writes instructions for rota.c, and finds a place in the arena for each result.

A tensor is a `Place`: where it lies, and a tensor without data ("meta") that has its shape and
strides, so that torch's own view operators compute those of views.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.engine.native.structures import (
    ARENA,
    CONSTANTS,
    DIMS,
    EACH,
    OPERANDS,
    PRODUCT,
    Instruction,
)

ALIGNED = 64
"""Pieces of the arena begin at multiples of this many bytes."""

MOST = 1 << 48
"""Bytes that an arena may have. Sums of sizes in rota.c then cannot overflow."""


class Unsupported(Exception):
    """An operator, or a form of one, that rota.c does not have."""


@dataclass(eq=False)
class Block:
    """A piece of the arena. `merged` is another piece whose memory it takes over."""

    size: int
    offset: int = 0
    merged: Block | None = None

    @property
    def own(self) -> Block:
        return self if self.merged is None else self.merged.own


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor: its space, its offset in bytes, and its layout. In the arena it has a block."""

    space: int
    offset: int
    like: Tensor
    block: Block | None = None

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def whole(self) -> bool:
        """Whether it holds integers. Truth values are real numbers, 0 and 1."""
        return not self.like.is_floating_point() and self.like.dtype != torch.bool

    @property
    def start(self) -> int:
        return self.offset + int(self.like.storage_offset()) * self.like.itemsize

    @property
    def piece(self) -> Block | None:
        """The piece of the arena whose memory it has."""
        return None if self.block is None else self.block.own

    @property
    def extent(self) -> tuple[int, int]:
        """Its first byte and the byte after its last; in the arena, those of its whole piece."""
        if self.piece is not None:
            return self.piece.offset, self.piece.offset + self.piece.size
        last = sum((n - 1) * s for n, s in zip(self.shape, self.like.stride(), strict=True))
        reach = last + 1 if self.like.numel() else 0
        return self.start, self.start + reach * self.like.itemsize

    def seen(self, like: Tensor) -> Place:
        """The same memory seen in another layout."""
        return Place(self.space, self.offset, like, self.block)


@dataclass
class Code:
    """Instructions, the bytes of their arena, and the constants they read.

    `touched` [instructions, OPERANDS + 1, 3] says where each operand lies: its space, its first
    byte, and the byte after its last. A library made with AddressSanitizer checks that instructions
    touch nothing else.
    """

    list: ctypes.Array[Instruction]
    arena: int
    constants: bytes
    touched: Array


@dataclass
class Writer:
    """Collects instructions, and notes how long each result is needed."""

    dtype: torch.dtype
    space: Callable[[Sequence[int]], int]
    """How many numbers of scratch space a convolution needs."""
    product_space: Callable[[int, int], int]
    """The same for a product."""
    changes: bool = False
    """Whether the step changes intermediate results in place."""
    code: list[tuple[Instruction, list[Place | None]]] = field(default_factory=list)
    constants: bytearray = field(default_factory=bytearray)
    known: dict[Any, Place] = field(default_factory=dict)
    held: list[object] = field(default_factory=list)

    def new(
        self, shape: Sequence[int], strides: Sequence[int] | None = None, whole: bool = False
    ) -> Place:
        """Room for a result."""
        dtype = torch.int64 if whole else self.dtype
        if strides is None:
            like = torch.empty(list(shape), dtype=dtype, device="meta")
        else:
            like = torch.empty_strided(list(shape), list(strides), dtype=dtype, device="meta")
        return Place(ARENA, 0, like, Block(max(1, like.numel()) * like.itemsize))

    def scratch(self, numbers: int) -> Place:
        """Room that an instruction may use as it likes."""
        if numbers < 0:
            raise Unsupported("an operator on tensors of this size")
        return self.new([numbers])

    def constant(self, values: float | Tensor) -> Place:
        """A number, or a tensor of real numbers or integers, that instructions read."""
        name = id(values) if isinstance(values, Tensor) else repr(values)
        if name not in self.known:
            if isinstance(values, Tensor):
                data = values
            else:
                data = torch.tensor(values, dtype=torch.float64)
            real = data.is_floating_point() or data.dtype == torch.bool
            data = data.to(self.dtype if real else torch.int64).contiguous()
            self.constants += bytes(-len(self.constants) % 8)
            self.held.append(values)  # as long as it lives, no other object has its id
            self.known[name] = Place(CONSTANTS, len(self.constants), data.to("meta"))
            self.constants += data.numpy().tobytes()
        return self.known[name]

    def emit(
        self,
        code: int,
        operands: Sequence[Place | None],
        shape: Sequence[int] = (),
        strides: Any = None,
        extra: Sequence[int] = (),
    ) -> None:
        """Write an instruction; results come first among the operands."""
        instruction = Instruction(code=code, dims=len(shape))
        instruction.shape[: len(shape)] = shape
        instruction.extra[: len(extra)] = extra
        for operand, stride in zip(instruction.at, strides or [()] * len(operands), strict=False):
            operand.stride[: len(stride)] = stride
        self.code.append((instruction, list(operands)))

    def each(self, name: str, out: Place, *inputs: Place) -> Place:
        """An elementwise operator. Inputs are broadcast, and axes merged as far as all allow."""
        if out.whole or any(place.whole for place in inputs):
            raise Unsupported(f"{name} of integers")
        likes = [out.like, *(place.like.expand(out.shape) for place in inputs)]
        shape, strides = merged(out.shape, [like.stride() for like in likes])
        missing = OPERANDS - 1 - len(inputs)
        operands = [out, *inputs, *[inputs[0]] * missing]
        self.emit(EACH[name], operands, shape, [*strides, *[[0] * len(shape)] * missing])
        return out

    def contiguous(self, place: Place) -> Place:
        """The same values with the last axis last in memory."""
        if place.like.is_contiguous():
            return place
        return self.each("copy", self.new(place.shape), place)

    def channels_last(self, place: Place) -> Place:
        """The same images with their channels last in memory."""
        shape = place.shape
        strides = torch.empty(shape, device="meta").to(memory_format=torch.channels_last).stride()
        same = all(
            size == 1 or a == b
            for size, a, b in zip(shape, place.like.stride(), strides, strict=True)
        )
        return place if same else self.each("copy", self.new(shape, strides), place)

    def like(self, place: Place, shape: Sequence[int]) -> Place:
        """Room for the result of an elementwise operator, laid out like its first input.

        If that input does not fill its memory, the result is contiguous.
        """
        if place.shape == torch.Size(shape) and place.like.is_contiguous(
            memory_format=_dense(place.like)
        ):
            return self.new(shape, place.like.stride())
        return self.new(shape)

    def finish(self) -> Code:
        """Give each piece of the arena its offset, and the instructions their addresses.

        A piece takes the first gap that is large enough when it is first used, and keeps it until
        it was last used.
        """
        lives = self.lives()
        for now, (instruction, operands) in enumerate(self.code):
            if instruction.code < PRODUCT:
                _in_place(now, operands, lives)
        lives = self.lives()
        _lay_out(lives, len(self.code))
        arena = max((block.offset + block.size for block in lives), default=0)
        if arena > MOST:
            raise Unsupported("intermediate results of this size")
        for instruction, operands in self.code:
            for slot, place in zip(instruction.at, operands, strict=False):
                if place is not None:
                    offset = place.piece.offset if place.piece else 0
                    slot.space, slot.offset = place.space, place.start + offset
            if len(operands) > OPERANDS:  # the scratch space, for which there is no operand left
                scratch = operands[OPERANDS]
                assert scratch is not None
                assert scratch.piece is not None
                instruction.extra[13] = scratch.piece.offset
        code = (Instruction * len(self.code))(*(instruction for instruction, _ in self.code))
        return Code(code, arena, bytes(self.constants), self._touched())

    def lives(self) -> dict[Block, list[int]]:
        """When each piece of the arena is first and last used."""
        lives: dict[Block, list[int]] = {}
        for now, (_, operands) in enumerate(self.code):
            for place in operands:
                if place is not None and place.piece is not None:
                    lives.setdefault(place.piece, [now, now])[1] = now
        return lives

    def _touched(self) -> Array:
        out = np.full((len(self.code), OPERANDS + 1, 3), -1)
        for slots, (_, operands) in zip(out, self.code, strict=True):
            for slot, place in zip(slots, operands, strict=False):
                if place is not None:
                    slot[:] = place.space, *place.extent
        return out


def _lay_out(lives: dict[Block, list[int]], count: int) -> None:
    """Give each piece its offset."""
    begin: dict[int, list[Block]] = {}
    for block, (first, _) in lives.items():
        begin.setdefault(first, []).append(block)
    alive: list[Block] = []  # in the order of their offsets
    for now in range(count):
        alive = [block for block in alive if lives[block][1] >= now]
        for block in begin.get(now, ()):
            where = 0
            while where < len(alive) and block.offset + block.size > alive[where].offset:
                end = alive[where].offset + alive[where].size
                block.offset = -(-end // ALIGNED) * ALIGNED
                where += 1
            alive.insert(where, block)


def _in_place(now: int, operands: Sequence[Place | None], lives: dict[Block, list[int]]) -> None:
    """Let an elementwise result take the memory, already in the cache, of an input's last use."""
    out, *inputs = (place for place in operands if place is not None)
    if out.block is None or lives[out.block.own][0] != now:
        return
    for block in dict.fromkeys(place.piece for place in inputs if place.piece is not None):
        same = all(layout(place) == layout(out) for place in inputs if place.piece is block)
        if same and block.size == out.block.size and lives[block][1] == now:
            lives[block][1] = lives[out.block][1]
            out.block.merged = block
            return


def layout(place: Place) -> tuple[int, torch.Size, tuple[int, ...]]:
    return place.start, place.shape, place.like.stride()


def _dense(like: Tensor) -> torch.memory_format:
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def merged(
    shape: Sequence[int], strides: list[tuple[int, ...]]
) -> tuple[list[int], list[list[int]]]:
    """The axes in the order of the first tensor's memory, merged where all tensors allow it."""
    axes = sorted((i for i in range(len(shape)) if shape[i] != 1), key=lambda i: -strides[0][i])
    sizes: list[int] = []
    moves: list[list[int]] = [[] for _ in strides]
    for i in axes:
        joins = (m[-1] == s[i] * shape[i] for m, s in zip(moves, strides, strict=True) if sizes)
        if sizes and all(joins):
            sizes[-1] *= shape[i]
            for move, stride in zip(moves, strides, strict=True):
                move[-1] = stride[i]
        else:
            sizes.append(shape[i])
            for move, stride in zip(moves, strides, strict=True):
                move.append(stride[i])
    if not sizes:
        return [1], [[0] for _ in strides]
    if len(sizes) > DIMS:
        raise Unsupported("a tensor of more than five axes")
    return sizes, moves

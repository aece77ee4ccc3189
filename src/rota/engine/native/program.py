"""Instructions for rota.c, and the writer that puts them down: every result gets its place in an arena.

A tensor is a `Place`: where it lies, and its shape and strides as a tensor without data ("meta"), on which torch's own view operators work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
DIMS, OPERANDS, EXTRA = 5, 4, 16
ARENA, PARAMS, BUFFERS, GRADIENT, X, Y, WEIGHT, KEY, NUMBER, LOSS, CONSTANTS = range(11)
(
    PRODUCT, SUM, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, NLL, NLL_BACKWARD, CONVOLUTION, WEIGHT_GRADIENT, INPUT_GRADIENT, POOL, POOL_BACKWARD,
    EMBEDDING, EMBEDDING_BACKWARD, UNIFORM, REAL, FILL, INT_ADD, INT_MUL, INT_XOR, INT_SHIFT, INT_AND, LAYER_BACKWARD,
) = range(100, 122)  # fmt: skip
NAMES = (
    "copy", "add", "sub", "mul", "div", "neg", "relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "square", "pow", "threshold_backward",
    "sigmoid_backward", "tanh_backward", "ge", "gt", "le", "lt", "eq", "ne", "lerp", "clamp", "where",
)  # fmt: skip
EACH = {name: code for code, name in enumerate(NAMES)}
"""The elementwise operators in the order of elementwise.h."""


class Unsupported(Exception):
    """An operator, or a form of one, that rota.c does not have."""


class Operand(ctypes.Structure):
    _fields_ = [
        ("space", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("stride", ctypes.c_int64 * DIMS),
    ]


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_int64), ("dims", ctypes.c_int64), ("shape", ctypes.c_int64 * DIMS), ("extra", ctypes.c_int64 * EXTRA),
        ("at", Operand * OPERANDS),
    ]  # fmt: skip


@dataclass(eq=False)
class Block:
    """A piece of the arena. Where a result takes the place of an operand, `merged` is the operand's piece."""

    size: int
    offset: int = 0
    merged: Block | None = None

    @property
    def own(self) -> Block:
        return self if self.merged is None else self.merged.own


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor: in which space, how far from its start, and its layout. `block` is its piece of the arena."""

    space: int
    offset: int
    like: Tensor
    block: Block | None = None

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def whole(self) -> bool:
        """Whether it holds integers; truth values are 0 and 1 among the real numbers."""
        return not self.like.is_floating_point() and self.like.dtype != torch.bool

    @property
    def start(self) -> int:
        return self.offset + int(self.like.storage_offset()) * self.like.itemsize

    def seen(self, like: Tensor) -> Place:
        return Place(self.space, self.offset, like, self.block)


@dataclass
class Program:
    """The instructions, the bytes of their arena, and the constants they read."""

    list: ctypes.Array[Instruction]
    arena: int
    constants: bytes


@dataclass
class Writer:
    """Collects instructions and the lives of their results."""

    dtype: torch.dtype
    space: Callable[[Sequence[int]], int]
    """The scratch space of a convolution."""
    product_space: Callable[[int, int], int]
    code: list[tuple[Instruction, list[Place | None]]] = field(default_factory=list)
    constants: bytearray = field(default_factory=bytearray)
    known: dict[Any, Place] = field(default_factory=dict)
    held: list[object] = field(default_factory=list)

    def new(
        self, shape: Sequence[int], strides: Sequence[int] | None = None, whole: bool = False
    ) -> Place:
        """Room for a result."""
        dtype = torch.int64 if whole else self.dtype
        like = (
            torch.empty_strided(list(shape), list(strides), dtype=dtype, device="meta")
            if strides is not None
            else None
        )
        like = torch.empty(list(shape), dtype=dtype, device="meta") if like is None else like
        return Place(ARENA, 0, like, Block(max(1, like.numel()) * like.itemsize))

    def scratch(self, numbers: int) -> Place:
        return self.new([numbers])

    def constant(self, values: float | Tensor) -> Place:
        """A number, or a tensor of numbers or integers, that the instructions read."""
        name = id(values) if isinstance(values, Tensor) else repr(values)
        if name not in self.known:
            data = (
                values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
            )
            data = (data if data.dtype == torch.int64 else data.to(self.dtype)).contiguous()
            self.constants += bytes(-len(self.constants) % 8)
            self.held.append(values)  # so that no other object gets its id
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
        instruction = Instruction(code=code, dims=len(shape))
        instruction.shape[: len(shape)] = shape
        instruction.extra[: len(extra)] = extra
        for operand, stride in zip(instruction.at, strides or [()] * len(operands), strict=False):
            operand.stride[: len(stride)] = stride
        self.code.append((instruction, list(operands)))

    def each(self, name: str, out: Place, *inputs: Place) -> Place:
        """An elementwise operator; inputs are broadcast to the output, whose axes are merged as far as all allow."""
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
        return (
            place if place.like.is_contiguous() else self.each("copy", self.new(place.shape), place)
        )

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
        """Room for a result of an elementwise operator, laid out as its first input where that fills the whole memory."""
        if place.shape == torch.Size(shape) and place.like.is_contiguous(
            memory_format=_dense(place.like)
        ):
            return self.new(shape, place.like.stride())
        return self.new(shape)

    def _lives(self) -> dict[Block, list[int]]:
        """When each piece of the arena is first and last used."""
        lives: dict[Block, list[int]] = {}
        for now, (_, operands) in enumerate(self.code):
            for place in operands:
                if place is not None and place.block is not None:
                    lives.setdefault(place.block.own, [now, now])[1] = now
        return lives

    def finish(self) -> Program:
        """Places in the arena: each piece at the first gap that is large enough when it is first used, until it was last used."""
        lives = self._lives()
        for now, (instruction, operands) in enumerate(self.code):
            if instruction.code < PRODUCT:
                _work_in_place(now, operands, lives)
        lives = self._lives()
        begin: dict[int, list[Block]] = {}
        for block, (first, _) in lives.items():
            begin.setdefault(first, []).append(block)
        alive: list[Block] = []  # in the order of their offsets
        for now in range(len(self.code)):
            alive = [block for block in alive if lives[block][1] >= now]
            for block in begin.get(now, ()):
                where = 0
                while where < len(alive) and block.offset + block.size > alive[where].offset:
                    block.offset = -(-(alive[where].offset + alive[where].size) // 64) * 64
                    where += 1
                alive.insert(where, block)
        for instruction, operands in self.code:
            for slot, place in zip(instruction.at, operands, strict=False):
                if place is not None:
                    slot.space, slot.offset = (
                        place.space,
                        place.start + (place.block.own.offset if place.block else 0),
                    )
            if len(operands) > OPERANDS:  # the scratch space, where there is no operand left for it
                scratch = operands[OPERANDS]
                assert scratch is not None
                assert scratch.block is not None
                instruction.extra[13] = scratch.block.own.offset
        code = (Instruction * len(self.code))(*(instruction for instruction, _ in self.code))
        arena = max((block.offset + block.size for block in lives), default=0)
        return Program(code, arena, bytes(self.constants))


def _work_in_place(
    now: int, operands: Sequence[Place | None], lives: dict[Block, list[int]]
) -> None:
    """Let an elementwise result take the place of an operand that is not used later: the memory is in the cache already."""
    out, *inputs = (place for place in operands if place is not None)
    if out.block is None or lives[out.block.own][0] != now:
        return
    for block in dict.fromkeys(place.block.own for place in inputs if place.block is not None):
        same = all(
            _layout(place) == _layout(out)
            for place in inputs
            if place.block is not None and place.block.own is block
        )
        if same and block.size == out.block.size and lives[block][1] == now:
            lives[block][1] = lives[out.block][1]
            out.block.merged = block
            return


def _layout(place: Place) -> tuple[int, torch.Size, tuple[int, ...]]:
    return place.start, place.shape, place.like.stride()


def _dense(like: Tensor) -> torch.memory_format:
    return (
        torch.channels_last
        if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
        else torch.contiguous_format
    )


def merged(
    shape: Sequence[int], strides: list[tuple[int, ...]]
) -> tuple[list[int], list[list[int]]]:
    """The axes in the order of the first tensor's memory, neighbours merged where all tensors allow it."""
    axes = sorted((i for i in range(len(shape)) if shape[i] != 1), key=lambda i: -strides[0][i])
    sizes: list[int] = []
    moves: list[list[int]] = [[] for _ in strides]
    for i in axes:
        if sizes and all(
            move[-1] == stride[i] * shape[i] for move, stride in zip(moves, strides, strict=True)
        ):
            sizes[-1] *= shape[i]
            for move, stride in zip(moves, strides, strict=True):
                move[-1] = stride[i]
            continue
        sizes.append(shape[i])
        for move, stride in zip(moves, strides, strict=True):
            move.append(stride[i])
    if not sizes:
        return [1], [[0] for _ in strides]
    if len(sizes) > DIMS:
        raise Unsupported("a tensor of more than five axes")
    return sizes, moves

"""What rota.c and Python must write down alike: numbers of spaces and instructions, and structures.

All fields are eight bytes wide. A test compares the sizes of the structures on both sides.
"""

from __future__ import annotations

import ctypes

import numpy as np

DIMS, OPERANDS, EXTRA = 5, 4, 16
"""Axes of an operand, operands of an instruction, and further numbers of an instruction."""

(
    ARENA,
    PARAMS,
    BUFFERS,
    GRADIENT,
    X,
    Y,
    WEIGHT,
    KEY,
    NUMBER,
    LOSS,
    CONSTANTS,
) = range(11)
"""The spaces in memory that operands lie in. ARENA holds intermediate results."""

ELEMENTWISE = (
    "copy add sub mul div neg relu sigmoid tanh exp sqrt rsqrt square pow threshold_backward "
    "sigmoid_backward tanh_backward ge gt le lt eq ne lerp clamp where "
    "abs log maximum minimum erf gelu gelu_backward silu"
)
EACH = {name: code for code, name in enumerate(ELEMENTWISE.split())}
"""The codes of elementwise operators, in the order of elementwise.h. All are below PRODUCT."""

(
    PRODUCT,
    SUM,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    NLL,
    NLL_BACKWARD,
    CONVOLUTION,
    WEIGHT_GRADIENT,
    INPUT_GRADIENT,
    POOL,
    POOL_BACKWARD,
    EMBEDDING,
    EMBEDDING_BACKWARD,
    UNIFORM,
    REAL,
    FILL,
    INT_ADD,
    INT_MUL,
    INT_XOR,
    INT_SHIFT,
    INT_AND,
    LAYER_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    NORM,
    NORM_BACKWARD,
    GROUP_STATS,
    GROUP_SCALED,
    GROUP_SUMS,
    GROUP_FACTORS,
    GROUP_BACKWARD,
) = range(100, 131)

TRAINED, UNTRAINED, TOKEN_OUTSIDE, LABEL_OUTSIDE = range(4)
"""How a row's training ended."""


def _whole(*names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names]


def _real(*names: str) -> list[tuple[str, type[ctypes.c_double]]]:
    return [(name, ctypes.c_double) for name in names]


class Operand(ctypes.Structure):
    """Where a tensor lies: its space, bytes from the space's beginning, strides in elements."""

    _fields_ = [*_whole("space", "offset"), ("stride", ctypes.c_int64 * DIMS)]


class Instruction(ctypes.Structure):
    """One operator on tensors."""

    _fields_ = [
        *_whole("code", "dims"),
        ("shape", ctypes.c_int64 * DIMS),
        ("extra", ctypes.c_int64 * EXTRA),
        ("at", Operand * OPERANDS),
    ]


class Program(ctypes.Structure):
    """A local step as instructions, and the local optimiser."""

    _fields_ = [
        ("list", ctypes.POINTER(Instruction)),
        *_whole("count", "arena", "width", "params", "buffers", "x_bytes", "y_bytes", "fused"),
        ("constants", ctypes.c_void_p),
        *_real("momentum", "weight_decay", "prox", "clip", "local_decay"),
        *_whole("nesterov", "adam", "decoupled"),
        ("touched", ctypes.c_void_p),
    ]


ROW = np.dtype(
    [
        ("key", np.uint64),
        *((name, np.int64) for name in ("first", "examples", "batch", "per_epoch", "steps")),
        *((name, np.float64) for name in ("rate", "loss")),
        *((name, np.uintp) for name in ("start", "start_buffers", "shift", "anchor")),
        *((name, np.uintp) for name in ("update", "buffers")),
        *((name, np.int64) for name in ("status", "value", "size")),
    ]
)
"""A row's work and its results."""

"""Rules for activations, written as elementwise operators that rota.c has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from rota.engine.native.operators import rule
from rota.engine.native.program import Place, Writer

aten = torch.ops.aten
SLOPE = math.sqrt(2 / math.pi)


Terms = Callable[..., Place]


def _terms(w: Writer, like: Place) -> Terms:
    """Writes elementwise operators on places and numbers; results are laid out like a place."""

    def write(name: str, *inputs: Place | float) -> Place:
        places = [v if isinstance(v, Place) else w.constant(float(v)) for v in inputs]
        return w.each(name, w.like(like, like.shape), *places)

    return write


@rule(aten.gelu.default)
def _gelu(w: Writer, target: Any, a: Place, *, approximate: str = "none") -> Place:
    f = _terms(w, a)
    if approximate == "none":
        return f("gelu", a)
    return f("mul", f("mul", a, 0.5), f("add", _bend(f, a), 1.0))


def _bend(f: Terms, a: Place) -> Place:
    """tanh(sqrt(2 / pi) (a + 0.044715 a^3))."""
    cubic = f("add", f("mul", f("square", a), 0.044715), 1.0)
    return f("tanh", f("mul", f("mul", a, cubic), SLOPE))


@rule(aten.gelu_backward.default)
def _gelu_backward(
    w: Writer, target: Any, gradient: Place, a: Place, *, approximate: str = "none"
) -> Place:
    f = _terms(w, a)
    if approximate == "none":
        return f("gelu_backward", gradient, a)
    bend = _bend(f, a)
    slope = f("add", f("mul", f("square", a), 3 * 0.044715 * SLOPE), SLOPE)
    steep = f("mul", f("mul", f("tanh_backward", a, bend), slope), 0.5)
    return f("mul", gradient, f("add", f("add", f("mul", bend, 0.5), 0.5), steep))


@rule(aten.elu.default)
def _elu(
    w: Writer, target: Any, a: Place, alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0
) -> Place:
    f = _terms(w, a)
    below = f("mul", f("sub", f("exp", f("mul", f("minimum", a, 0.0), inner)), 1.0), alpha * scale)
    return f("where", f("gt", a, 0.0), f("mul", a, scale), below)


@rule(aten.celu.default)
def _celu(w: Writer, target: Any, a: Place, alpha: float = 1.0) -> Place:
    out: Place = _elu(w, target, a, alpha, 1.0, 1 / alpha)
    return out


@rule(aten.elu_backward.default)
def _elu_backward(
    w: Writer,
    target: Any,
    gradient: Place,
    alpha: float,
    scale: float,
    inner: float,
    is_result: bool,
    a: Place,
) -> Place:
    f = _terms(w, a)
    if is_result:
        steep = f("mul", f("add", a, alpha * scale), inner)
    else:
        steep = f("mul", f("exp", f("mul", f("minimum", a, 0.0), inner)), alpha * scale * inner)
    factor = f("where", f("gt", a, 0.0), f("add", f("mul", a, 0.0), scale), steep)
    return f("mul", gradient, factor)


@rule(aten.leaky_relu.default)
def _leaky_relu(w: Writer, target: Any, a: Place, slope: float = 0.01) -> Place:
    f = _terms(w, a)
    return f("where", f("gt", a, 0.0), a, f("mul", a, slope))


@rule(aten.leaky_relu_backward.default)
def _leaky_relu_backward(
    w: Writer, target: Any, gradient: Place, a: Place, slope: float, is_result: bool
) -> Place:
    f = _terms(w, a)
    return f("where", f("gt", a, 0.0), gradient, f("mul", gradient, slope))


@rule(aten.softplus.default)
def _softplus(w: Writer, target: Any, a: Place, beta: float = 1.0, most: float = 20.0) -> Place:
    f = _terms(w, a)
    scaled = f("mul", a, beta)
    low = f("minimum", scaled, most)
    bent = f("mul", f("log", f("add", f("exp", low), 1.0)), 1 / beta)
    return f("where", f("gt", scaled, most), a, bent)


@rule(aten.softplus_backward.default)
def _softplus_backward(
    w: Writer, target: Any, gradient: Place, a: Place, beta: float, most: float
) -> Place:
    f = _terms(w, a)
    scaled = f("mul", a, beta)
    bent = f("mul", gradient, f("sigmoid", scaled))
    return f("where", f("gt", scaled, most), gradient, bent)


@rule(aten.hardtanh.default)
def _hardtanh(w: Writer, target: Any, a: Place, low: float = -1.0, high: float = 1.0) -> Place:
    return _terms(w, a)("clamp", a, low, high)


@rule(aten.hardtanh_backward.default)
def _hardtanh_backward(
    w: Writer, target: Any, gradient: Place, a: Place, low: float, high: float
) -> Place:
    f = _terms(w, a)
    inside = f("mul", f("gt", a, low), f("lt", a, high))
    return f("where", inside, gradient, 0.0)


@rule(aten.hardswish.default)
def _hardswish(w: Writer, target: Any, a: Place) -> Place:
    f = _terms(w, a)
    return f("mul", a, f("mul", f("clamp", f("add", a, 3.0), 0.0, 6.0), 1 / 6))


@rule(aten.hardswish_backward.default)
def _hardswish_backward(w: Writer, target: Any, gradient: Place, a: Place) -> Place:
    f = _terms(w, a)
    steep = f("add", f("mul", a, 1 / 3), 0.5)
    steep = f("where", f("lt", a, -3.0), 0.0, f("where", f("gt", a, 3.0), 1.0, steep))
    return f("mul", gradient, steep)

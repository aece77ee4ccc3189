"""Whether a module can be trained in a stack: tried on a few examples before the first round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rota import weights
from rota.engine import local
from rota.engine.rules import Unbatchable
from rota.engine.stack import Stack
from rota.engine.steps import Steps

TOLERANCE = 0.02
"""The largest difference of stacked and plain gradients: far above rounding, below any wrong
formula."""
ROUGH = 0.2
"""The same if both are rounded to bfloat16."""
PADDING = 1e-4
"""How much other padding may change a gradient, as a fraction of it: only by rounding."""
TRIALS = 3


def suits(steps: Steps) -> None:
    """Raise Unbatchable for a reason that shows without a step."""
    tensors = [*steps.module.parameters(), *steps.module.buffers()]
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(kinds) > 1:
        raise Unbatchable("has parameters and buffers of several number types")
    if steps.dtype not in (torch.float32, torch.float64):
        raise Unbatchable(f"has {str(steps.dtype).removeprefix('torch.')} parameters")
    if not all(parameter.requires_grad for parameter in steps.module.parameters()):
        raise Unbatchable("has frozen parameters")
    if callable(steps.task.optimizer):
        raise Unbatchable("is trained by an optimiser of your own")


def ignores_padding(steps: Steps, width: int) -> None:
    """Raise Unbatchable if the examples that pad a mini-batch change the gradient of the others."""
    real = max(1, width // 2)
    if real == width:
        return
    start = weights.read(steps.module)
    inputs = [*steps.params.views(start.params), *steps.buffers.views(start.buffers)]
    inside = torch.arange(width, device=steps.x.device) < real
    key, number = torch.zeros(2, dtype=torch.int64, device=steps.x.device)
    found = []
    for after in (width, 2 * width):
        pick = torch.where(inside, steps.some(width), steps.some(width, after))
        batch = (steps.x[pick], steps.y[pick], inside.to(steps.dtype) / real)
        with torch.inference_mode():
            results = steps.of_one(width)(*inputs, *batch, key, number)
        found.append(torch.cat([each.flatten().double() for each in results]))
    one, other = found
    if not torch.allclose(one, other, rtol=0, atol=PADDING * float(one.norm()), equal_nan=True):
        raise Unbatchable("mixes the examples of a mini-batch")


def verify(steps: Steps, width: int) -> None:
    """Compare a stack's step, half of it padding, with autograd; raise Unbatchable if it is off."""
    real, device = half(width), steps.x.device
    weight = (torch.arange(width, device=device) < real).to(steps.dtype).expand(2, -1) / real
    start = weights.read(steps.module)

    def trial(stack: Stack, number: int) -> None:
        pick = steps.some(width, width + number * real)  # not those that it was traced on
        both = pick.expand(2, -1)
        stack.number.zero_()
        stack.theta.copy_(start.params)
        stack.buffers.copy_(start.buffers)
        with whole_precision(steps.x.is_cuda):
            stack.advance(2, steps.x[both], steps.y[both], weight)
            found = start.params - stack.theta if stack.fused else stack.gradient
            same_step(steps, found, stack.buffers, pick[:real], stack.key[0])

    for fused in (True, False) if steps.plain else (False,):
        repeated(partial(trial, Stack(steps, 2, width, fused)))


def repeated(trial: Callable[[int], None]) -> None:
    """Make up to three trials, each on other examples, until one succeeds.

    Rounding may turn a ReLU, in a ResNet for example, and spoil one. A wrong formula spoils all.
    """
    for number in range(TRIALS):
        try:
            return trial(number)
        except Unbatchable:
            if number == TRIALS - 1:
                raise


@contextmanager
def whole_precision(cuda: bool) -> Iterator[None]:
    """Without TF32, whose rounding can choose another pixel in a max-pool: no small difference."""
    if not cuda:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def half(width: int) -> int:
    """How many examples a trial has: there is to be padding, too."""
    return min(width, max(2, width // 2))


def same_step(steps: Steps, found: Tensor, buffers: Tensor, pick: Tensor, key: Tensor) -> None:
    """Compare gradients [rows, params], and the new buffers, with autograd's in a first step.

    The step is on the examples `pick`.
    """
    module = copy.deepcopy(steps.module).train()
    rounded = torch.autocast(steps.x.device.type, steps.autocast, enabled=bool(steps.autocast))
    start, off = weights.read(module).buffers, ROUGH if steps.autocast else TOLERANCE
    try:
        with local.Dropout(key), rounded:
            outputs = module(steps.x[pick])
    except ValueError as error:
        raise Unbatchable("normalises over mini-batches of a single example") from error
    loss = steps.task.loss(outputs.float() if steps.autocast else outputs, steps.y[pick]).mean()
    gradient = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    if any(g is None for g in gradient):
        raise Unbatchable("has unused parameters")  # no optimiser decays these
    plain = torch.cat([g.flatten() for g in gradient])
    apart = float((found - plain).norm() / (plain.norm() * len(found) ** 0.5).clamp(min=1e-12))
    if not apart < off:
        raise Unbatchable(f"has another gradient when clients are stacked ({apart:.1%} off)")
    after = weights.read(module).buffers
    if len(after):
        change = float((after - start).nan_to_num(0.0, 0.0, 0.0).abs().max())
        if not torch.allclose(buffers, after.expand_as(buffers), off, off * change, True):
            raise Unbatchable("changes a buffer in another way than BatchNorm does")
    before = _remembered(module)
    with torch.no_grad(), local.Dropout(key), rounded:
        module(steps.x[pick])
    if _remembered(module) != before:
        raise Unbatchable("counts mini-batches, or remembers something else of them")


def _remembered(module: nn.Module) -> list[Any]:
    """A module's integer buffers, apart from BatchNorm's, and plain values of its parts."""
    found: list[Any] = []
    for part in module.modules():
        found += [v for v in vars(part).values() if isinstance(v, bool | int | float | str)]
        if not isinstance(part, nn.modules.batchnorm._BatchNorm):
            held = (b for b in part.buffers(recurse=False) if not b.is_floating_point())
            found += [buffer.tolist() for buffer in held]
    return found

"""What some layers compute instead while a module is traced or tested.

These are pure functions, and each row's numbers are those of a client that trains alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rota.engine import local
from rota.engine.rules import on_gpu, uniform_at
from rota.models.text import recurrent


class Functional(local.Dropout):
    """For tracing a step: addressed dropout, and BatchNorm as a pure function.

    BatchNorm's statistics count only real examples: `mask` is 1 for an example and 0 for padding.
    Its new running statistics are noted in `changed`. On a GPU all steps in time of an LSTM layer
    are one operator.
    """

    def __init__(self, key: Tensor, step: Tensor, mask: Tensor) -> None:
        super().__init__(key)
        self.start(step)
        self.address = (key, step) if on_gpu(mask) else None
        self.mask = mask
        self.changed: dict[Tensor, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        if func is F.group_norm and self.mask.device.type == "cpu":
            return _group_norm(*args, **(kwargs or {}))
        if func is recurrent:
            return _recurrent(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def draw(self, n: int) -> Tensor:
        if self.address is None:
            return super().draw(n)
        # one operator, because on a GPU every operator is a launch
        drawn: Tensor = uniform_at(*self.address, self.calls, n)
        return drawn

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training and running_mean is not None:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        autocast = torch.is_autocast_enabled(input.device.type)
        rounded = autocast and input.dtype == torch.bfloat16  # then the next layer gets float32
        if on_gpu(self.mask) and (rounded or input.dtype == torch.float32):
            from rota.engine import kernels

            norm: Any = kernels.BatchNorm
            out, mean, _, unbiased = norm.apply(input, weight, bias, self.mask, eps)
            self._note(running_mean, running_var, mean, unbiased, momentum)
            return out  # type: ignore[no-any-return]
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        real = self.mask.view(-1, *[1] * (input.dim() - 1)).to(input.dtype)
        count = (real.sum() * (input[0, 0].numel())).clamp(min=1)
        mean = (input * real).sum(dims) / count
        apart = input - mean.view(shape)
        var = (apart * apart * real).sum(dims) / count
        unbiased = var * count / (count - 1).clamp(min=1)
        self._note(running_mean, running_var, mean, unbiased, momentum)
        out = apart * torch.rsqrt(var + eps).view(shape)
        if weight is not None:
            out = out * weight.view(shape)
        return out if bias is None else out + bias.view(shape)

    def _note(
        self,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        mean: Tensor,
        unbiased: Tensor,
        momentum: float,
    ) -> None:
        """Note the new running statistics, if there are any."""
        if running_mean is None or running_var is None:
            return
        # a row that has finished has no real examples, and keeps its statistics
        pace = (self.mask.sum() > 0).to(running_mean.dtype) * momentum
        for running, now in ((running_mean, mean), (running_var, unbiased)):
            before = self.changed.get(running, running)  # a layer may be used several times
            self.changed[running] = torch.lerp(before, now.detach().to(running.dtype), pace)


class GroupNorm(torch.autograd.Function):
    """GroupNorm whose gradient is one operator; torch's own becomes thirty when it is traced."""

    @staticmethod
    def forward(x: Tensor, weight: Any, bias: Any, groups: int, eps: float) -> Any:
        n, channels, *pixels = x.shape
        size = n, channels, math.prod(pixels)
        return torch.native_group_norm(x, weight, bias, *size, groups, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.groups, _ = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        n, channels, *pixels = x.shape
        size = n, channels, math.prod(pixels)
        wanted = [True, weight is not None, ctx.biased]
        found = torch.ops.aten.native_group_norm_backward(
            gradient, x, mean, scale, weight, *size, ctx.groups, wanted
        )
        own = (each if want else None for each, want in zip(found, wanted, strict=True))
        return *own, None, None


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    out: Tensor = GroupNorm.apply(x, weight, bias, groups, eps)[0]  # type: ignore[no-untyped-call]
    return out


class Forward(TorchFunctionMode):
    """For a pass without gradients. On a GPU all steps in time of an LSTM layer are one operator.

    `lengths` says how many examples each client has, one client after the other. BatchNorm without
    running statistics then uses each client's own statistics, as it would on the client's device.
    """

    def __init__(self, lengths: Tensor | None = None) -> None:
        super().__init__()
        self.lengths = lengths

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is recurrent:
            return _recurrent(*args, **(kwargs or {}))
        if func is F.batch_norm and self.lengths is not None:
            return self._batch_norm(self.lengths, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _batch_norm(
        lengths: Tensor,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if running_mean is not None:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        pixels, ones = list(range(2, input.dim())), [1] * (input.dim() - 2)

        def mean(values: Tensor) -> Tensor:
            """Each client's mean, in the places of its examples."""
            each = values.mean(pixels) if pixels else values
            # "unsafe", because checks would wait for a GPU
            own = torch.segment_reduce(each, "mean", lengths=lengths, axis=0, unsafe=True)
            return own.repeat_interleave(lengths, 0, output_size=len(each)).view(*each.shape, *ones)

        apart = input - mean(input)
        out = apart * torch.rsqrt(mean(apart * apart) + eps)
        out = out if weight is None else out * weight.view(-1, *ones)
        return out if bias is None else out + bias.view(-1, *ones)


def takes_statistics(module: nn.Module) -> bool:
    """Whether an example's results depend on the others of a pass without gradients, too.

    They do in BatchNorm without running statistics.
    """
    return any(
        isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None
        for layer in module.modules()
    )


def _recurrent(inputs: Tensor, weight: Tensor) -> Tensor:
    """All steps in time of an LSTM layer; autocast may have rounded their inputs."""
    if not on_gpu(weight) or inputs.dtype not in (torch.float32, torch.bfloat16):
        return recurrent(inputs, weight)
    from rota.engine import kernels

    hidden: Tensor = kernels.Recurrent.apply(inputs, weight)[0]  # type: ignore[no-untyped-call]
    return hidden

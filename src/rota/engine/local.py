"""What all engines share about a client's local work: a row's key, and addressed dropout masks."""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rota import rng
from rota.engine.attention import attention
from rota.errors import not_a_clients

DROPOUT = -1
"""The word that leads from a row's key to its dropout masks; 0, 1, 2 ... lead to its orders."""

TOO_FEW = "a single example, and the model normalises over the batch"


def row_key(seed: int, now: int, client: int, task: int) -> int:
    """The key of all randomness in one row: who trains what in which round."""
    return rng.key(seed, "train", now, client, task)


@torch.library.custom_op("rota::uniform", mutates_args=())
def uniform(key: Tensor, n: int) -> Tensor:
    """rng.uniform as one operator: one node in a traced step, and one kernel on a GPU."""
    if key.is_cuda and importlib.util.find_spec("triton") is not None:
        from rota.engine import kernels

        on_gpu: Tensor = kernels.uniform(key, n)
        return on_gpu
    return rng.uniform(key, n)


class Dropout(TorchFunctionMode):
    """Inside this context dropout takes its masks from the row's own stream.

    The mask of call c in step t is a function of (key, t, c) and of an element's position, so it
    does not depend on other rows. This covers nn.Dropout, nn.Dropout1d/2d/3d, F.dropout and the
    dropout of F.scaled_dot_product_attention.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.row = rng.fold(key, DROPOUT)
        self.start(0)

    def start(self, step: int | Tensor) -> None:
        """Begin a local step."""
        self.key = rng.fold(self.row, step)
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return attention(self._masked, *args, **(kwargs or {}))
        if func not in _MASKED:
            return func(*args, **(kwargs or {}))
        return self._masked(func in _WHOLE_CHANNELS, *args, **(kwargs or {}))

    def draw(self, n: int) -> Tensor:
        """The random numbers of this call."""
        drawn: Tensor = uniform(rng.fold(self.key, self.calls), n)
        return drawn

    def _masked(
        self,
        channels: bool,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return input
        self.calls += 1
        shape = input.shape[:2] + (1,) * (input.dim() - 2) if channels else input.shape
        kept = self.draw(math.prod(shape))
        return input * (kept >= p).view(shape).to(input.dtype) / ((1 - p) or 1)


_WHOLE_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d}
_MASKED = {F.dropout, *_WHOLE_CHANNELS}


def uses_dropout(module: nn.Module, x: Tensor) -> bool:
    """Whether a training pass draws a dropout mask; only then is the context worth its cost."""
    probe = Dropout(rng.as_tensor([0])[0].to(x.device))
    try:
        with torch.no_grad(), probe:
            copy.deepcopy(module).train()(x)
    except Exception as error:  # what is wrong with these examples shows when their client trains
        if not_a_clients(error):
            raise
        return True
    return probe.calls > 0


def draws(module: nn.Module, x: Tensor) -> bool:
    """Whether a pass in evaluation draws random numbers from torch's own generator."""
    device = next((p.device for p in module.parameters()), x.device)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.default_generator.get_state()
        try:
            copy.deepcopy(module).eval()(x.to(device))
        except Exception as error:  # as above
            if not_a_clients(error):
                raise
        return not torch.equal(before, torch.default_generator.get_state())


def smallest_batch(module: nn.Module, x: Tensor) -> int:
    """The smallest mini-batch that a module trains on: 2 if it refuses x, a single example."""
    try:
        with torch.no_grad():
            copy.deepcopy(module).train()(x)
    except ValueError:
        return 2
    except Exception as error:  # as above
        if not_a_clients(error):
            raise
    return 1

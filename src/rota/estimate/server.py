"""Server optimisers: the estimate as a gradient for torch.optim (Reddi et al. 2021, with torch's bias corrections)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Server(Protocol):
    """Applies an estimate to a model. A value: moments live in the state it takes and returns."""

    def step(self, params: Tensor, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The new parameters and the new state."""


class YogiOptimiser(torch.optim.Optimizer):
    """Yogi (Zaheer et al. 2018): Adam whose second moment moves by (1-b2) sign(v - g^2) g^2, so it cannot grow fast."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                square = p.grad * p.grad
                state = self.state[p]
                first = state["exp_avg"] = state.get("exp_avg", torch.zeros_like(p)).lerp(
                    p.grad, 1 - beta1
                )
                second = state.get("exp_avg_sq", torch.zeros_like(p))
                second = state["exp_avg_sq"] = (
                    second - (1 - beta2) * torch.sign(second - square) * square
                )
                p.sub_(group["lr"] * first / (second.sqrt() + group["eps"]))


def _step(
    optimiser: Any, params: Tensor, update: Tensor, state: Tensors, **options: Any
) -> tuple[Tensor, Tensors]:
    """One step of a torch optimiser as a pure function: its state goes in and comes out as named tensors."""
    leaf = torch.nn.Parameter(params.clone())
    leaf.grad = update
    stepper = optimiser([leaf], **options)
    if state:
        stepper.state[leaf] = {name: value.clone() for name, value in state.items()}
    stepper.step()
    return leaf.detach(), {
        name: value for name, value in stepper.state[leaf].items() if isinstance(value, Tensor)
    }


@dataclass(frozen=True)
class Sgd:
    """w - lr * estimate; lr=1 is plain FedAvg; `momentum` keeps a heavy ball (FedAvgM)."""

    lr: float = 1.0
    momentum: float = 0.0

    def step(self, params: Tensor, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        if not self.momentum:  # the same sum, without an optimiser's set-up
            return torch.add(params, update, alpha=-self.lr), {}
        return _step(torch.optim.SGD, params, update, state, **asdict(self))


@dataclass(frozen=True)
class Adam:
    """FedAdam: torch.optim.Adam on the estimate."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def step(self, params: Tensor, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return _step(
            torch.optim.Adam,
            params,
            update,
            state,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
        )


@dataclass(frozen=True)
class Yogi:
    """FedYogi: Yogi on the estimate."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def step(self, params: Tensor, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return _step(
            YogiOptimiser,
            params,
            update,
            state,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
        )

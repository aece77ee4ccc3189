"""Server optimisers (Reddi et al. 2021, with torch's bias corrections): estimates are gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from rota.estimate.memory import Tensors


class Server(Protocol):
    """Applies an estimate to a model; its moments are in the state that it takes and returns."""

    def step(self, params: Tensor, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """The new parameters and the new state."""


class YogiOptimiser(torch.optim.Optimizer):
    """Yogi (Zaheer et al. 2018): Adam whose second moment v falls by (1-b2) sign(v - g^2) g^2."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                square = p.grad * p.grad
                state = self.state[p]
                first = state.get("exp_avg", torch.zeros_like(p)).lerp(p.grad, 1 - beta1)
                second = state.get("exp_avg_sq", torch.zeros_like(p))
                second = second - (1 - beta2) * torch.sign(second - square) * square
                state["exp_avg"], state["exp_avg_sq"] = first, second
                p.sub_(group["lr"] * first / (second.sqrt() + group["eps"]))


def _step(
    optimiser: Any, params: Tensor, update: Tensor, state: Tensors, **options: Any
) -> tuple[Tensor, Tensors]:
    """One step of a torch optimiser as a pure function of parameters, gradient and state."""
    leaf = torch.nn.Parameter(params.clone())
    leaf.grad = update
    stepper = optimiser([leaf], **options)
    if state:
        stepper.state[leaf] = {name: value.clone() for name, value in state.items()}
    stepper.step()
    kept = {name: v for name, v in stepper.state[leaf].items() if isinstance(v, Tensor)}
    return leaf.detach(), kept


@dataclass(frozen=True)
class Sgd:
    """SGD: w - lr * estimate; lr=1 is plain FedAvg, `momentum` makes it FedAvgM (heavy ball)."""

    lr: float = 1.0
    momentum: float = 0.0

    def step(self, params: Tensor, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        if not self.momentum:  # the same result, without setting up an optimiser
            return torch.add(params, update, alpha=-self.lr), {}
        return _step(torch.optim.SGD, params, update, state, **asdict(self))


@dataclass(frozen=True)
class Adam:
    """FedAdam: torch.optim.Adam on the estimate."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    optimiser: ClassVar[Any] = torch.optim.Adam

    def step(self, params: Tensor, update: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        options = {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps}
        return _step(self.optimiser, params, update, state, **options)


@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi: Yogi on the estimate."""

    optimiser: ClassVar[Any] = YogiOptimiser

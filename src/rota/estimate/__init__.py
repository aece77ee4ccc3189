"""From the clients' updates to the new models: estimators, and the server optimisers that apply what they say."""

from __future__ import annotations

from typing import Any, Protocol

from rota.estimate.average import Estimate, FedAvg, Tensors, Unbiased
from rota.estimate.server import Adam, Server, Sgd, Yogi
from rota.plan import Chunk, Plan
from rota.weights import Weights

__all__ = ["ESTIMATORS", "SERVERS", "Adam", "Estimate", "Estimator", "FedAvg", "Server", "Sgd", "Tensors", "Unbiased", "Yogi"]


class Estimator(Protocol):
    """Turns the stream of chunks into one estimate a model. A value: memories are in the state it takes and returns."""

    def init(self, models: list[Weights], clients: int) -> Tensors:
        """The state before the first round."""

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> Any:
        """Empty sums for one round."""

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> None:
        """Take one chunk in; it is not kept."""

    def finish(self, state: Tensors, sums: Any) -> tuple[list[Estimate], Tensors]:
        """Each model's estimate, and the state after the round."""


ESTIMATORS: dict[str, type[Estimator]] = {"unbiased": Unbiased, "fedavg": FedAvg}
SERVERS: dict[str, type[Server]] = {"sgd": Sgd, "adam": Adam, "yogi": Yogi}

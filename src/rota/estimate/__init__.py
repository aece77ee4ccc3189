"""From the clients' updates to the new models: estimators, and the server optimisers that apply what they say."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rota.arrays import Array
from rota.engine.local import Correction
from rota.estimate.average import Estimate, FedAvg, Unbiased
from rota.estimate.memory import Tensors
from rota.estimate.scaffold import Scaffold
from rota.estimate.server import Adam, Server, Sgd, Yogi
from rota.estimate.stale import FedStale, FedVarp, Mifa, StaleVr, StaleVre
from rota.plan import Chunk, Plan
from rota.weights import Weights

__all__ = [
    "ESTIMATORS",
    "SERVERS",
    "Adam",
    "Correcting",
    "Estimate",
    "Estimator",
    "Expecting",
    "FedAvg",
    "FedStale",
    "FedVarp",
    "Mifa",
    "Recalling",
    "Scaffold",
    "Server",
    "Sgd",
    "StaleVr",
    "StaleVre",
    "Tensors",
    "Unbiased",
    "Yogi",
]


class Estimator(Protocol):
    """Turns the stream of chunks into one estimate a model. A value: memories are in the state it takes and returns."""

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        """The state before the first round; `shares` is d[s, i], client i's share of model s's data."""

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> Any:
        """Empty sums for one round."""

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> Array | None:
        """Take one chunk in; it is not kept. The norms of what is weighed of its rows, where that is not the updates themselves."""

    def finish(self, state: Tensors, sums: Any) -> tuple[list[Estimate], Tensors]:
        """Each model's estimate, and the state after the round."""


@runtime_checkable
class Recalling(Protocol):
    """An estimator that weighs not an update but what it differs by from one that it remembers: samplers then learn from that."""

    @property
    def numbers(self) -> int:
        """How many numbers a client sends to say its norm: one more if the server learns another from it."""

    def residual(self, state: Tensors, plan: Plan, chunk: Chunk) -> tuple[Array, Tensors]:
        """The norms of what would be weighed of a chunk's rows, and the state that weighs it so: updates that are known before anybody is
        drawn may change it. The plan's weights are the shares of the round.
        """


@runtime_checkable
class Expecting(Protocol):
    """An estimator that can say without asking anybody how much pairs will differ from what it remembers."""

    def expected(self, state: Tensors, rows: Plan) -> Array:
        """The expected norms of what is weighed, NaN where nothing is known."""


@runtime_checkable
class Correcting(Protocol):
    """An estimator that corrects the clients' local steps."""

    @property
    def controls(self) -> int:
        """Vectors as long as the model's parameters that travel each way with every row, beside the model."""

    def correction(self, state: Tensors, plan: Plan) -> Correction:
        """What is added to the gradients of the plan's rows."""


ESTIMATORS: dict[str, type[Estimator]] = {
    "unbiased": Unbiased,
    "fedavg": FedAvg,
    "fedvarp": FedVarp,
    "fedstale": FedStale,
    "stale-vr": StaleVr,
    "stale-vre": StaleVre,
    "mifa": Mifa,
    "scaffold": Scaffold,
}
SERVERS: dict[str, type[Server]] = {"sgd": Sgd, "adam": Adam, "yogi": Yogi}
